"""Compares installed packages with the releases that `version.py` lists.

Every layer may import this module. It imports `packaging` only when a version is compared, so that
`ds-mla-ulysses doctor` also runs where dependencies are missing.
"""

from __future__ import annotations

import importlib.metadata
from typing import Literal

from .version import OPTIONAL_REQUIREMENTS, REQUIREMENTS


def lowest(package: str) -> str:
    """The lowest supported release of `package`."""
    return (REQUIREMENTS | OPTIONAL_REQUIREMENTS)[package][0]


def highest_tested(package: str) -> str:
    """The highest release of `package` that the tests ran with."""
    return (REQUIREMENTS | OPTIONAL_REQUIREMENTS)[package][1]


def installed(package: str) -> str | None:
    """The version of `package` that is installed, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(package: str, version: str | None = None) -> Literal["ok", "too old", "untested"]:
    """Says whether a release of `package` lies in the tested range, below it, or above it.

    Versions are ordered as PEP 440 defines: 0.19.0rc1 is older than 0.19.0, and the local part of 0.19.8+cpu is
    ignored. A version that PEP 440 does not define, such as a branch's name, is "untested".

    Args:
        package: a name in `REQUIREMENTS` or `OPTIONAL_REQUIREMENTS`.
        version: the version to compare; by default the installed one.

    Raises:
        KeyError: `package` is not listed in `version.py`.
        importlib.metadata.PackageNotFoundError: `version` is not given and `package` is not installed.
    """
    from packaging.version import InvalidVersion, Version

    floor, ceiling = Version(lowest(package)), Version(highest_tested(package))
    try:
        found = Version(importlib.metadata.version(package) if version is None else version)
    except InvalidVersion:
        return "untested"
    found = Version(found.public)
    if found < floor:
        return "too old"
    return "ok" if found <= ceiling else "untested"
