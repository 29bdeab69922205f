"""Writes docs/supported-models.md and the package's list of tested model types from the newest result of `make families`.

python tests/families/table.py
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweep import CASES_ON_4_RANKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supported-models.md"
TESTED = ROOT / "ds_mla_ulysses" / "hf" / "tested.py"
RESULTS = ROOT / "tests" / "results"
#: Remarks on small models that lack something, by name.
_REMARKS = {"gemma3n": "without its vision model, which needs timm"}
_BATCHES = {"plain": "whole rows", "packed": "packed documents", "left": "left padding", "right": "right padding"}
#: Titles of the tables of models that are not equal, and what they mean.
_OTHERS = {
    "refused": (
        "Refused",
        "`parallelize` raises UnsupportedModelError with this sentence.",
    ),
    "different": (
        "Different",
        "`parallelize` accepts these models, but their numbers are wrong. Do not train them with this package.",
    ),
    "fails": ("Failing", "`parallelize` accepts these models, but a step raises."),
    "not checked": ("Not checked", "No small model of these could be built and run in one process."),
}


def _on_4_ranks(models: dict[str, dict[str, Any]]) -> list[str]:
    """What is said of the checks on 4 ranks; nothing if there were none."""
    found = {name: row["on 4 ranks"] for name, row in models.items() if "on 4 ranks" in row}
    if not found:
        return []
    batches = " and ".join(_BATCHES[name] for name in CASES_ON_4_RANKS)
    others = [f"{_named(name)} ({verdict})" for name, verdict in found.items() if verdict != "equal"]
    equal = len(found) - len(others)
    return [
        f"Those that are equal were also compared on 4 processes, under the first strategy named, with {batches}:",
        f"{equal} are equal there too" + (f"; the others: {', '.join(others)}." if others else "."),
    ]


def newest_result() -> Path:
    """The file of the newest result."""
    return max(RESULTS.glob("families_*.json"))


def page(result: dict[str, Any]) -> str:
    """The text of the page."""
    models: dict[str, dict[str, Any]] = result["models"]
    counts = {v: sum(row["verdict"] == v for row in models.values()) for v in ("equal", *_OTHERS)}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    batches = {tuple(row["batches"]) for row in models.values()}
    ranks = sorted({row["ranks"] for row in models.values()})
    (first, *more) = batches
    compared = ", ".join(_BATCHES[name] for name in first) if not more else "the batches that the result names"
    lines = [
        "# Results by model type",
        "",
        "<!-- Written by tests/families/table.py from tests/results; do not edit. -->",
        "",
        f"[`ds-mla-ulysses check`](check.md) was run on {result['date']} over {len(models)} configs: every model type of",
        "transformers that makes text of text, or of images and text (on text alone, through the whole model), with the defaults",
        "of its config class, and some variants that defaults lack.",
        f"The result is {said}. The versions were {versions}, on Python {result['python']}.",
        "",
        f"Each was compared on {' and '.join(map(str, ranks))} processes with one, with {compared}.",
        *_on_4_ranks(models),
        "A checkpoint may have layers that the defaults lack: check its own config.json.",
        "",
        "## Equal",
        "",
        "The loss, the logits and the gradient of every parameter agree with one process, for these strategies. Models with",
        "`float32` do not run in float64 and were compared within 5e-3, the others within 1e-10.",
        "",
        "| model type | example checkpoint | layers of the small model | strategies |",
        "|---|---|---|---|",
    ]
    for name, row in models.items():
        if row["verdict"] == "equal":
            strategies = ", ".join(f"`{strategy}`" for strategy in row["strategies"])
            low = "" if row["dtype"] == "float64" else f" ({row['dtype']})"
            layers = "; ".join(filter(None, [_layers(row["config"]), _REMARKS.get(name)]))
            lines.append(f"| {_named(name)} | {_checkpoint(row)} | {layers} | {strategies}{low} |")
    for verdict, (title, meaning) in _OTHERS.items():
        found: dict[str, list[str]] = defaultdict(list)
        for name, row in models.items():
            if row["verdict"] == verdict:
                found[_sentence(row)].append(_named(name))
        if found:
            lines += ["", f"## {title}", "", meaning, "", "| why | model types |", "|---|---|"]
            lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(found.items())]
    return "\n".join(lines) + "\n"


def module_of_types(result: dict[str, Any]) -> str:
    """The text of the module with the model types that came out equal, in some config, and wrong in none."""
    verdicts: dict[str, set[str]] = defaultdict(set)
    for name, row in result["models"].items():
        verdicts[name.partition(", ")[0]].add(row["verdict"])
    kinds = [kind for kind, found in sorted(verdicts.items()) if "equal" in found and found <= {"equal", "refused"}]
    lines = [
        '"""Written by tests/families/table.py from the newest result in tests/results; do not edit."""',
        "",
        "#: Model types of which `ds-mla-ulysses check` found a config equal to one process, and none that is wrong.",
        "TESTED = (",
        *(f'    "{kind}",' for kind in kinds),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _named(name: str) -> str:
    kind, _, variant = name.partition(", ")
    return f"`{kind}`" + (f", {variant}" if variant else "")


def _checkpoint(row: dict[str, Any]) -> str:
    return f"`{row['checkpoint']}`" if row.get("checkpoint") else ""


def _layers(config: dict[str, Any]) -> str:
    """The kinds of layers and heads of the small model."""
    kinds = [*dict.fromkeys(config.get("layer_types") or []), *dict.fromkeys(config.get("mlp_layer_types") or [])]
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    words = [", ".join(kinds)] if kinds else []
    words += [f"{heads} heads, {kv_heads} KV"] if heads and kv_heads else []
    words += [f"{config['rope_type']} RoPE"] if "rope_type" in config else []
    words += ["is_decoder"] if config.get("is_decoder") else []
    return "; ".join(words)


def _sentence(row: dict[str, Any]) -> str:
    """The reason without the names of the model, in one line that a table can hold."""
    reason = " ".join(row["reason"].split())
    reason = re.sub(rf"^{re.escape(row['class'])}( \([\w-]+\))?:? ", "", reason) if row["class"] else reason
    if row["verdict"] == "different":
        reason = "see `ds-mla-ulysses check`"
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def main() -> None:
    result = newest_result()
    for file, write in ((PAGE, page), (TESTED, module_of_types)):
        file.write_text(write(json.loads(result.read_text())), encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: from {result.name}")


if __name__ == "__main__":
    main()
