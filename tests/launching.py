"""Scripts as a user starts them: through a launcher, over processes on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCELERATE_CONFIG = ROOT / "configs" / "accelerate_zero3_sp.yaml"


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
        "PYTHONFAULTHANDLER": "1",  # says where a process was that aborts
        "PATH": os.pathsep.join(["/nowhere", str(Path(sys.executable).parent)]),  # no compilers
    }
    return subprocess.run(
        [sys.executable, *map(str, [*command, *words])], capture_output=True, text=True, timeout=200, env=environment
    )
