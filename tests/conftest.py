"""Makes the tests' own modules importable, in pytest and in the rank processes alike."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rank_pool

sys.path[:0] = [path for path in rank_pool.PATHS if path not in sys.path]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
