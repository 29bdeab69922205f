"""Draws which blocks each query attends to, with one panel per head.

`python -m ds_mla_ulysses.moba.show --out blocks.png` draws a small example: two documents in one row of tokens that
return to a few topics, so that queries pick blocks on their topic. To draw your own selection:

    from ds_mla_ulysses.moba import moba_select
    from ds_mla_ulysses.moba.show import draw

    draw(moba_select(q, k, cu_seqlens, block_size, top_k), cu_seqlens, block_size).savefig("blocks.png")

This needs matplotlib: `pip install 'ds-mla-ulysses[show]'`.

Letters: T queries · S keys · H query heads · K query and key width · N blocks of a document · J = top_k - 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UlyssesTypeError, UlyssesValueError
from .api import moba_select
from .boundaries import read_documents
from .config import check_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How a query relates to a key. It attends to the keys of its current block and of the chosen blocks.
FUTURE, PASSED_OVER, CURRENT, CHOSEN = range(4)
_COLORS = "#ffffff", "#e4e4e4", "#30638e", "#edae49"
_LABELS = {CURRENT: "current block", CHOSEN: "chosen past block", PASSED_OVER: "past, not attended to"}
#: The picture has a cell for every query and key, so their number is limited.
_MOST_TOKENS = 8192
_COLUMNS = 4


def draw(
    blocks_THJ: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    block_size: int,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
) -> Figure:
    """Draws a figure with one panel per head: keys from left to right, queries from top to bottom.

    Args:
        blocks_THJ: the result of `moba_select`.
        cu_seqlens: the argument of that call, with at most 8192 keys.
        block_size: the argument of that call.
        cu_seqlens_q: the argument of that call.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: an argument has the wrong type.
        ValueError: the arguments do not fit together, or there are too many tokens for a picture.
    """
    cells_HTS = cells(blocks_THJ, cu_seqlens, block_size, cu_seqlens_q)
    return _figure(cells_HTS, *_bounds(blocks_THJ, cu_seqlens, cu_seqlens_q))


def cells(
    blocks_THJ: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    block_size: int,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Returns how each query relates to each key, uint8 [H, T, S] on the CPU.

    A query attends to the keys that are `CURRENT` or `CHOSEN`.

    Args, Raises: as in `draw`.
    """
    check_count("block_size", block_size)
    if not isinstance(blocks_THJ, Tensor):
        raise UlyssesTypeError(f"blocks must be the tensor that moba_select returned, got {type(blocks_THJ).__name__}.")
    if blocks_THJ.ndim != 3 or blocks_THJ.is_floating_point():
        raise UlyssesValueError(
            "blocks must be the tensor that moba_select returned, int [T, H, J], got "
            f"{blocks_THJ.dtype} {tuple(blocks_THJ.shape)}."
        )
    (T, H, _), (cu_q, cu_k) = blocks_THJ.shape, _bounds(blocks_THJ, cu_seqlens, cu_seqlens_q)
    S = int(cu_k[-1]) if len(cu_k) else 0
    if S > _MOST_TOKENS:
        raise UlyssesValueError(f"a picture has room for {_MOST_TOKENS} keys, got {S}: draw fewer documents.")
    out_HTS = torch.full((H, T, S), FUTURE, dtype=torch.uint8)
    for doc in read_documents(cu_q, cu_k, T, S):
        rows, columns = slice(doc.q, doc.q + doc.queries), slice(doc.k, doc.k + doc.keys)
        blocks_HTJ = blocks_THJ[rows].to("cpu", torch.int64).transpose(0, 1)
        position_T1, position_S = torch.arange(doc.offset, doc.keys).unsqueeze(1), torch.arange(doc.keys)
        current_T1 = position_T1 // block_size
        if bool((blocks_HTJ >= current_T1).any()):
            raise UlyssesValueError(
                f"some query of document {doc.k}..{doc.k + doc.keys} picked a block that is not in its past: pass the "
                "cu_seqlens and the block_size of the selection."
            )
        N = -(-doc.keys // block_size)
        chosen_HTN = torch.zeros(H, doc.queries, N + 1, dtype=torch.bool)
        chosen_HTN.scatter_(-1, torch.where(blocks_HTJ < 0, N, blocks_HTJ), True)
        cell_HTS = out_HTS[:, rows, columns].fill_(PASSED_OVER)
        cell_HTS[chosen_HTN[..., position_S // block_size]] = CHOSEN
        cell_HTS.masked_fill_(position_S // block_size == current_T1, CURRENT)
        cell_HTS.masked_fill_(position_S > position_T1, FUTURE)
    return out_HTS


def kept(cells_HTS: Tensor) -> str:
    """Returns a sentence about how many (query, key) pairs of causal attention are attended to."""
    attended, causal = (int((cells_HTS > kind).sum()) for kind in (PASSED_OVER, FUTURE))
    return f"{attended} of {causal} (query, key) pairs of all heads kept ({attended / max(1, causal):.0%})"


def example(tokens: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k, both [T, H, K], and the cu_seqlens of two documents."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    topics, run, width = 5, 24, 32
    topic_T = torch.randint(topics, (-(-tokens // run),), generator=generator).repeat_interleave(run)[:tokens]
    # Each head weighs the topics differently.
    center_THK = (normal(topics, heads, width) * normal(topics, heads, 1).exp())[topic_T]
    q, k = (center_THK + normal(tokens, heads, width) for _ in range(2))
    return q, k, torch.tensor([0, 2 * tokens // 5, tokens])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_mla_ulysses.moba.show",
        description="Draws which blocks each query of a small random example attends to, per head.",
    )
    parser.add_argument("--out", required=True, help="path of the picture, such as blocks.png")
    for name, default, text in (
        ("tokens", 256, "tokens of both documents together"),
        ("block-size", 16, "tokens per block"),
        ("top-k", 3, "blocks per query, including its current block"),
        ("heads", 4, "query heads, one panel each"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the example (default: 0)")
    args = parser.parse_args(arguments)
    if args.tokens > _MOST_TOKENS:
        parser.error(f"a picture has room for {_MOST_TOKENS} tokens, got {args.tokens}")
    q, k, cu_seqlens = example(args.tokens, args.heads, args.seed)
    blocks_THJ = moba_select(q, k, cu_seqlens, args.block_size, args.top_k)
    draw(blocks_THJ, cu_seqlens, args.block_size).savefig(args.out)

    documents = " and ".join(map(str, cu_seqlens.diff().tolist()))
    print(f"documents of {documents} tokens, blocks of {args.block_size}, up to {args.top_k} per query and head")
    print(f"{kept(cells(blocks_THJ, cu_seqlens, args.block_size))}")
    print(f"drawn in {args.out}")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _bounds(
    blocks_THJ: Tensor, cu_k: Tensor | Sequence[int] | None, cu_q: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Returns cu_seqlens_q and cu_seqlens on the CPU."""
    cu_k = torch.tensor([0, len(blocks_THJ)]) if cu_k is None else torch.as_tensor(cu_k).cpu()
    return cu_k if cu_q is None else torch.as_tensor(cu_q).cpu(), cu_k


def _figure(cells_HTS: Tensor, cu_q: Tensor, cu_k: Tensor) -> Figure:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'ds-mla-ulysses[show]'") from error
    H, T, S = cells_HTS.shape
    columns = min(H, _COLUMNS)
    rows = -(-H // columns)
    # Without pyplot there is neither a window nor a figure that the caller has to close.
    figure = Figure(figsize=(3 * columns + 0.6, 3.5 * rows + 0.6), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for head, panel in enumerate(panels[:H]):
        panel.imshow(
            cells_HTS[head].numpy(),
            cmap=ListedColormap(_COLORS), vmin=0, vmax=len(_COLORS) - 1,
            interpolation="nearest", aspect="equal" if T == S else "auto",
        )  # fmt: skip
        for line, bounds in ((panel.axhline, cu_q), (panel.axvline, cu_k)):
            for bound in bounds[1:-1].tolist():
                line(bound - 0.5, color="black", linewidth=0.8)
        panel.set_title(f"head {head}", fontsize=10)
        panel.tick_params(labelsize=8, labelbottom=True)
        if head + columns >= H:
            panel.set_xlabel("key position", fontsize=9)
        if head % columns == 0:
            panel.set_ylabel("query position", fontsize=9)
    for panel in panels[H:]:
        panel.remove()
    legend: list[Patch | Line2D] = [Patch(facecolor=_COLORS[kind], label=label) for kind, label in _LABELS.items()]
    if len(cu_k) > 2:
        legend.append(Line2D([], [], color="black", linewidth=0.8, label="border of documents"))
    figure.suptitle(kept(cells_HTS), fontsize=10)
    figure.legend(handles=legend, loc="outside lower center", ncols=2 if columns == 1 else 4, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    main()
