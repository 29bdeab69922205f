"""Draws which blocks each query attends to, one panel per head.

`python -m ds_mla_ulysses.moba.show --out blocks.png` draws a small example: two documents in one row of tokens that
come back to a few topics, so that queries pick blocks on their topic. For a selection of your own:

    from ds_mla_ulysses.moba import moba_select
    from ds_mla_ulysses.moba.show import draw

    draw(moba_select(q, k, cu_seqlens, block, topk), cu_seqlens, block).savefig("blocks.png")

Needs matplotlib: `pip install 'ds-mla-ulysses[show]'`.

Letters: T queries · S keys · H query heads · K width · N blocks of a document · J = topk - 1 places for past blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .api import moba_select
from .config import check_blocks
from .grid import read_documents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a query has to do with a key.
NOTHING, PASSED_OVER, OWN, CHOSEN = range(4)
_COLORS = "#ffffff", "#e4e4e4", "#30638e", "#edae49"
_LABELS = {OWN: "own block", CHOSEN: "chosen past block", PASSED_OVER: "past, not attended to"}
#: A picture has a cell for every query and key.
_MOST_TOKENS = 8192
_COLUMNS = 4


def draw(
    blocks_THJ: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    block: int,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
) -> Figure:
    """A figure with one panel per head: keys from left to right, queries from top to bottom.

    Args:
        blocks_THJ: what `moba_select` returned.
        cu_seqlens: as given to it; up to 8192 keys.
        block: its `moba_chunk_size`.
        cu_seqlens_q: as given to it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: arguments that do not belong together, or too many tokens for a picture.
    """
    cells_HTS = cells(blocks_THJ, cu_seqlens, block, cu_seqlens_q)
    return _figure(cells_HTS, *_bounds(blocks_THJ, cu_seqlens, cu_seqlens_q))


def cells(
    blocks_THJ: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    block: int,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """What each query has to do with each key, uint8 [H, T, S] on the CPU.

    It attends to what is `OWN` or `CHOSEN`. Arguments and errors as those of `draw`.
    """
    check_blocks(block, 1)
    if blocks_THJ.ndim != 3 or blocks_THJ.is_floating_point():
        raise ValueError(
            f"blocks must be what moba_select returned, [T, H, J], got {blocks_THJ.dtype} {tuple(blocks_THJ.shape)}."
        )
    (T, H, _), (cu_q, cu_k) = blocks_THJ.shape, _bounds(blocks_THJ, cu_seqlens, cu_seqlens_q)
    S = int(cu_k[-1]) if len(cu_k) else 0
    if S > _MOST_TOKENS:
        raise ValueError(f"a picture has room for {_MOST_TOKENS} keys, got {S}: draw some documents of them.")
    out_HTS = torch.full((H, T, S), NOTHING, dtype=torch.uint8)
    for doc in read_documents(cu_q, cu_k, T, S):
        rows, columns = slice(doc.q, doc.q + doc.queries), slice(doc.k, doc.k + doc.keys)
        blocks_HTJ = blocks_THJ[rows].to("cpu", torch.int64).transpose(0, 1)
        position_T1, position_S = torch.arange(doc.offset, doc.keys).unsqueeze(1), torch.arange(doc.keys)
        own_T1 = position_T1 // block
        if bool((blocks_HTJ >= own_T1).any()):
            raise ValueError(
                f"some query of document {doc.k}..{doc.k + doc.keys} picked a block that is not in its past: give the "
                "cu_seqlens and the block size of the selection."
            )
        N = -(-doc.keys // block)
        chosen_HTN = torch.zeros(H, doc.queries, N + 1, dtype=torch.bool)
        chosen_HTN.scatter_(-1, torch.where(blocks_HTJ < 0, N, blocks_HTJ), True)
        cell_HTS = out_HTS[:, rows, columns].fill_(PASSED_OVER)
        cell_HTS[chosen_HTN[..., position_S // block]] = CHOSEN
        cell_HTS.masked_fill_(position_S // block == own_T1, OWN)
        cell_HTS.masked_fill_(position_S > position_T1, NOTHING)
    return out_HTS


def kept(cells_HTS: Tensor) -> str:
    """How many (query, key) pairs of causal attention are attended to."""
    attended, causal = (int((cells_HTS > kind).sum()) for kind in (PASSED_OVER, NOTHING))
    return f"{attended} of {causal} (query, key) pairs of all heads kept ({attended / max(1, causal):.0%})"


def example(tokens: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [T, H, K], and the cu_seqlens of two documents."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    topics, run, width = 5, 24, 32
    topic_T = torch.randint(topics, (-(-tokens // run),), generator=generator).repeat_interleave(run)[:tokens]
    # Every head hears some topics louder than others.
    center_THK = (normal(topics, heads, width) * normal(topics, heads, 1).exp())[topic_T]
    q, k = (center_THK + normal(tokens, heads, width) for _ in range(2))
    return q, k, torch.tensor([0, 2 * tokens // 5, tokens])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ds_mla_ulysses.moba.show",
        description="Draws which blocks each query of a small random example attends to, per head.",
    )
    parser.add_argument("--out", required=True, help="the picture, such as blocks.png")
    for name, default, text in (
        ("tokens", 256, "of both documents together"),
        ("block", 16, "tokens per block (moba_chunk_size)"),
        ("topk", 3, "blocks per query, its own one counted (moba_topk)"),
        ("heads", 4, "query heads, one panel each"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{text}; {default}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the example; 0")
    args = parser.parse_args(arguments)
    if args.tokens > _MOST_TOKENS:
        parser.error(f"a picture has room for {_MOST_TOKENS} tokens, got {args.tokens}")
    q, k, cu_seqlens = example(args.tokens, args.heads, args.seed)
    blocks_THJ = moba_select(q, k, cu_seqlens, args.block, args.topk)
    draw(blocks_THJ, cu_seqlens, args.block).savefig(args.out)

    documents = " and ".join(map(str, cu_seqlens.diff().tolist()))
    print(f"documents of {documents} tokens, blocks of {args.block}, up to {args.topk} per query and head")
    print(f"{kept(cells(blocks_THJ, cu_seqlens, args.block))}")
    print(f"drawn in {args.out}")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, got {text!r}")
    return int(text)


def _bounds(blocks_THJ: Tensor, cu_k, cu_q) -> tuple[Tensor, Tensor]:
    """Both cu_seqlens on the CPU."""
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
    # Not by pyplot: no window, no state that the caller has to close.
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
    legend = [Patch(facecolor=_COLORS[kind], label=label) for kind, label in _LABELS.items()]
    if len(cu_k) > 2:
        legend.append(Line2D([], [], color="black", linewidth=0.8, label="border of documents"))
    figure.suptitle(kept(cells_HTS), fontsize=10)
    figure.legend(handles=legend, loc="outside lower center", ncols=2 if columns == 1 else 4, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    main()
