import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Plain data, run by itself: the package cannot be imported before its dependencies are installed.
VERSIONS = runpy.run_path(str(ROOT / "ds_mla_ulysses/version.py"))
REQUIREMENTS, OPTIONAL = VERSIONS["REQUIREMENTS"], VERSIONS["OPTIONAL_REQUIREMENTS"]
(MAJOR, OLDEST), (_, NEWEST) = VERSIONS["PYTHON"]

SOURCE = "https://github.com/ds-mla-ulysses/ds-mla-ulysses"
DOCUMENTATION = "https://ds-mla-ulysses.readthedocs.io"


def readme() -> str:
    """README.md with absolute links, since PyPI has no files that relative ones could point to."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"\]\((?![a-z]+:|#)([^)]+)\)"
    text = re.sub(r"(!\[[^\]]*)" + relative, rf"\1]({SOURCE}/raw/main/\2)", text)
    return re.sub(relative, rf"]({SOURCE}/blob/main/\1)", text)


TRAINER = [f"{name}>={OPTIONAL[name][0]}" for name in ("peft", "liger-kernel")]
# No release of trl that is supported runs on Python 3.10.
TRAINER.append(f'trl>={OPTIONAL["trl"][0]}; python_version >= "3.11"')
SHOW = ["matplotlib"]
DOCS = ["mkdocs", "mkdocs-material", "mkdocstrings[python]"]
TEST = [*TRAINER, *SHOW, "pytest"]

setup(
    name="ds-mla-ulysses",
    version=VERSIONS["__version__"],
    description="DeepSpeed Ulysses sequence parallelism for MLA, grouped-query and MoBA models",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The ds_mla_ulysses authors",
    url=SOURCE,
    project_urls={
        "Documentation": DOCUMENTATION,
        "Source": SOURCE,
        "Issues": f"{SOURCE}/issues",
        "Changelog": f"{SOURCE}/blob/main/CHANGELOG.md",
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "deepspeed",
        "ulysses",
        "sequence parallelism",
        "long context",
        "multi-head latent attention",
        "mixture of block attention",
        "transformers",
        "pytorch",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: {MAJOR}.{minor}" for minor in range(OLDEST, NEWEST + 1)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["ds_mla_ulysses", "ds_mla_ulysses.*"]),
    package_data={"ds_mla_ulysses": ["py.typed"]},
    python_requires=f">={MAJOR}.{OLDEST},<{MAJOR}.{NEWEST + 1}",
    install_requires=["packaging", *(f"{name}>={lowest}" for name, (lowest, _) in REQUIREMENTS.items())],
    entry_points={"console_scripts": ["ds-mla-ulysses = ds_mla_ulysses.cli:main"]},
    extras_require={
        "flash": ["flash-attn"],
        "show": SHOW,
        "trainer": TRAINER,
        "docs": DOCS,
        "test": TEST,
        "dev": [*TEST, *DOCS, "build", "mypy", "ruff"],
    },
)
