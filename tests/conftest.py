"""Makes the tests' own modules importable, in pytest and in the rank processes alike."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS, *(TESTS / name for name in ("unit", "ranks", "hf", "deepspeed"))):
    sys.path.insert(0, str(folder))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
