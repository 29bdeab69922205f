"""The process that has imported torch, transformers and DeepSpeed, and from which rank processes are forked.

    python -m ds_mla_ulysses.checking.worker

It reads requests from its standard input and answers with reports, one a line, until the input ends. It has one thread,
since a fork would not take others along.
"""

from __future__ import annotations

import importlib
import os
import sys

#: Loaded before the first fork, so that no rank has to.
_LOADED_FIRST = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def main() -> None:
    """Answers requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modelling code prints is no answer
    parent = os.getppid()
    import torch

    from .ranks import run_check
    from .request import Request

    for name in _LOADED_FIRST:
        importlib.import_module(name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        answers.write(run_check(Request.from_json(line), parent).to_json() + "\n")
        answers.flush()
    os._exit(0)  # nothing is left to do; the interpreter would take seconds to end


if __name__ == "__main__":
    main()
