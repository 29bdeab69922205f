"""Scripts as a user starts them: through a launcher, over processes on the CPU; or on the ranks of a pool."""

import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

from rank_pool import run_ranks

ROOT = Path(__file__).parents[1]
ACCELERATE_CONFIG = ROOT / "configs" / "accelerate_zero3_sp.yaml"


def run_script(processes, *words):
    """Runs a script on the ranks of a pool, which have already imported the large libraries.

    Returns the same as `launch`: the output of rank 0, and the exit code of the first rank that failed.
    """
    answers = run_ranks(processes, _script, [str(word) for word in words], timeout=200)
    code = next((code for code, _ in answers if code), 0)
    return subprocess.CompletedProcess(words, code, stdout=answers[0][1], stderr="")


def _script(words):
    from trainer_runs import fresh_state
    from transformers import AttentionInterface, AttentionMaskInterface

    import ds_mla_ulysses

    said, code = io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_state())
        stack.callback(ds_mla_ulysses.uninstall)
        for interface in (
            AttentionInterface,
            AttentionMaskInterface,
        ):  # so that the script can register its names again
            stack.enter_context(mock.patch.dict(interface._global_mapping))
            interface._global_mapping.pop("moba", None)  # earlier tests may have registered it
        stack.enter_context(mock.patch("torch.distributed.destroy_process_group"))  # the group of the pool stays alive
        stack.enter_context(mock.patch.multiple(sys, argv=words, path=[str(Path(words[0]).parent), *sys.path]))
        stack.enter_context(contextlib.redirect_stdout(said))
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code or 0, said.getvalue()


def launch(launcher, *words, processes=2):
    """Runs a script, or `--module` and its name, over processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = {
        "python": [],
        "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", str(processes), "--master_port", port],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port],
        "accelerate": ["-m", "accelerate.commands.launch", "--config_file", ACCELERATE_CONFIG],
    }[launcher]
    if launcher == "accelerate":
        command += ["--num_processes", str(processes), "--main_process_port", port]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",  # prints the stack of a process that aborts
        "PATH": os.pathsep.join(["/nowhere", str(Path(sys.executable).parent)]),  # no compilers
    }
    return subprocess.run(
        [sys.executable, *map(str, [*command, *words])], capture_output=True, text=True, timeout=200, env=environment
    )
