"""Every code block of the documentation runs, or says why not; and what else is promised of the pages."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import doc_setups
import pytest
from doc_blocks import PAGES, ROOT, Block, all_blocks
from launching import run_script
from rank_pool import run_ranks

# Starts processes, or runs for many seconds in all.
pytestmark = pytest.mark.slow

BLOCKS = all_blocks()
#: Options that make the scripts of the documentation short, in front of which stand those of the documentation.
SHORT = {
    "train_long.py": ["--steps", "2", "--seq-len", "127"],
    "train_loop.py": ["--steps", "2", "--seq-len", "63"],
    "train_moba.py": ["--steps", "2", "--seq-len", "63"],
}
_done: set[tuple[str, ...]] = set()


def marked(how: str, *languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.mark and block.parts[0] == how and block.language in languages]


def named(blocks: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=[block.name for block in blocks])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_every_block_is_run_or_has_a_reason(block):
    how, setup, reason = block.parts
    if how == "no":
        assert len(reason) > 10
        for path in re.findall(r"tests/\S+\.py", reason):
            text = (ROOT / path).read_text(encoding="utf-8")
            for script in re.findall(r"\w+\.py|ds_to_universal", block.code):
                assert script in text, f"{block.name} says that {path} runs {script}"
        return
    assert block.language in ("python", "bash"), f"{block.name}: only Python and shell blocks can be run"
    if block.language == "python":
        assert how == "run" and setup in doc_setups.SETUPS, f"{block.name} names no setup that doc_setups.py has"


@named(marked("run", "python"))
def test_python(block, tmp_path):
    run_ranks(2, doc_setups.run_block, block.name, block.code, block.parts[1], str(tmp_path))


@named(marked("run", "bash"))
def test_shell(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("configs", "examples", "benchmarks"):
        if not Path(name).exists():
            Path(name).symlink_to(ROOT / name)
    Path("docs/images").mkdir(parents=True, exist_ok=True)
    if block.parts[1] == "environment":
        run_with_exports(block, folder)
        return
    if block.parts[1] == "checkpoint":
        code = next(b for b in BLOCKS if b.mark == "run check_tag")
        run_ranks(2, doc_setups.run_block, code.name, code.code, "check_tag", str(folder))
    for words in block.commands():
        if tuple(words) not in _done:  # pages repeat each other
            run_command(words)
            _done.add(tuple(words))


def run_with_exports(block, folder):
    *exports, words = block.commands()
    assert all(export[0] == "export" for export in exports)
    assert words[:5] == ["torchrun", "--nproc-per-node", "8", "--module", "ds_mla_ulysses.run"]
    variables = dict(doc_setups.for_two_cpus(export[1]).split("=") for export in exports)
    run_ranks(2, doc_setups.run_module_with_environment, variables, words[5:], str(folder))


def run_command(words: list[str]) -> None:
    """Runs one command in this process or on two ranks, shortened."""
    match words:
        case ["ds-mla-ulysses", *arguments]:
            from ds_mla_ulysses.cli import main

            with contextlib.redirect_stdout(io.StringIO()) as said:
                try:
                    main(arguments)
                except SystemExit as end:
                    assert not end.code, said.getvalue()
            assert said.getvalue().strip()
        case ["deepspeed", "--num_gpus", "2", script, *arguments]:
            result = run_script(2, ROOT / script, *arguments, *SHORT[Path(script).name])
            assert result.returncode == 0, result.stdout + result.stderr
        case ["python", "-m", module, *arguments]:
            with mock.patch.object(sys, "argv", [module, *arguments]), contextlib.redirect_stdout(io.StringIO()):
                runpy.run_module(module, run_name="__main__")
        case ["python", "benchmarks/traffic.py" as script, *arguments]:
            with mock.patch.object(sys, "argv", [script, *arguments]), contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(ROOT / script), run_name="__main__")
        case ["python", *arguments]:
            environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
            done = subprocess.run(
                [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=100
            )
            assert done.returncode == 0, done.stdout + done.stderr
        case _:
            raise AssertionError(f"no way to run {' '.join(words)}: add one here, or mark the block otherwise")
    for i, word in enumerate(words):
        if word in ("--plot", "--out"):
            assert Path(words[i + 1]).stat().st_size > 1000


@named(marked("make", "bash"))
def test_make_targets(block):
    makefile = (ROOT / "Makefile").read_text()
    for make, target, *_ in block.commands():
        assert make == "make" and re.search(rf"^{target}:", makefile, re.M), target


@named(marked("options", "bash"))
def test_options(block, monkeypatch):
    """The scripts take the options; each stops when it has parsed them."""
    import argparse

    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for python, script, *arguments in block.commands():
        assert python == "python"
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert end.value.code == 0, f"{script} refuses {arguments}"


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_files(page):
    """MkDocs checks anchors, and the pages in docs/ only."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paths_of_contributing():
    for path in re.findall(r"tests/[\w/.]*", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


def test_the_api_reference_has_every_public_name():
    import ds_mla_ulysses

    listed = set(re.findall(r"^::: ds_mla_ulysses\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M))
    assert listed == set(ds_mla_ulysses.__all__) - {"__version__"}


def test_the_default_of_checks():
    import inspect

    import ds_mla_ulysses as dmu

    (said,) = re.findall(r'The default is `checks="(\w+)"`', (ROOT / "docs/loop.md").read_text())
    assert {inspect.signature(f).parameters["checks"].default for f in (dmu.parallelize, dmu.install)} == {said}


def test_bytes_of_the_tables():
    """The numbers of DeepSeek-V3 on 8 ranks are those of the planner."""
    found = run_traffic()
    strategies = (ROOT / "docs/strategies.md").read_text()
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    for row in found:
        is_stock = row["strategy"] not in ("packed", "latent_kv", "latent_qkv", "gather_kv")
        elements, share = (
            f"{row['bytes'] // 4:,}",
            "" if is_stock else f"{row['of_stock']:.1%}",
        )  # bf16, both directions
        (line,) = [line for line in strategies.splitlines() if line.startswith("|") and f"| {elements} " in line]
        assert share in line
        name = row["strategy"] if is_stock else f'`"{row["strategy"]}"`'
        (line,) = [line for line in benchmarks.splitlines() if line.startswith(f"| {name} | {row['bytes']:,} bytes")]
        assert share in line


def run_traffic():
    import json

    words = ["traffic.py", "--model", "deepseek-v3", "--sp", "8", "--json"]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / "benchmarks/traffic.py"), run_name="__main__")
    rows = json.loads(said.getvalue())["rows"]
    assert len(rows) == 5
    return rows


def test_a_block_without_a_mark_is_found():
    with pytest.raises(ValueError, match=r"README.md:3 must have a mark"):
        _ = Block("README.md", 3, "bash", "true\n", None).parts
    with pytest.raises(ValueError, match="must have a mark"):
        _ = Block("README.md", 3, "bash", "true\n", "no").parts
