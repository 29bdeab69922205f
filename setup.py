import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION_FILE = (ROOT / "ds_mla_ulysses/version.py").read_text()
VERSION = re.search(r'^__version__ = "([^"]+)"', VERSION_FILE, re.MULTILINE).group(1)
README = ROOT / "README.md"

TRAINER = [
    # 0.17 cannot be imported with transformers 5
    "peft>=0.18.0",
    # of 1.9, 1.12 and 1.14 install() refuses the loss; 1.15's needs a GPU and was not tried
    "trl>=1.16.0",
    # 0.8.0 has no kernels for DeepSeek-V3; those in between were not tried
    "liger-kernel>=0.8.5",
]

setup(
    name="ds-mla-ulysses",
    version=VERSION,
    description="DeepSpeed Ulysses sequence parallelism for MLA, grouped-query and MoBA models",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["ds_mla_ulysses*"]),
    python_requires=">=3.10,<3.14",
    install_requires=[
        "torch>=2.13",
        # before 0.19 ZeRO-2 updates differ from one process by a percent, or fail with torch 2.13
        "deepspeed>=0.19.0",
        # the first with expand_kv in every supported family
        "transformers>=5.15.0",
        # the lowest that these transformers accept
        "accelerate>=1.1.0",
    ],
    entry_points={"console_scripts": ["ds-mla-ulysses = ds_mla_ulysses.cli:main"]},
    extras_require={
        "flash": ["flash-attn"],
        "show": ["matplotlib"],
        "trainer": TRAINER,
        "test": [*TRAINER, "matplotlib", "pytest", "ruff"],
    },
)
