"""Finds the code blocks of the documentation and the marks that say how each is tested.

A mark is an HTML comment on the line before the block, which neither GitHub nor MkDocs shows:

| mark                        | what the test does                                                                        |
|-----------------------------|-------------------------------------------------------------------------------------------|
| `<!-- test: run -->`        | runs each command of a shell block, shortened and on two processes                         |
| `<!-- test: run SETUP -->`  | the same with prepared files; a Python block runs on two ranks, on names that SETUP makes   |
| `<!-- test: make -->`       | looks whether the Makefile has the targets                                                 |
| `<!-- test: options -->`    | lets each script parse its options, and stops there                                        |
| `<!-- test: no (reason) -->`| nothing                                                                                    |
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "configs" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
_BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S)
_MARK = re.compile(r"(?P<how>run|make|options|no)(?: (?P<setup>\w+))?(?: \((?P<reason>.+)\))?")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: the file, relative to the repository.
        line: the line of the opening fence.
        language: the first word of the fence, such as "python" or "bash".
        code: the text between the fences.
        mark: the text behind "test:", None if the block has no mark.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def parts(self) -> tuple[str, str | None, str | None]:
        """How it is tested, with which setup, and for which reason not.

        Raises:
            ValueError: the mark is missing or malformed.
        """
        found = _MARK.fullmatch(self.mark or "")
        if found is None or (found["how"] == "no") != (found["reason"] is not None):
            raise ValueError(
                f"{self.name} must have a mark such as <!-- test: run --> or <!-- test: no (reason) -->, got {self.mark!r}."
            )
        return found["how"], found["setup"], found["reason"]

    def commands(self) -> list[list[str]]:
        """The commands of a shell block, as words. Comments are left out."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, m.start("info")) + 1, (m["info"].split() or [""])[0], m["code"], m["mark"])
        for m in _BLOCK.finditer(text)
    ]


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page)]
