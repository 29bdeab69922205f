"""The version of this package and the releases of other software that it works with.

This file is the only place for these numbers. setup.py and the Makefile run it by itself, before anything is
installed, so it holds plain data and imports nothing. `requirements.check` compares installed packages with it.
"""

__version__ = "0.1.0"

#: The lowest and the highest supported minor release of Python.
PYTHON = ((3, 10), (3, 13))

#: Packages that are always needed, each with the lowest supported and the highest tested release.
#: Older releases are refused; newer ones work with a warning.
REQUIREMENTS = {
    # tests/hf passes with 2.15.0 too.
    "torch": ("2.13.0", "2.13.0"),
    # Before 0.19.6, ZeRO-2 losses and updates can differ from those of one process, and gradients of the tiled loss can
    # fail at ZeRO-3.
    "deepspeed": ("0.19.6", "0.19.8"),
    # 5.15 is the first release with expand_kv in every supported family.
    "transformers": ("5.15.0", "5.24.0"),
    # 1.1.0 is the lowest release that these versions of transformers accept.
    "accelerate": ("1.1.0", "1.15.0"),
}

#: The same for packages that only some features need.
OPTIONAL_REQUIREMENTS = {
    # peft 0.17 cannot be imported with transformers 5.
    "peft": ("0.18.0", "0.21.2"),
    # install() refuses the loss of trl 1.9, 1.12 and 1.14. The loss of 1.15 needs a GPU and was not tried. From 1.15 on,
    # trl needs Python 3.11.
    "trl": ("1.16.0", "1.16.0"),
    # liger-kernel 0.8.0 has no kernels for DeepSeek-V3. The releases up to 0.8.4 were not tried.
    "liger-kernel": ("0.8.5", "0.8.5"),
    # torch 2.13 with CUDA installs triton 3.7.1. No older release was tried.
    "triton": ("3.7.1", "3.9.0"),
}
