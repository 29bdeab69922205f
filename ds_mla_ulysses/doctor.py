"""What is installed, what of it this package can use here, and what to do about the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from .version import TESTED_VERSIONS

#: Lowest versions, as setup.py has them.
NEEDED = {"torch": "2.13", "deepspeed": "0.19.0", "transformers": "5.15.0", "accelerate": "1.1.0"}


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        state: "ok", "note" or "missing".
        what: what was looked at, and what was found.
        to_do: what to do about it; empty if nothing.
    """

    state: str
    what: str
    to_do: str = ""

    def __str__(self) -> str:
        return f"{self.state:>7}  {self.what}" + (f": {self.to_do}" if self.to_do else "")


def examine() -> list[Finding]:
    """All findings, packages first; without torch no others. Starts nothing and keeps nothing."""
    if importlib.util.find_spec("torch") is None:
        return list(_packages())
    return [*_packages(), *_communication(), *_kernels()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version.split("+")[0])[:3])


def _packages() -> Iterator[Finding]:
    python = platform.python_version()
    fits = (3, 10) <= _numbers(python)[:2] < (3, 14)
    yield Finding("ok" if fits else "missing", f"Python {python}", "" if fits else "use 3.10 to 3.13")
    for package, lowest in NEEDED.items():
        found, tested = _version(package), TESTED_VERSIONS[package]
        if found is None or _numbers(found) < _numbers(lowest):
            said = f"{package} {found}" if found else f"no {package}"
            yield Finding("missing", said, f"pip install {package}=={tested}, the version that was tested")
        elif _numbers(found) != _numbers(tested):
            what = "compare one step with one process before you trust it, as examples do with --verify"
            yield Finding("note", f"{package} {found}, tested was {tested}", what)
        else:
            yield Finding("ok", f"{package} {found}")


def _communication() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        yield Finding("ok", f"{torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name()}")
        state = "ok" if dist.is_nccl_available() else "missing"
        yield Finding(
            state,
            f"NCCL {'found' if state == 'ok' else 'not found'}",
            "" if state == "ok" else "install a torch built with it",
        )
    else:
        yield Finding("note", "no GPU", "on CPUs set DS_ACCELERATOR=cpu, and use_cpu=True in TrainingArguments")
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding(
        "ok" if gloo else "missing",
        f"gloo {'found' if gloo else 'not found'}",
        "" if gloo else "install a torch built with it",
    )
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield Finding("ok", f"a C++ compiler, {compiler}")
    else:
        to_do = "optimizers that DeepSpeed compiles (FusedAdam, CPUAdam) need one; torch_adam and SGD do not"
        yield Finding("note", "no C++ compiler", to_do)


def _kernels() -> Iterator[Finding]:
    import torch

    for module, name in (("flash_attn", "flash_attention_2"), ("flash_attn_interface", "flash_attention_3")):
        there = importlib.util.find_spec(module) is not None
        to_do = "" if there else f"attn_implementation={name!r} needs it; 'sdpa' does not"
        yield Finding("ok" if there else "note", f"{module} {'found' if there else 'not found'}", to_do)
    triton = _version("triton")
    to_do = "" if triton else "MoBA's implementation 'triton' needs it; 'torch' and 'flash' do not"
    yield Finding("ok" if triton else "note", f"triton {triton}" if triton else "no triton", to_do)
    from .moba import choose_implementation

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield Finding(
        "ok", f"MoBA in bf16 on {device.type} would run {choose_implementation('auto', device, torch.bfloat16)!r}"
    )
