"""What importing costs, which way dependencies run, what the package says of itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ds_mla_ulysses

PACKAGE = Path(ds_mla_ulysses.__file__).parent
LAYERS = ["comm", "layout", "planner", "moba", "attention", "hf", "integrations"]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_import_starts_nothing():
    done = python(
        "import sys, ds_mla_ulysses\n"
        "assert not {'deepspeed', 'transformers', 'flash_attn', 'triton'} & set(sys.modules)\n"
        "assert 'torch' not in sys.modules or not sys.modules['torch'].distributed.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_are_documented():
    for name in ds_mla_ulysses.__all__:
        value = getattr(ds_mla_ulysses, name)
        assert name == "__version__" or value.__doc__, name
    assert set(ds_mla_ulysses.__all__) <= set(dir(ds_mla_ulysses))
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        ds_mla_ulysses.paralelize  # noqa: B018


def imports(path):
    """(relative target folder or absolute module, line) of every import in a file of the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parents = [*path.relative_to(PACKAGE).parts[:-1]]
            base = parents[: len(parents) - node.level + 1] if node.level else None
            yield (".".join([*base, node.module or ""]) if base is not None else node.module), node.level > 0
        elif isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_run_one_way(path):
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return
    layer = LAYERS.index(parts[0])
    for target, inside in imports(path):
        if inside and target == "version":  # plain numbers, for everybody
            continue
        if inside:
            assert LAYERS.index(target.split(".")[0]) <= layer, f"{path} imports {target}"
        elif target.split(".")[0] == "transformers":
            assert parts[0] in ("hf", "integrations"), f"{path} imports transformers"
        elif target.split(".")[0] == "deepspeed":
            assert parts[0] == "integrations" or path.name == "base.py", f"{path} imports deepspeed"


def test_versions_are_those_of_setup_and_of_the_constraints():
    """The doctor has them as numbers of its own, since it also runs where nothing is installed."""
    import re

    from ds_mla_ulysses.doctor import NEEDED
    from ds_mla_ulysses.version import TESTED_VERSIONS

    setup = (PACKAGE.parent / "setup.py").read_text()
    required = setup[setup.index("install_requires") : setup.index("entry_points")]
    assert dict(re.findall(r'"([a-z]+)>=([0-9.]+)"', required)) == NEEDED
    pinned = dict(re.findall(r"^([a-z]+)==(\S+)", (PACKAGE.parent / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in TESTED_VERSIONS} == TESTED_VERSIONS
