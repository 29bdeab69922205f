"""Makes the tests' own modules importable, in pytest and in the rank processes alike."""

import gc
import os
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
