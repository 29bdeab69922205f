"""Makes the tests' own modules importable, in pytest and in the rank processes alike."""

import functools
import gc
import inspect
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pytest
import rank_pool

sys.path[:0] = [path for path in rank_pool.PATHS if path not in sys.path]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_runtest_setup():
    rank_pool.freeze_modules()


def pytest_unconfigure():
    gc.unfreeze()  # extensions complain of objects that outlive the interpreter


@pytest.fixture
def one_thread():
    """Small tensors gain nothing from more threads, which lose much under load when they wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


#: How tests say with how many processes they run, in the parameters that they are generated from.
_SIZES = ("size", "ranks", "processes")
_FOUR_RANKS = re.compile(r"(run_ranks|raises_on_ranks|over_ranks|equals_one_process|check|run_script)\(\s*[3-9]")


def pytest_collection_modifyitems(items):
    """Marks tests that need more than two processes or a launcher, by the source of what they call in their file."""
    for item in items:
        source = _source_of(item.function)
        parameters = getattr(item, "callspec", None)
        sizes = [parameters.params.get(name) for name in _SIZES] if parameters else []
        if any(isinstance(size, int) and size > 2 for size in sizes) or _FOUR_RANKS.search(source):
            item.add_marker("four_ranks")
        if re.search(r"\b(launch|subprocess\.run|Popen)\(", source):
            item.add_marker("launcher")
        if "trainer" in item.path.parts:  # each trains with a Trainer, for seconds
            item.add_marker("slow")
        if "compile" in item.name or re.search(r"\.compile\(|torch_compile", source):
            item.add_marker("slow")


@functools.cache
def _source_of(function):
    """The source of a function and of the functions of its file that it names, and so on."""
    todo, seen, sources = [function], set(), []
    while todo:
        found = inspect.unwrap(todo.pop())
        if found in seen:
            continue
        seen.add(found)
        sources.append(inspect.getsource(found))
        names = set(re.findall(r"\w+", sources[-1]))
        for name, value in vars(sys.modules[found.__module__]).items():
            value = getattr(value, "_fixture_function", value)
            if name in names and inspect.isfunction(value) and value.__module__ == found.__module__:
                todo.append(value)
    return "\n".join(sources)
