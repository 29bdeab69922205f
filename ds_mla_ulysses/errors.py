"""The exceptions of this package.

Each of them is a `UlyssesError`, and also the builtin exception that its name ends with, so that `except ValueError`
catches it as well.
"""

from __future__ import annotations


class UlyssesError(Exception):
    """The base of every exception that this package raises."""


class UlyssesValueError(UlyssesError, ValueError):
    """A value, a batch or a setting cannot be right; the message says what was expected, what was found and what to do."""


class UlyssesTypeError(UlyssesError, TypeError):
    """An argument has the wrong type."""


class UlyssesRuntimeError(UlyssesError, RuntimeError):
    """A call came at the wrong time, such as a loss after `restore`, or does not fit what was done before."""
