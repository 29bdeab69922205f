"""Stores the result of `make matrix`: counts for each file of tests, with date and versions.

python tests/matrix_result.py JUNIT.xml FOLDER
"""

import collections
import datetime
import importlib.metadata
import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "trl", "peft", "triton")


def main(report: str, folder: str) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    not_passed = []
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = found.pop() if found else "passed"
        counts[case.get("classname", "")][outcome] += 1
        if outcome != "passed":
            not_passed.append(f"{case.get('classname')}::{case.get('name')}: {outcome}")
    date = datetime.date.today().isoformat()
    result = {
        "date": date,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "tests": {name: dict(counter) for name, counter in sorted(counts.items())},
        "not passed": not_passed,
    }
    path = Path(folder) / f"matrix_{date}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{path}: {sum(sum(counter.values()) for counter in counts.values())} tests, {len(not_passed)} not passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
