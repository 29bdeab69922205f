"""The tables and plots that commands write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UlyssesValueError


def table(rows: Sequence[Mapping[str, Any]], first: str) -> list[str]:
    """Returns the lines of a table. Rows that lack columns are written as they are, their last value beyond the column.

    Args:
        rows: by the names of the columns; the longest one has all of them.
        first: the column that is aligned to the left.
    """
    names = max(rows, key=len)
    widths = {
        name: max([len(name), *(len(str(r[name])) for r in rows if name in r and len(r) == len(names))])
        for name in names
    }
    left = max(10, *(len(str(row[first])) for row in rows))
    lines = ["  ".join(name.ljust(left) if name == first else name.rjust(widths[name]) for name in names)]
    for row in rows:
        cells = (
            str(value).ljust(left) if name == first else str(value).rjust(widths[name]) for name, value in row.items()
        )
        lines.append("  ".join(cells))
    return lines


@contextmanager
def figure_file(path: str, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes, and writes the figure to a file at the end of the block.

    Raises:
        ValueError: the name has no suffix, or matplotlib is not installed.
    """
    if not Path(path).suffix:  # matplotlib would append .png and write another file
        raise UlyssesValueError(f"--plot takes the name of a file to write, such as bytes.png, got {path!r}.")
    try:
        import matplotlib
    except ImportError:
        raise UlyssesValueError("--plot needs matplotlib: pip install 'ds-mla-ulysses[show]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(ncols=columns, figsize=size)
    try:
        yield figure, axes
        figure.savefig(path, dpi=120, bbox_inches="tight")
    finally:
        pyplot.close(figure)
