"""The picture of a selection: its cells agree with the masks, and its panels show the cells."""

import sys

import pytest
import torch
from moba_cases import inputs, matrix, product

from ds_mla_ulysses.moba import moba_select, show
from ds_mla_ulysses.moba.boundaries import read_documents
from ds_mla_ulysses.moba.reference import attention_mask


def masks(q, k, cu_q, cu_k, block_size, top_k):
    """Returns three bool [H, T, S]: attended to by the oracle, in the past, in the current block."""
    H, T, S = q.shape[1], len(q), len(k)
    attended, past, current = (torch.zeros(H, T, S, dtype=torch.bool) for _ in range(3))
    for doc in read_documents(cu_q, cu_k, T, S):
        rows, columns = slice(doc.q, doc.q + doc.queries), slice(doc.k, doc.k + doc.keys)
        for out, top_k_ in ((attended, top_k), (past, doc.keys), (current, 1)):
            mask = attention_mask(q[rows], k[columns], doc.offset, block_size, top_k_)
            out[:, rows, columns] = mask.transpose(0, 1)
    return attended, past, current


@product(block_size=[1, 8, 19, 64], last=[False, True], top_k=[1, 2, 3])
def test_cells(block_size, last, top_k):
    cu_k = torch.tensor([0, 50, 50, 57, 150])
    cu_q = torch.tensor([0, 13, 13, 14, 80]) if last else cu_k
    q, k, _ = (x.detach() for x in inputs(150, 3, T=int(cu_q[-1])))
    blocks = moba_select(q, k, cu_k, block_size, top_k, cu_seqlens_q=cu_q)
    cells = show.cells(blocks, cu_k, block_size, cu_q)
    attended, past, current = masks(q, k, cu_q, cu_k, block_size, top_k)
    assert torch.equal(cells == show.CURRENT, current)
    assert torch.equal(cells == show.CHOSEN, attended & ~current)
    assert torch.equal(cells == show.PASSED_OVER, past & ~attended)
    assert torch.equal(cells == show.FUTURE, ~past)
    pairs, causal = int(attended.sum()), int(past.sum())
    assert show.kept(cells) == f"{pairs} of {causal} (query, key) pairs of all heads kept ({pairs / causal:.0%})"


def test_selections_of_others():
    """Selections of another gate, which picks no blocks, or any blocks in any order."""
    blocks = torch.tensor([[[-1, -1], [-1, 1], [1, 0], [-1, 0]]], dtype=torch.int64).expand(30, 4, 2).clone()
    blocks[:20] = -1
    cells = show.cells(blocks, None, 10)
    chosen = (cells == show.CHOSEN)[:, 20:].all(1)  # the queries of one block pick the same
    for head, picked in enumerate(([], [1], [0, 1], [0])):
        assert chosen[head].nonzero().flatten().tolist() == [s for n in picked for s in range(10 * n, 10 * n + 10)]
        assert int((cells[head] == show.CHOSEN).sum()) == 100 * len(picked)


@pytest.mark.parametrize(
    "heads,panels", [pytest.param(1, (1, 1), marks=matrix), pytest.param(3, (1, 3), marks=matrix), (6, (2, 4))]
)
def test_panels_are_the_cells(heads, panels):
    pytest.importorskip("matplotlib")
    q, k, cu = show.example(90, heads, 1)
    blocks = moba_select(q, k, cu, 10, 3)
    figure = show.draw(blocks, cu, 10)
    assert len(figure.axes) == heads
    assert tuple(figure.axes[0].get_gridspec().get_geometry()) == panels
    for head, (axes, cells) in enumerate(zip(figure.axes, show.cells(blocks, cu, 10), strict=True)):
        assert axes.get_title() == f"head {head}"
        (image,) = axes.images
        assert (image.get_array() == cells.numpy()).all() and image.get_clim() == (0, 3)
        horizontal, vertical = (line.get_data() for line in axes.lines)
        assert set(horizontal[1]) == set(vertical[0]) == {int(cu[1]) - 0.5}
    assert show.kept(show.cells(blocks, cu, 10)) in figure.get_suptitle()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["current block", "chosen past block", "past, not attended to", "border of documents"]


def test_one_document_and_the_last_queries():
    pytest.importorskip("matplotlib")
    q, k, _ = (x.detach() for x in inputs(60, 2))
    blocks = moba_select(q, k, None, 7, 2)
    (axes, _), cells = show.draw(blocks, None, 7).axes, show.cells(blocks, [0, 60], 7)
    assert not axes.lines and (axes.images[0].get_array() == cells[0].numpy()).all()
    cu, cu_q = torch.tensor([0, 20, 60]), torch.tensor([0, 2, 7])
    axes = show.draw(moba_select(q[:7], k, cu, 7, 2, cu_seqlens_q=cu_q), cu, 7, cu_q).axes[0]
    horizontal, vertical = (line.get_data() for line in axes.lines)
    assert axes.images[0].get_array().shape == (7, 60)
    assert set(horizontal[1]) == {1.5} and set(vertical[0]) == {19.5}


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    show.main(["--out", str(tmp_path / "blocks.png")])
    assert imread(tmp_path / "blocks.png").shape[:2] == (615, 1890)
    q, k, cu = show.example(256, 4, 0)
    said = capsys.readouterr().out
    assert "documents of 102 and 154 tokens, blocks of 16, up to 3 per query and head" in said
    assert f"{show.kept(show.cells(moba_select(q, k, cu, 16, 3), cu, 16))}" in said
    options = dict(tokens=50, block_size=5, top_k=1, heads=2, seed=3)
    show.main(
        [
            "--out",
            str(tmp_path / "current.svg"),
            *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()),
        ]
    )
    # each head has ten current blocks, which are triangles of 5
    assert f"{2 * 10 * 15} of {2 * (20 * 21 // 2 + 30 * 31 // 2)} (query, key)" in capsys.readouterr().out
    assert (tmp_path / "current.svg").read_text().startswith("<?xml")
    show.main(["--out", str(tmp_path / "other.png"), "--seed=1"])
    assert (imread(tmp_path / "other.png") != imread(tmp_path / "blocks.png")).any()


def test_heads_of_the_example_pick_differently():
    q, k, cu = show.example(256, 4, 0)
    blocks = moba_select(q, k, cu, 16, 3)
    assert all(not torch.equal(blocks[:, 0], blocks[:, head]) for head in range(1, 4))
    assert torch.equal(q, show.example(256, 4, 0)[0]) and not torch.equal(q, show.example(256, 4, 1)[0])


def test_without_matplotlib(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.colors"):
        monkeypatch.setitem(sys.modules, name, None)
    q, k, cu = show.example(60, 1, 0)
    blocks = moba_select(q, k, cu, 10, 2)
    assert show.cells(blocks, cu, 10).shape == (1, 60, 60)
    with pytest.raises(ImportError, match=r"drawing needs matplotlib: pip install 'ds-mla-ulysses\[show\]'"):
        show.draw(blocks, cu, 10)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"blocks_THJ": torch.zeros(60, 2, 1)}, "must be the tensor that moba_select returned, .* got torch.float32 "),
        (
            {"blocks_THJ": torch.zeros(60, 2, dtype=torch.int32)},
            r"must be the tensor that moba_select returned, .* \(60, 2\)",
        ),
        ({"block_size": 31}, "picked a block that is not in its past: pass the cu_seqlens and the block_size"),
        ({"cu_seqlens": [0, 30, 60]}, "of document 30..60 picked a block that is not in its past"),
        ({"cu_seqlens": [0, 59]}, "cu_seqlens_q must rise from 0 to the number of tokens, 60, got"),
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"cu_seqlens": [0, 9000], "cu_seqlens_q": [0, 60]}, "has room for 8192 keys, got 9000"),
    ],
)
def test_arguments_that_do_not_fit_together(change, message):
    q, k, _ = (x.detach() for x in inputs(60, 2))
    arguments = {"blocks_THJ": moba_select(q, k, None, 10, 2), "cu_seqlens": [0, 60], "block_size": 10, **change}
    with pytest.raises(ValueError, match=message):
        show.draw(**arguments)


@pytest.mark.parametrize("option", ["--tokens=0", "--block-size=-1", "--top-k=x", "--heads=1.5", "--tokens=8193"])
def test_bad_options(option, capsys):
    with pytest.raises(SystemExit):
        show.main(["--out", "unwritten.png", option])
    error = capsys.readouterr().err
    assert "must be an integer >= 1" in error or "a picture has room for 8192 tokens, got 8193" in error
