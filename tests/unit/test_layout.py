"""Heads, documents, batches and the loss, in one process."""

import pytest
import torch
from models import packed_batch, padded_batch, random_batch, token_loss

from ds_mla_ulysses.comm.group import SequenceGroup
from ds_mla_ulysses.layout.batch import _parcels, shard_batch
from ds_mla_ulysses.layout.documents import Documents, find_documents, gather_documents
from ds_mla_ulysses.layout.heads import HeadPartition
from ds_mla_ulysses.layout.loss import sequence_loss

ALONE = SequenceGroup.of(None)


@pytest.mark.parametrize("heads,size", [(1, 1), (4, 4), (20, 4), (128, 8), (20, 8), (5, 4), (7, 7)])
def test_query_heads_are_consecutive_complete_and_even(heads, size):
    partition = HeadPartition(heads, size)
    owned = [range(partition.start(r), partition.stop(r)) for r in range(size)]
    assert [h for part in owned for h in part] == list(range(heads))
    counts = [partition.count(r) for r in range(size)]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    assert not partition.overlaps and all(partition.repeats(r) is None for r in range(size))


def test_the_first_ranks_have_one_head_more():
    partition = HeadPartition(20, 8)
    assert [partition.count(r) for r in range(8)] == [3, 3, 3, 3, 2, 2, 2, 2]
    assert [partition.start(r) for r in range(8)] == [0, 3, 6, 9, 12, 14, 16, 18]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("query_heads,heads", [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (20, 4), (12, 6)])
def test_every_rank_owns_what_its_query_heads_read(query_heads, heads, size):
    queries, partition = HeadPartition(query_heads, size), HeadPartition(heads, size, query_heads)
    read_by = [[q * heads // query_heads for q in range(queries.start(r), queries.stop(r))] for r in range(size)]
    seen = set()
    for rank, read in enumerate(read_by):
        own = list(range(partition.start(rank), partition.start(rank) + partition.count(rank)))
        assert own == sorted(set(read))
        assert [head in seen for head in own] == [i < partition.shared(rank) for i in range(len(own))]
        seen |= set(own)
        times = [read.count(head) for head in own]
        assert partition.repeats(rank) == (times if len(set(times)) > 1 else None)
    assert partition.overlaps == (sum(map(len, map(set, read_by))) > heads)


def test_a_shared_head_between_two_ranks():
    partition = HeadPartition(3, 2, 6)
    assert [(partition.start(r), partition.count(r), partition.repeats(r)) for r in (0, 1)] == [
        (0, 2, [2, 1]),
        (1, 2, [1, 2]),
    ]


@pytest.mark.parametrize(
    "partition,message",
    [
        ((6, 8), r"6 attention heads are too few for 8 ranks.*sp_size <= 6"),
        ((2, 8, 6), r"6 attention heads are too few for 8 ranks"),
        ((4, 2, 6), r"6 query heads must be a multiple of the key/value heads, got 4"),
        ((12, 2, 6), r"6 query heads must be a multiple of the key/value heads, got 12"),
    ],
)
def test_heads_that_cannot_be_shared(partition, message):
    with pytest.raises(ValueError, match=message):
        HeadPartition(*partition)


def documents(positions, mask=None):
    positions = torch.tensor(positions)
    numbers = torch.ones_like(positions) if mask is None else torch.tensor(mask)
    return find_documents(positions, numbers)[:2]


@pytest.mark.parametrize(
    "positions,mask,segments",
    [
        ([[0, 1, 2, 3]], None, [(None, 0, 4)]),
        ([[5, 6, 7, 8]], None, [(None, 0, 4)]),  # positions may start anywhere
        ([[0, 1, 0, 1]], None, [(None, 0, 2), (None, 2, 4)]),
        ([[0, 0, 0, 1]], None, [(None, 0, 1), (None, 1, 2), (None, 2, 4)]),  # documents of one token
        ([[0, 1, 0, 1], [0, 1, 0, 1]], None, [(None, 0, 2), (None, 2, 4)]),  # rows alike
        ([[0, 1, 0, 1], [0, 1, 2, 0]], None, [(0, 0, 2), (0, 2, 4), (1, 0, 3), (1, 3, 4)]),
        ([[0, 0, 0, 1]], [[0, 0, 1, 1]], [(None, 0, 2), (None, 2, 4)]),  # left padding is one run
        ([[0, 1, 1, 1]], [[1, 1, 0, 0]], [(None, 0, 2), (None, 2, 4)]),  # right padding too
        ([[0, 1, 2, 3]], [[0, 0, 1, 1]], [(None, 0, 2), (None, 2, 4)]),  # positions that run through the padding
        ([[0, 1, 2, 3]], [[1, 1, 2, 0]], [(None, 0, 2), (None, 2, 3), (None, 3, 4)]),  # the mask numbers documents
        ([[0, 1, 0, 0]], [[1, 1, 1, 0]], [(None, 0, 2), (None, 2, 3), (None, 3, 4)]),  # packed and padded
    ],
)
def test_documents(positions, mask, segments):
    found, problem = documents(positions, mask)
    assert problem is None and found.segments == segments
    assert found.one_per_row == (segments == [(None, 0, 4)] and mask is None)


def test_varlen_and_mask_forms():
    found, _ = documents([[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]], [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert found.cu_seqlens.tolist() == [0, 2, 5, 8, 10] and found.cu_seqlens.dtype == torch.int32
    assert found.longest == 3
    allowed = found.allowed_B1TS()[:, 0]
    assert allowed[0].tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, True, True, False],
        [False, False, True, True, True],
    ]
    assert not allowed[1, 3:].any() and not allowed[1, :, 3:].any()


@pytest.mark.parametrize("positions", [[0, 1, 1, 2, 3], [0, 1, 2, 3, 4]])
def test_padding_inside_a_document_is_refused(positions):
    _, problem = documents([positions], [[1, 1, 0, 1, 1]])
    assert "padding inside a document (row 0, before token 3" in problem


def test_padding_between_documents_is_fine():
    found, problem = documents([[0, 1, 0, 0, 1]], [[1, 1, 0, 1, 1]])
    assert problem is None and found.segments == [(None, 0, 2), (None, 2, 3), (None, 3, 5)]


@pytest.mark.parametrize(
    "positions,mask,message",
    [
        (torch.zeros(2, 5).long(), None, r"position_ids must be this rank's \[2, 4\]"),
        (torch.zeros(3, 2, 4).long(), None, r"position_ids must be"),
        (None, torch.ones(2, 1, 4, 4), r"two-dimensional \[2, 4\]"),
        (None, torch.ones(2, 8), r"two-dimensional \[2, 4\]"),
    ],
)
def test_inputs_of_other_shapes_are_refused(positions, mask, message):
    with pytest.raises(ValueError, match=message):
        gather_documents(positions, mask, (2, 4), torch.device("cpu"), ALONE)


def test_positions_for_all_rows():
    _, positions = gather_documents(torch.arange(4), None, (2, 4), torch.device("cpu"), ALONE)
    assert positions.tolist() == [[0, 1, 2, 3]] * 2


def test_documents_are_no_dataclass():
    # torch.compile guards on the fields of dataclasses: a graph per layout.
    import dataclasses

    assert not dataclasses.is_dataclass(Documents)


def shards(batch, size):
    """The shards of all ranks."""
    return [shard_batch(batch, SequenceGroup(None, rank, size), check=False) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("S", [8, 33, 3])
def test_labels_are_shifted_before_the_split(S, size):
    batch = random_batch(2, S)
    batch["labels"][:] = batch["input_ids"]
    parts = shards(batch, size)
    joined = torch.cat([p.shift_labels for p in parts], dim=1)
    assert torch.equal(joined[:, : S - 1], batch["labels"][:, 1:])
    assert (joined[:, S - 1 :] == -100).all()
    assert not {"labels", "shift_labels"} & set(parts[0].inputs) and "labels" in batch
    assert len({p.inputs["input_ids"].shape for p in parts}) == 1
    positions = torch.cat([p.inputs["position_ids"] for p in parts], dim=1)
    assert torch.equal(positions[:, :S], torch.arange(S).expand(2, S))
    padding = positions[0, S:]
    assert torch.equal(padding, torch.arange(len(padding)))  # one more document


@pytest.mark.parametrize("split", ["contiguous", "head_tail"])
def test_a_parcel_holds_no_more_than_its_shard(split):
    """A slice would be pickled with the whole tensor that it is a view of."""
    batch = random_batch(2, 4096)
    parcels = _parcels(batch, SequenceGroup(None, 0, 4, split))
    of_shard = 3 * 2 * 1024 * 8  # input_ids, position_ids and shift_labels, int64
    assert len(parcels) == 4 and all(of_shard < len(parcel) < of_shard + 4096 for parcel in parcels)


def test_every_tensor_of_the_sequence_is_split_and_the_rest_passed_on():
    batch = random_batch(2, 5) | dict(
        inputs_embeds=torch.randn(2, 5, 3), attention_mask=torch.ones(2, 5), name="x", weights=torch.ones(2), other=torch.ones(2, 7)
    )  # fmt: skip
    first, second = (shard.inputs for shard in shards(batch, 2))
    assert torch.equal(torch.cat([first["inputs_embeds"], second["inputs_embeds"]], 1)[:, :5], batch["inputs_embeds"])
    assert second["attention_mask"].tolist() == [[1, 1, 0]] * 2
    assert first["name"] == "x" and first["weights"] is batch["weights"] and first["other"] is batch["other"]


def test_shift_labels_that_are_given_stay():
    batch = random_batch(1, 4)
    given = batch.pop("labels")
    first, second = shards(batch | dict(shift_labels=given), 2)
    assert torch.equal(torch.cat([first.shift_labels, second.shift_labels], 1), given)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(input_ids=None), "neither input_ids nor inputs_embeds"),
        (dict(input_ids=torch.ones(4)), "non-empty tensor"),
        (dict(input_ids=torch.ones(2, 0)), "non-empty tensor"),
        (dict(labels=torch.ones(2, 4)), "labels must be"),
        (dict(attention_mask=torch.ones(2, 1, 5, 5)), "made from position_ids: leave them out"),
        (dict(position_ids=torch.ones(3, 5)), "position_ids must be"),
    ],
)
def test_bad_batches(change, message):
    batch = {name: x for name, x in (random_batch(2, 5) | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, None)


@pytest.mark.parametrize("dtype,wide", [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2])
def test_loss_alone_is_transformers(dtype, wide):
    from transformers.loss.loss_utils import ForCausalLMLoss

    batch = random_batch(2, 9)
    logits = torch.randn(2, 9, 128, dtype=torch.float64).to(dtype)
    shard = shard_batch(batch, None)
    loss = sequence_loss(logits, shard.shift_labels, ALONE)
    assert loss.dtype == wide
    torch.testing.assert_close(loss, token_loss(logits, batch["labels"]))
    torch.testing.assert_close(loss.float(), ForCausalLMLoss(logits, batch["labels"], 128))
    summed = sequence_loss(logits, shard.shift_labels, ALONE, num_items=50)
    torch.testing.assert_close(summed.float(), ForCausalLMLoss(logits, batch["labels"], 128, num_items_in_batch=50))


def test_gradient_scale_leaves_the_value():
    logits = torch.randn(1, 4, 8, requires_grad=True)
    labels = torch.tensor([[1, 2, -100, 3]])
    plain, scaled = sequence_loss(logits, labels, ALONE), sequence_loss(logits, labels, ALONE, gradient_scale=6.0)
    assert plain.item() == scaled.item()
    (one,), (six,) = torch.autograd.grad(plain, logits), torch.autograd.grad(scaled, logits)
    torch.testing.assert_close(six, 6 * one)


@pytest.mark.parametrize("num_items", [None, 0])
def test_no_supervised_token_is_no_nan(num_items):
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = sequence_loss(logits, torch.full((1, 4), -100), ALONE, num_items)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_loss_refuses_whole_labels():
    with pytest.raises(ValueError, match="same shard"):
        sequence_loss(torch.randn(1, 4, 8), torch.ones(1, 8).long(), ALONE)


def test_batches_of_the_tests_are_what_they_say():
    batch = packed_batch([[3, 2], [1, 4]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert padded_batch([2, 3], 3)["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
