"""python liger_run.py [FAMILY LOSS]...: a Trainer with Liger kernels over 2 ranks and in one process, compared.

Liger patches classes of the whole process, and its kernels are Triton's, which run on a CPU only if Triton was
told before it is imported: so this is a process of its own. RMSNorm's and SwiGLU's kernels do not run in Triton's
interpreter, which hands them Python numbers.
"""

import os
import sys
from pathlib import Path

os.environ.update(TRITON_INTERPRET="1", DS_ACCELERATOR="cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))
import rank_pool

sys.path[:0] = [path for path in rank_pool.PATHS if path not in sys.path]
from trainer_runs import Hashed, Run, assert_equal, over_ranks, reference, sharded  # noqa: E402


def compare(family: str, fused: bool) -> None:
    kernels = dict(rope=True, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=fused)
    liger = (("use_liger_kernel", True), ("liger_kernel_config", Hashed(kernels)))
    run = Run(family, batch=1, steps=2, args=liger)
    answers = over_ranks(2, run)
    want = reference(run)
    for answer in answers:
        assert_equal(answer, want)
    plain = reference(Run(family, batch=1, steps=2, args=(("seed", 42),)))
    assert_equal(answers[0], plain)
    if fused:
        smoothed = Run(family, batch=1, steps=2, args=(*liger, ("label_smoothing_factor", 0.1)))
        rank_pool.raises_on_ranks(2, ValueError, "switch off fused_linear_cross_entropy", sharded, smoothed)
    print(family, "equal", answers[0]["losses"])


if __name__ == "__main__":
    for family, loss in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compare(family, loss == "fused")
