"""What batches a Trainer may read: any length, order, size, epochs, resumption."""

import dataclasses
import shutil
import tempfile

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_numbers import eight
from trainer_runs import (
    Collate,
    Run,
    assert_equal,
    build,
    equals_one_process,
    fresh_state,
    over_ranks,
    parameters,
    reference,
    result,
    samples,
    seen_by_all,
    sharded,
)


def of_61():
    return samples(8, 61, 62)


def test_61_tokens_on_4_ranks():
    """Padding to 64 tokens changes no number, and no token attends to it."""
    equals_one_process(4, Run(sp=4, batch=1, data=of_61))
    equals_one_process(4, Run("mistral", sp=4, batch=1, data=of_61))


def test_only_sp_size_is_set():
    """With ParallelismConfig(sp_size=2) alone on 4 processes, the other processes are data-parallel."""
    run = Run(args=(("gradient_accumulation_steps", 2),), only_sp_size=True)
    equals_one_process(4, run)


def test_more_ranks_than_a_multiple():
    raises_on_ranks(4, ValueError, "sp_size=3 does not divide the 4 processes", sharded, Run(sp=3, only_sp_size=True))


def test_every_sample_once_in_each_epoch():
    run = Run(batch=1, steps=None, args=(("num_train_epochs", 4), ("learning_rate", 0.002)), data=eight)
    got = equals_one_process(2, run)
    assert got[0]["steps"] == (32, 32)
    assert seen_by_all(got) == sorted(list(range(8)) * 4)


def test_shuffled_epochs_are_those_of_one_process():
    args = (("num_train_epochs", 2), ("train_sampling_strategy", "random"), ("seed", 7), ("learning_rate", 0.002))
    got = equals_one_process(2, Run(batch=1, steps=None, args=args, data=eight))
    assert seen_by_all(got) == sorted(list(range(8)) * 2)
    assert got[0]["seen"][:4] != got[0]["seen"][4:]


def seven():
    return samples(7)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_short_last_batch(batch, drop):
    """The first samples fill up the last round, as in data parallelism."""
    args = (("num_train_epochs", 3), ("dataloader_drop_last", drop))
    got = over_ranks(2, Run(batch=batch, steps=None, args=args, data=seven))
    steps = {(1, False): 24, (1, True): 18, (2, False): 12, (2, True): 6}[batch, drop]
    assert got[0]["steps"] == (steps, steps)
    assert all(loss > 0 for loss in got[0]["losses"])
    if not drop:
        assert set(seen_by_all(got)) == set(range(7))


def test_grouped_by_length():
    args = (("num_train_epochs", 2), ("train_sampling_strategy", "group_by_length"))
    got = over_ranks(2, Run(batch=2, steps=None, args=args, data=eight))
    assert got[0]["steps"] == (8, 8)
    assert seen_by_all(got) == sorted(list(range(8)) * 2)
    assert all(loss > 0 for loss in got[0]["losses"])


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, low, high):
        self.lengths = low, high

    def __iter__(self):
        return iter(samples(24, *self.lengths))


def stream():
    return Stream(12, 40)


def stream_of_one_length():
    return Stream(33, 34)


@pytest.mark.parametrize("dispatch", [False, True])
def test_iterable_datasets(dispatch):
    """Each rank reads different samples, or the first rank reads for all; Accelerate then requires one length."""
    run = Run(data=stream_of_one_length if dispatch else stream)
    args = dataclasses.replace(run, args=(("accelerator_config", f'{{"dispatch_batches": {str(dispatch).lower()}}}'),))
    for answer in over_ranks(2, args):
        assert_equal(answer, reference(run))


def test_loading_in_worker_processes():
    equals_one_process(2, Run(args=(("dataloader_num_workers", 1),)))


def with_positions():
    """Returns samples with two documents, whose positions restart, and with a column that no model accepts."""
    made = samples()
    for row in made:
        n = len(row["input_ids"])
        row["position_ids"] = [*range(n // 3), *range(n - n // 3)]
        row["unused"] = "text"
    return made


class Packed(Collate):
    """Leaves the mask out, with which transformers would attend across documents in one process."""

    def __call__(self, rows):
        assert all("unused" not in row for row in rows)
        return {name: x for name, x in super().__call__(rows).items() if name != "attention_mask"}


def packed_collate():
    return {"data_collator": Packed()}


def test_position_ids_and_unused_columns():
    args = (("remove_unused_columns", True),)
    equals_one_process(2, Run(batch=1, data=packed_dataset, trainer=packed_collate, args=args))


def packed_dataset():
    from datasets import Dataset

    return Dataset.from_list(with_positions())


def flattened():
    from transformers import DataCollatorWithFlattening

    return {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)}


def plain_rows():
    return [{name: row[name] for name in ("input_ids", "labels")} for row in samples()]


def test_padding_free_batches():
    """The position ids of transformers' collator mark the same boundaries as its arguments for flash attention."""
    run = Run(data=plain_rows, trainer=flattened)
    # One process runs the same batches without these arguments, which sdpa does not accept.
    for answer in over_ranks(2, run):
        assert_equal(answer, reference(Run(data=plain_rows, trainer=flattened_plain)))


def flattened_plain():
    from transformers import DataCollatorWithFlattening

    return {"data_collator": DataCollatorWithFlattening()}


# Resumption


def with_saves(run, world, folder, resume=None, steps=8):
    more = dict(output_dir=folder, max_steps=steps, save_strategy="steps", save_steps=3)
    trainer = build(run, world, **more)
    before = parameters(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    return result(trainer, before)


def resumed(run, folder):
    """Trains 8 steps and saves after the third, then resumes from there in a new Trainer."""
    import torch.distributed as dist

    import ds_mla_ulysses

    with fresh_state():
        ds_mla_ulysses.install()
        try:
            whole = with_saves(run, dist.get_world_size(), folder)
        finally:
            ds_mla_ulysses.uninstall()
    with fresh_state():
        ds_mla_ulysses.install()
        try:
            rest = with_saves(run, dist.get_world_size(), folder, f"{folder}/checkpoint-3")
        finally:
            ds_mla_ulysses.uninstall()
    return whole, rest


@pytest.mark.parametrize("stage,strategy,accumulation", [(2, "sequential", 1), (3, "random", 1), (2, "random", 2)])
def test_mid_epoch_resume(stage, strategy, accumulation):
    """An epoch has 12 micro-batches of one sample on two ranks, so 3 steps end within a round of the ranks."""
    args = (("train_sampling_strategy", strategy), ("gradient_accumulation_steps", accumulation))
    run = Run(batch=1, stage=stage, args=args, data=twelve, config=(("gradient_clipping", 0.0),))
    folder = tempfile.mkdtemp()
    try:
        for whole, rest in run_ranks(2, resumed, run, folder):
            assert rest["steps"] == (8, 8)
            assert rest["losses"][:3] == whole["losses"][:3]  # from the saved log
            assert all(abs(a - b) <= 1e-5 * b for a, b in zip(rest["losses"], whole["losses"], strict=True))
            assert len(whole["losses"]) == 8
    finally:
        shutil.rmtree(folder)


def twelve():
    return samples(12)


def skips():
    """Skips every possible number of micro-batches of a loader without a Trainer; lengths differ."""
    import torch.distributed as dist
    from accelerate import Accelerator

    import ds_mla_ulysses
    from ds_mla_ulysses.comm.group import SequenceGroup

    with fresh_state():
        accelerator = Accelerator(cpu=True)
        loader = torch.utils.data.DataLoader(samples(8), batch_size=1, collate_fn=Collate())
        group = SequenceGroup.of(dist.group.WORLD)
        loader = ds_mla_ulysses.ShardedDataLoader(accelerator.prepare(loader), group, "cpu")
        whole = list(loader)
        assert len(loader) == len(whole) == 8
        for count in range(9):
            rest = loader.skip_first(count)
            found = list(rest)
            assert len(rest) == len(found) == 8 - count
            for a, b in zip(found, whole[count:], strict=True):
                assert all(torch.equal(a[name], b[name]) for name in ("input_ids", "shift_labels", "position_ids"))
        assert len(list(loader.skip_first(3).skip_first(2))) == 3
        return whole


def test_skipping():
    from ds_mla_ulysses import ShardLayout

    parts = run_ranks(2, skips)
    batches = [Collate()([row]) for row in samples(8)]
    for mine, theirs, batch in zip(*parts, batches, strict=True):
        S = batch["input_ids"].shape[1]
        assert torch.equal(torch.cat([mine["input_ids"], theirs["input_ids"]], dim=1)[:, :S], batch["input_ids"])
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        assert torch.equal(torch.cat([mine["shift_labels"], theirs["shift_labels"]], dim=1)[:, :S], shifted)
        assert list(mine)[-1] == list(theirs)[-1] == "ulysses_layout"
        for rank, shard in enumerate((mine, theirs)):
            length = 2 * shard["input_ids"].shape[1]
            assert shard["ulysses_layout"] == ShardLayout("contiguous", 2, rank, length, S, (0, 1))


def boundaries(accumulation):
    """Returns at which micro-batches of an Accelerate loop gradients are due; the last round may be shorter."""
    import torch.distributed as dist
    from accelerate import Accelerator

    import ds_mla_ulysses
    from ds_mla_ulysses.comm.group import SequenceGroup

    with fresh_state():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        loader = torch.utils.data.DataLoader(samples(8), batch_size=1, collate_fn=Collate())
        group = SequenceGroup.of(dist.group.WORLD)
        loader = ds_mla_ulysses.ShardedDataLoader(accelerator.prepare(loader), group, "cpu")
        due = []
        for _ in range(2):
            for _ in loader:
                with accelerator.accumulate():
                    due.append(accelerator.sync_gradients)
        return due


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_last_round_is_not_one_batch(accumulation):
    epoch = [(i + 1) % accumulation == 0 or i == 7 for i in range(8)]
    for due in run_ranks(2, boundaries, accumulation):
        assert due[:8] == epoch


def own_loader():
    from transformers import Trainer

    class Own(Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=1, collate_fn=self.data_collator)

    return {"class": Own}


def warned(run):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded(run)
    return [str(w.message) for w in caught if "read the same batch" in str(w.message)]


def test_ranks_that_read_the_same_are_warned_of():
    first, second = run_ranks(2, warned, Run("llama", trainer=own_loader))
    assert len(first) == 1 and "trained on 2 times" in first[0] and not second
    assert run_ranks(2, warned, Run("llama")) == [[], []]


def test_different_numbers_of_batches():
    args = (("accelerator_config", '{"even_batches": false}'),)
    run = Run(batch=1, steps=None, args=args, data=seven)
    raises_on_ranks(2, ValueError, r"different numbers of batches, \[4, 3\]", sharded, run)


# An error on one rank is raised on all ranks


class Broken(torch.utils.data.Dataset):
    """Fails to read one sample."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 3:
            raise OSError("disk")
        return samples(8)[i]


def broken():
    return Broken()


def test_a_rank_that_cannot_read():
    raises_on_ranks(
        2, ValueError, "rank 1 of the group: cannot read its batch: OSError: disk", sharded, Run(batch=1, data=broken)
    )


def cause_of_failure():
    """The loader fails on rank 1. Returns what was read, and whether the cause is the loader's exception or None."""
    import torch.distributed as dist

    from ds_mla_ulysses import ShardedDataLoader
    from ds_mla_ulysses.comm.group import SequenceGroup

    original = OSError("disk")

    class Loader(list):
        def __iter__(self):
            yield self[0]
            if dist.get_rank() == 1:
                raise original
            yield self[1]

    batches = Loader([{"input_ids": torch.full((1, 4), i + 10 * dist.get_rank())} for i in range(2)])
    loader = iter(ShardedDataLoader(batches, SequenceGroup.of(dist.group.WORLD), "cpu"))
    read = [next(loader)["input_ids"].tolist(), next(loader)["input_ids"].tolist()]
    with pytest.raises(ValueError, match="rank 1 of the group: cannot read its batch: OSError: disk") as caught:
        next(loader)
    return read, caught.value.__cause__ is original, caught.value.__cause__ is None


def test_the_cause_of_a_failed_read():
    read = [[[0, 0]], [[10, 10]]]
    assert run_ranks(2, cause_of_failure) == [(read, False, True), (read, True, False)]


class BadOnce(Collate):
    def __call__(self, rows):
        batch = super().__call__(rows)
        if 3 in [row["sample"] for row in rows]:
            batch["labels"] = batch["labels"][:, :-1]
        return batch


class Unsendable(Collate):
    def __call__(self, rows):
        batch = super().__call__(rows)
        return batch | {"what": (lambda: None) if 3 in [row["sample"] for row in rows] else None}


def unsendable():
    return {"data_collator": Unsendable()}


def test_a_batch_that_cannot_be_sent():
    raises_on_ranks(2, ValueError, "rank 1 of the group: its batch cannot", sharded, Run(batch=1, trainer=unsendable))


def bad_once():
    return {"data_collator": BadOnce()}


def test_a_bad_batch_of_one_rank():
    raises_on_ranks(
        2, ValueError, r"rank 1 of the group: labels must be \[B, S\]", sharded, Run(batch=1, trainer=bad_once)
    )


def exchanged():
    """The batches differ in everything, one rank has none, and some values cannot be split."""
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.batch import exchange_batches

    group, device = SequenceGroup.of(dist.group.WORLD), torch.device("cpu")
    mine = [
        {"input_ids": torch.arange(14).view(2, 7), "name": "first", "weight": torch.ones(2)},
        {"inputs_embeds": torch.arange(10.0).view(1, 5, 2), "labels": torch.arange(5).view(1, 5)},
        None,
        {"input_ids": torch.arange(9).view(1, 9), "position_ids": torch.arange(9).view(1, 9)},
    ][group.rank]
    return exchange_batches(mine, group, device), exchange_batches(None, group, device)


def test_exchange_of_batches():
    answers = run_ranks(4, exchanged)
    assert all(nothing == [None] * 4 for _, nothing in answers)
    parts = [found for found, _ in answers]
    first, second, third, fourth = zip(*parts, strict=True)
    assert third == (None,) * 4
    assert torch.equal(torch.cat([x["input_ids"] for x in first], 1)[:, :7], torch.arange(14).view(2, 7))
    assert all(x["name"] == "first" and torch.equal(x["weight"], torch.ones(2)) for x in first)
    whole = torch.cat([x["inputs_embeds"] for x in second], 1)
    assert whole.shape == (1, 8, 2) and torch.equal(whole[:, :5], torch.arange(10.0).view(1, 5, 2))
    labels = torch.cat([x["shift_labels"] for x in second], 1)
    assert labels.tolist() == [[1, 2, 3, 4, -100, -100, -100, -100]]
    assert torch.cat([x["position_ids"] for x in fourth], 1).tolist() == [[*range(9), 0, 1, 2]]
