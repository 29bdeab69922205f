"""`ds-mla-ulysses doctor`: what is installed, what this package can use here, and how to fix the rest."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ..requirements import check, highest_tested, installed, lowest
from ..version import PYTHON, REQUIREMENTS

_COMPARE = "compare one step with one process before you trust it, as the examples do with --verify"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        state: "ok", "note" or "missing".
        what: what was examined, and what was found.
        to_do: what to do about it; empty if there is nothing to do.
    """

    state: str
    what: str
    to_do: str = ""

    def __str__(self) -> str:
        return f"{self.state:>7}  {self.what}" + (f": {self.to_do}" if self.to_do else "")


def examine() -> list[Finding]:
    """Returns all findings, packages first. It starts nothing, and without torch it examines packages only."""
    if importlib.util.find_spec("torch") is None:
        return list(_packages())
    return [*_packages(), *_communication(), *_kernels()]


def _packages() -> Iterator[Finding]:
    oldest, newest = (".".join(map(str, version)) for version in PYTHON)
    python = ".".join(map(str, sys.version_info[:3]))
    fits = PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]
    yield Finding("ok" if fits else "missing", f"Python {python}", "" if fits else f"use {oldest} to {newest}")
    if importlib.util.find_spec("packaging") is None:
        yield Finding("missing", "packaging is not installed", "pip install packaging; it reads the versions below")
        for package in REQUIREMENTS:
            found = installed(package)
            state, what = ("note", f"{package} {found}") if found else ("missing", f"{package} is not installed")
            yield Finding(state, what, f"{lowest(package)} to {highest_tested(package)} were tested")
        return
    for package in REQUIREMENTS:
        yield _package(package)


def _package(package: str) -> Finding:
    found, tested = installed(package), highest_tested(package)
    install = f"pip install {package}=={tested}, the highest tested version"
    if found is None:
        return Finding("missing", f"{package} is not installed", install)
    compared = check(package, found)
    if compared == "too old":
        return Finding("missing", f"{package} {found}, but at least {lowest(package)} is needed", install)
    if compared == "untested":
        return Finding("note", f"{package} {found}, tested are {lowest(package)} to {tested}", _COMPARE)
    return Finding("ok", f"{package} {found}")


def _communication() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        yield Finding("ok", f"{torch.cuda.device_count()} GPUs, {torch.cuda.get_device_name()}")
        yield _backend("NCCL", dist.is_available() and dist.is_nccl_available())
    else:
        yield Finding("note", "no GPU", "on CPUs set DS_ACCELERATOR=cpu, and use_cpu=True in TrainingArguments")
    yield _backend("gloo", dist.is_available() and dist.is_gloo_available())
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield Finding("ok", f"a C++ compiler, {compiler}")
    else:
        to_do = "DeepSpeed needs one to compile optimizers (FusedAdam, CPUAdam); torch_adam and SGD work without it"
        yield Finding("note", "no C++ compiler", to_do)


def _backend(name: str, is_there: bool) -> Finding:
    """The finding about a communication backend that torch is built with or without."""
    if is_there:
        return Finding("ok", f"{name} found")
    return Finding("missing", f"{name} not found", "install a build of torch that contains it")


def _kernels() -> Iterator[Finding]:
    import torch

    for module, name in (("flash_attn", "flash_attention_2"), ("flash_attn_interface", "flash_attention_3")):
        if importlib.util.find_spec(module) is None:
            yield Finding(
                "note", f"{module} not found", f"attn_implementation={name!r} needs it; 'sdpa' works without it"
            )
        else:
            yield Finding("ok", f"{module} found")
    yield _triton()
    from ..moba import choose_implementation

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    implementation = choose_implementation("auto", device, torch.bfloat16)
    yield Finding("ok", f"MoBA in bf16 on {device.type} would run {implementation!r}")


def _triton() -> Finding:
    found = installed("triton")
    if found is None:
        to_do = "MoBA's implementation 'triton' needs it; 'torch' and 'flash' work without it"
        return Finding("note", "triton is not installed", to_do)
    if importlib.util.find_spec("packaging") is not None and check("triton", found) != "ok":
        return Finding("note", f"triton {found}, tested was {highest_tested('triton')}", _COMPARE)
    return Finding("ok", f"triton {found}")
