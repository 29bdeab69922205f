"""The cost of an import, the direction of dependencies, supported versions, and state that belongs to the process."""

import ast
import importlib.metadata
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import ds_mla_ulysses
from ds_mla_ulysses.requirements import check
from ds_mla_ulysses.version import OPTIONAL_REQUIREMENTS, PYTHON, REQUIREMENTS

PACKAGE = Path(ds_mla_ulysses.__file__).parent
LAYERS = ["comm", "layout", "planner", "moba", "attention", "hf", "integrations", "checking", "cli"]
#: Files at the top that every layer may import.
COMMON = ("version", "requirements", "process_state", "errors")


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
    """(target as a path from the package or as an absolute module, whether it is inside) for every import of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            parents = [*path.relative_to(PACKAGE).parts[:-1]]
            base = parents[: len(parents) - node.level + 1] if node.level else None
            if base is None:
                yield node.module, False
            elif node.module:
                yield ".".join([*base, node.module]), True
            else:
                yield from ((".".join([*base, alias.name]), True) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)


FILES = pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))


@FILES
def test_dependencies_run_one_way(path):
    parts = path.relative_to(PACKAGE).parts
    for target, inside in imports(path):
        top = target.split(".")[0]
        assert not target.startswith("ds_mla_ulysses"), f"{path} imports {target}: imports inside are relative"
        if len(parts) == 1:
            assert not (inside and top == "cli"), f"{path} imports {target}"
        elif inside:
            assert target in COMMON or LAYERS.index(top) <= LAYERS.index(parts[0]), f"{path} imports {target}"
        elif top == "transformers":
            assert parts[0] in ("hf", "integrations", "checking"), f"{path} imports transformers"
        elif top == "deepspeed":
            assert parts[0] == "integrations" or path.name == "base.py", f"{path} imports deepspeed"


@pytest.mark.parametrize(
    "package,version,answer",
    [
        ("deepspeed", "0.18.9", "too old"),
        ("deepspeed", "0.19.6rc1", "too old"),
        ("deepspeed", "0.19.6.dev3+gabcdef", "too old"),
        ("deepspeed", "0.19.6", "ok"),
        ("deepspeed", "0.19.6.0", "ok"),
        ("deepspeed", "0.19.8", "ok"),
        ("deepspeed", "0.19.8+local", "ok"),
        ("deepspeed", "0.19.9", "untested"),
        ("deepspeed", "0.20rc1", "untested"),
        ("deepspeed", "1.0", "untested"),
        ("deepspeed", "main", "untested"),
        ("torch", "2.13.0+cu130", "ok"),
        ("torch", "2.9.1", "too old"),
        ("transformers", "5.15.0", "ok"),
        ("transformers", "5.9.0", "too old"),
        ("trl", "1.15.0", "too old"),
    ],
)
def test_versions_are_compared_as_versions(package, version, answer):
    assert check(package, version) == answer


def test_installed_versions_are_compared_by_default(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"deepspeed": "0.19.6rc1"}.__getitem__)
    assert check("deepspeed") == "too old"
    with pytest.raises(KeyError, match="numpy"):
        check("numpy", "2.0")


def test_every_lower_bound_is_inside_its_tested_range():
    for package, (lowest, highest) in (REQUIREMENTS | OPTIONAL_REQUIREMENTS).items():
        assert check(package, lowest) == check(package, highest) == "ok"


@pytest.mark.parametrize("version,is_refused", [("0.18.9", True), ("0.19.6rc1", True), ("0.20rc1", False)])
def test_an_engine_is_refused_below_the_lower_bound_only(version, is_refused, monkeypatch):
    import deepspeed
    from torch import nn

    from ds_mla_ulysses.integrations import deepspeed as integration

    class Reached(Exception):
        """The check of versions has passed."""

    def settings_are_checked(*_):
        raise Reached

    monkeypatch.setattr(deepspeed, "__version__", version)
    monkeypatch.setattr(integration, "_check_settings", settings_are_checked)
    model = nn.Linear(2, 2)
    handle = SimpleNamespace(is_restored=False, model=model)
    message = rf"With DeepSpeed {version} the updates differ.*install deepspeed >= 0.19.6"
    with pytest.raises(RuntimeError, match=message) if is_refused else pytest.raises(Reached):
        integration.build_engine(deepspeed.initialize, handle, {}, {"model": model})


#: Functions of torch.distributed that move data between ranks.
COLLECTIVES = re.compile(
    r"all_gather|all_reduce|all_to_all|barrier|broadcast|gather|irecv|isend|monitored_barrier|recv|reduce|scatter|send"
)


def collectives_called(source):
    """Lines with a collective of torch, however its module was imported."""
    tree, found = ast.parse(source), []
    modules, functions = {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("torch"):
            inside = node.module.startswith("torch.distributed")
            modules |= {a.asname or a.name for a in node.names if inside or a.name == "distributed"}
            functions |= {a.asname or a.name for a in node.names if inside and COLLECTIVES.match(a.name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_collective = owner in modules or owner.startswith("torch.distributed.")
            if (is_collective and COLLECTIVES.match(node.attr)) or node.attr == "_c10d_functional":
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Name) and node.id in functions:
            found.append(f"line {node.lineno}: {node.id}")
    return found


@FILES
def test_collectives_are_called_in_one_place(path):
    """`comm` counts them. The docstring of `TrafficMeter` names the other files."""
    found = collectives_called(path.read_text())
    name = str(path.relative_to(PACKAGE))
    if name in ("planner/auto.py", "verify.py", "checking/compare.py"):
        assert found and f"`{name}`" in ds_mla_ulysses.TrafficMeter.__doc__
    elif name in ("comm/agreement.py", "comm/collectives.py"):
        assert found
    else:
        assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast_object_list([x])",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import reduce_scatter_tensor as rs\nrs(x, y)",
        "import torch.distributed.nn.functional as fn\nfn.all_gather(x)",
        "from torch.distributed.nn import functional\nfunctional.all_gather(x)",
        "import torch.distributed._functional_collectives as funcol\nfuncol.all_to_all_single(x)",
        "import torch\ntorch.ops._c10d_functional.wait_tensor(x)",
        "import torch.distributed as dist\nexchange = dist.all_to_all_single",
    ],
)
def test_collectives_are_found(source):
    assert len(collectives_called(source)) == 1


def test_other_functions_of_torch_distributed_are_no_collectives():
    assert not collectives_called("import torch.distributed as dist\ndist.get_rank(), dist.new_group(), x.gather(1)")


#: The tables of what `install` replaces: in the documentation and at the top of the code's table.
TABLES = {
    "docs/how-it-works.md": "## What `install` patches\n",
    "ds_mla_ulysses/integrations/install.py": "These symbols are replaced",
}


@pytest.mark.parametrize("file", TABLES)
def test_the_table_of_replaced_symbols_is_that_of_the_code(file):
    from ds_mla_ulysses.integrations.accelerate import RegisteredModels
    from ds_mla_ulysses.integrations.install import symbols_of

    always, all_symbols = (
        {f"{symbol.module}.{symbol.path}" for symbol in symbols_of(RegisteredModels({}), sp_in_eval=sp_in_eval)}
        for sp_in_eval in (False, True)
    )
    text = (PACKAGE.parent / file).read_text().partition(TABLES[file])[2]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().splitlines()[2:]
    said = []
    for row in rows:
        cell = row.split("|")[1]
        packages, names = cell.partition(":")[0], re.findall("`([^`]+)`", cell.partition("(with")[0])
        found = [
            full
            for full in all_symbols
            if any(full.startswith(package.strip() + ".") for package in packages.split(","))
            and any(full.endswith("." + name) for name in names)
        ]
        assert len(found) == len(names) * len(packages.split(",")), row
        assert all((full not in always) == ("(with `sp_in_eval`)" in cell) for full in found), row
        said += found
    assert sorted(said) == sorted(all_symbols)


def metadata_of_setup(monkeypatch):
    """The arguments that setup.py gives to `setup`."""
    import setuptools

    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(PACKAGE.parent / "setup.py"))
    return given


def test_setup_has_the_versions_of_the_package(monkeypatch):
    given = metadata_of_setup(monkeypatch)
    required = {name: f">={lowest}" for name, (lowest, _) in REQUIREMENTS.items()}
    assert given["install_requires"] == ["packaging", *(name + bound for name, bound in required.items())]
    trainer = [f"{name}>={OPTIONAL_REQUIREMENTS[name][0]}" for name in ("peft", "liger-kernel", "trl")]
    trainer[-1] += '; python_version >= "3.11"'
    assert given["extras_require"]["trainer"] == trainer
    assert given["version"] == ds_mla_ulysses.__version__
    assert given["python_requires"] == ">=3.10,<3.14" and PYTHON == ((3, 10), (3, 13))
    of_python = [c.rpartition(" ")[2] for c in given["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert of_python == ["3.10", "3.11", "3.12", "3.13"]


def test_setup_ships_every_package_and_makes_links_absolute(monkeypatch):
    given = metadata_of_setup(monkeypatch)
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    assert {name.replace(".", "/") for name in given["packages"]} == set(map(str, folders))
    assert given["package_data"] == {"ds_mla_ulysses": ["py.typed"]} and (PACKAGE / "py.typed").exists()
    links = re.findall(r"\]\(([^)]+)\)", given["long_description"])
    assert links and all(link.startswith(("https://", "#")) for link in links), links


def test_pinned_versions_are_tested_ones():
    """Python 3.10 has pins of its own, which may be older than the highest tested release, but inside its range."""
    lines = (PACKAGE.parent / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for package, (_, highest) in (REQUIREMENTS | OPTIONAL_REQUIREMENTS).items():
        versions = [bound.version for pin in pins if pin.name == package for bound in pin.specifier]
        assert highest in versions and all(check(package, version) == "ok" for version in versions), package
    for python in ("3.10", "3.11", "3.12", "3.13"):
        names = [pin.name for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python})]
        missing = {"trl"} if python == "3.10" else set()
        assert len(names) == len(set(names)) and set(names) == {pin.name for pin in pins} - missing


# Methods that change a list, a dict, a set or a counter.
MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def names_bound_in(function):
    """Arguments and variables of a function, which hide names of the module."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    bound = {argument.arg for argument in every if argument is not None}
    return bound | {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def root(node):
    """The name at the left of `name.attribute[index]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes_of_module_state(source):
    """Lines in which a function of a module changes what a name at its module level holds."""
    tree = ast.parse(source)
    # Plain data and objects that the module made itself or took from another module of the package.
    held = {"PROCESS"}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            held |= {alias.asname or alias.name for alias in node.names}
    found = []

    def visit(node, visible):
        if isinstance(node, SCOPES):
            visible = visible - names_bound_in(node)
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if isinstance(node, ast.Attribute | ast.Subscript) and is_stored and root(node) in visible:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            if root(node.func) in visible:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        for child in ast.iter_child_nodes(node):
            visit(child, visible)

    for node in tree.body:
        visit(node, held)
    return found


#: The files that may use `PROCESS`, whose docstring gives the reasons.
USES_PROCESS_STATE = {"comm/traffic.py", "integrations/install.py"}


@FILES
def test_process_wide_state_is_in_one_place(path):
    changes = changes_of_module_state(path.read_text())
    if str(path.relative_to(PACKAGE)) in USES_PROCESS_STATE:
        assert changes and all("PROCESS." in change for change in changes), changes
    else:
        assert not changes, changes


@pytest.mark.parametrize(
    "source",
    [
        "_cache = {}\ndef f(x):\n    _cache[x] = 1",
        "_cache: dict = dict()\ndef f(x):\n    del _cache[x]",
        "_seen = set()\nclass A:\n    def f(self):\n        _seen.add(self)",
        "_counts = [0]\ndef f():\n    _counts[0] += 1",
        "_current = None\ndef f(x):\n    global _current\n    _current = x",
        "from .other import STATE\ndef f(x):\n    STATE.value = x",
        "from .other import STATE\ndef f(x):\n    STATE.table['a'].append(x)",
    ],
)
def test_changes_of_module_state_are_found(source):
    assert len(changes_of_module_state(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "_table = {'a': 1}\ndef f(x):\n    return _table[x]",
        "_table = {}\ndef f(_table):\n    _table['a'] = 1",
        "class A:\n    def f(self):\n        self.rows = []\n        self.rows.append(1)",
        "import deepspeed\ndef f(x):\n    deepspeed.initialize = x",
    ],
)
def test_other_changes_are_not_module_state(source):
    assert not changes_of_module_state(source)


@FILES
def test_exceptions_are_the_packages(path):
    """`except UlyssesError` catches whatever the package raises on purpose."""
    builtin = ("ValueError", "TypeError", "RuntimeError", "Exception")
    made = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [f"line {c.lineno}" for c in made if isinstance(c.func, ast.Name) and c.func.id in builtin]


def test_exceptions_are_builtin_ones_too():
    from ds_mla_ulysses import errors

    assert issubclass(ds_mla_ulysses.UnsupportedModelError, (errors.UlyssesError, ValueError))
    for name, builtin in (("Value", ValueError), ("Type", TypeError), ("Runtime", RuntimeError)):
        error = getattr(errors, f"Ulysses{name}Error")
        assert issubclass(error, ds_mla_ulysses.UlyssesError) and issubclass(error, builtin)
