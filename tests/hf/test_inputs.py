"""Labels, positions, documents and padding that users of such systems have tripped over."""

import pytest
import torch
from models import (
    assert_gradients,
    gradients,
    packed_batch,
    padded_batch,
    random_batch,
    reference_step,
    tiny_model,
)
from rank_pool import raises_on_ranks, run_ranks
from test_parity import sharded_step


def parallel_model(family="deepseek_v3", sp_size=None, **kwargs):
    import ds_mla_ulysses as dmu

    model = tiny_model(family, **kwargs)
    return model, dmu.parallelize(model, sp_size=sp_size)


def labelled(which):
    batch = random_batch(2, 34)
    labels = torch.full_like(batch["labels"], -100)
    half = 17
    chosen = {
        "first token of rank 1": slice(half, half + 1),
        "rank 0 only": slice(3, half - 2),
        "rank 1 only": slice(half + 3, None),
        "none": slice(0, 0),
    }[which]
    labels[:, chosen] = batch["input_ids"][:, chosen]
    return batch | dict(labels=labels)


def compare_labels(which):
    batch = labelled(which)
    want = reference_step(tiny_model("deepseek_v3"), batch)
    model, handle = parallel_model()
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    if which == "none":
        assert loss == 0 and all(not g.any() for g in grads.values())
    else:
        assert loss > 0
        assert_gradients(grads, want[1], 1e-6)
    return loss


@pytest.mark.parametrize("which", ["first token of rank 1", "rank 0 only", "rank 1 only", "none"])
def test_labels_anywhere(which):
    first, second = run_ranks(2, compare_labels, which)
    assert first == second


def loss_of(batch, with_mask=False):
    model, handle = parallel_model()
    if with_mask:
        batch = batch | dict(attention_mask=torch.ones_like(batch["input_ids"]))
    return sharded_step(model, batch, handle)[0]


def perturbed_documents(with_mask):
    batch = packed_batch([[20, 30, 14]])
    batch["labels"][:, :51] = -100  # the third document's own
    other = batch | dict(input_ids=batch["input_ids"].clone())
    other["input_ids"][:, :50] = (other["input_ids"][:, :50] + 7) % 100 + 3
    moved = batch | dict(input_ids=batch["input_ids"].clone())
    moved["input_ids"][:, 55] = 3
    return [loss_of(b, with_mask) for b in (batch, other, moved)]


@pytest.mark.parametrize("with_mask", [False, True])
def test_packed_documents_do_not_see_each_other(with_mask):
    for before, after, moved in run_ranks(2, perturbed_documents, with_mask):
        assert before == after
        assert before != moved  # the measure can move


def numbered_by_the_mask():
    """A mask 1 1 2 2 0 over running positions: documents attend to themselves only, as each alone would."""
    from models import per_document_step

    documents = [[13, 5, 15], [20, 1, 12]]
    batch = packed_batch(documents) | dict(position_ids=torch.arange(33).expand(2, 33))
    want = per_document_step(tiny_model("llama"), batch, documents)
    numbers = [torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row)) for row in documents]
    batch["attention_mask"] = torch.stack(numbers)
    model, handle = parallel_model("llama")
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


def test_documents_that_the_mask_numbers():
    run_ranks(2, numbered_by_the_mask)


def missing_positions():
    batch = random_batch(2, 34)
    want = reference_step(tiny_model("mistral4"), batch)[2]
    model, handle = parallel_model("mistral4")
    rank = handle.group.rank
    mine = slice(17 * rank, 17 * (rank + 1))
    inputs = handle.shard(batch).inputs
    with torch.no_grad():
        got = model(inputs["input_ids"], ulysses_layout=inputs["ulysses_layout"]).logits
    torch.testing.assert_close(got, want[:, mine], rtol=1e-6, atol=1e-6)


def test_missing_positions_are_global_ones():
    run_ranks(2, missing_positions)


def long_rope(S):
    """Long rope takes its tables from the longest position, which only the last rank has."""
    batch = random_batch(1, S)
    want = reference_step(tiny_model("minicpm3"), batch)
    model, handle = parallel_model("minicpm3")
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("S", [16, 30])
def test_long_rope_is_chosen_by_the_whole_sequence(S):
    run_ranks(2, long_rope, S)


def padded_to_ranks():
    """61 tokens become 64 on four ranks; the padding is one document and moves nothing."""
    batch = packed_batch([[40, 21]])
    want = reference_step(tiny_model("deepseek_v3"), batch)
    model, handle = parallel_model()
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


def test_61_tokens_on_4_ranks():
    run_ranks(4, padded_to_ranks)


def evaluate(sp_size):
    batch = padded_batch([30, 18], 30)
    want = reference_step(tiny_model("deepseek_v3"), batch)[0]
    model, handle = parallel_model(sp_size=sp_size)
    model.eval()
    shard = handle.shard(batch)
    with torch.no_grad():
        return handle.loss(model(**shard.inputs).logits, shard).item() / want - 1


def test_eval_loss_of_left_padded_batches():
    assert max(map(abs, run_ranks(2, evaluate, 2))) <= 1e-9
    assert max(map(abs, run_ranks(4, evaluate, 2))) <= 1e-9


def data_parallel():
    """2 x 2 of 4 without an engine: token-weighted over micro-batches and groups, summed over the world."""
    import torch.distributed as dist

    batches = [[random_batch(2, 21, seed=10 * step + d) for d in range(2)] for step in range(2)]
    for d, rare in enumerate((3, 17)):
        batches[0][d]["labels"][:, :rare] = -100
    plain = tiny_model("deepseek_v3")
    items = sum(int((b["labels"][:, 1:] != -100).sum()) for row in batches for b in row)
    from models import token_loss

    want = 0.0
    for b in (b for row in batches for b in row):
        loss = token_loss(plain(input_ids=b["input_ids"], use_cache=False).logits, b["labels"], items)
        loss.backward()
        want += loss.item()

    model, handle = parallel_model(sp_size=2)
    shards = [handle.shard(row[handle.data_rank]) for row in batches]
    num_items = handle.num_items(shards)
    assert num_items == items and handle.data_size == 2
    got = torch.zeros(())
    for shard in shards:
        loss = handle.loss(model(**shard.inputs).logits, shard, num_items=num_items)
        loss.backward()
        got += loss.detach()
    handle.sum_gradients(group=dist.group.WORLD)
    assert_gradients(gradients(model), gradients(plain), 1e-6)
    dist.all_reduce(got)  # each group's loss on both of its ranks
    assert abs(got.item() / 2 - want) < 1e-6


def shard_of_another_group(use):
    """The same rank of as many ranks in both groups, but rank 0 shares its sequences with another rank."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    def local_group(pairs):
        groups = [dist.new_group(pair) for pair in pairs]
        return next(g for g, pair in zip(groups, pairs, strict=True) if dist.get_rank() in pair)

    of_batch, of_model = local_group([(0, 3), (1, 2)]), local_group([(0, 2), (1, 3)])
    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, group=of_model)
    batch = random_batch(1, 8)
    accepted = model(**handle.shard(batch).inputs).logits
    assert accepted.shape[1] == 4
    other = dmu.shard_batch(batch, of_batch)
    if use == "forward":
        model(**other.inputs)
    else:
        handle.loss(accepted, other if use == "loss" else other.as_batch(), num_items=handle.num_items([other]))


@pytest.mark.parametrize("use", ["forward", "loss", "loss of a batch"])
def test_a_shard_of_another_group_is_refused(use):
    raises_on_ranks(4, ValueError, r"sharded for the group of ranks \[(0, 3|1, 2)\]", shard_of_another_group, use)


def test_two_groups_of_two():
    run_ranks(4, data_parallel)


def own_groups(strided):
    """Groups that the caller made; ranks of one group need not be neighbours."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    parts = [[0, 2], [1, 3]] if strided else [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in parts]
    mine = next(i for i, ranks in enumerate(parts) if dist.get_rank() in ranks)
    batch = random_batch(1, 20, seed=mine)
    want = reference_step(tiny_model("deepseek_v3"), batch)
    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, group=groups[mine])
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)
    return handle.data_rank, handle.data_size


def test_groups_of_the_caller():
    assert run_ranks(4, own_groups, True) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert run_ranks(4, own_groups, False) == [(0, 2), (0, 2), (1, 2), (1, 2)]


def set_otherwise(settings):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    dmu.parallelize(tiny_model("deepseek_v3"), **settings[dist.get_rank()])


@pytest.mark.parametrize(
    "settings,message",
    [
        ([dict(head_chunks=1), dict(head_chunks=2)], r"head_chunks, rank by rank: \[1, 2\]"),
        ([dict(strategy="packed"), dict(strategy="gather_kv")], r"strategy, rank by rank: \['packed', 'gather_kv'\]"),
        (
            [dict(strategy="gather_kv", split=split) for split in ("contiguous", "head_tail")],
            r"split, rank by rank: \['contiguous', 'head_tail'\]",
        ),
        ([dict(checks="never"), {}], r"checks, rank by rank: \['never', 'always'\]"),
        ([dict(sp_size=1), {}], r"sp_size, rank by rank: \[1, None\]"),
        (
            [dict(strategy=dict(tokens=64)), dict(strategy=dict(tokens=128))],
            r"strategy, rank by rank: .*tokens=64.*128",
        ),
        ([dict(strategy=dict(link_gbps=1.0)), dict(strategy=dict())], "strategy, rank by rank: .*link_gbps=1.0"),
    ],
)
def test_settings_that_differ_between_ranks(settings, message):
    import ds_mla_ulysses as dmu

    given = [
        s | {"strategy": dmu.Auto(**s["strategy"])} if isinstance(s.get("strategy"), dict) else s for s in settings
    ]
    raises_on_ranks(
        2, ValueError, "parallelize needs the same arguments and model on all ranks; " + message, set_otherwise, given
    )


def wrong_on_one_rank(what):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    model, is_last = tiny_model("llama"), dist.get_rank() == 1
    if what == "model" and is_last:
        from transformers import StableLmConfig, StableLmForCausalLM

        sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
        model = StableLmForCausalLM(StableLmConfig(**sizes, num_key_value_heads=4))
    if what == "parallelized":
        other = tiny_model("llama")
        handle = dmu.parallelize(other)
        model = other if is_last else model
    settings = {"strategy": dict(strategy="latent"), "type": dict(sp_size="2"), "size": dict(sp_size=-1)}.get(what, {})
    try:
        dmu.parallelize(model, **settings if is_last else {})
    except Exception as error:
        assert str(error).startswith("rank 1 of the group: ") == (not is_last)  # that rank has its own traceback
        assert what == "parallelized" or not any("_ulysses" in vars(m) for m in model.modules())
        if what == "parallelized":
            handle.restore()
        raise


@pytest.mark.parametrize(
    "what,error,message",
    [
        ("strategy", ValueError, "strategy must be one of .* got 'latent'"),
        ("type", TypeError, "sp_size must be an int, got '2'"),
        ("size", ValueError, "sp_size must be a positive number"),
        ("parallelized", RuntimeError, "the model is parallelized already"),
        ("model", "UnsupportedModelError", "StableLmAttention .* does not receive the keyword arguments"),
    ],
)
def test_parallelize_is_wrong_on_one_rank(what, error, message):
    import ds_mla_ulysses as dmu

    raises_on_ranks(2, dmu.UnsupportedModelError if isinstance(error, str) else error, message, wrong_on_one_rank, what)


def bad_forward(what):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    rank = dist.get_rank()
    if what == "different batches":
        return dmu.shard_batch(random_batch(1, 8, seed=rank), dist.group.WORLD)
    if what == "different lengths":
        return dmu.shard_batch(random_batch(1, 8 + rank), dist.group.WORLD)
    if what == "bad on one rank":
        batch = random_batch(1, 8)
        return dmu.shard_batch(batch | (dict(labels=torch.ones(3)) if rank else {}), dist.group.WORLD)
    model, _ = parallel_model("kimi_k25" if what == "images" else "deepseek_v3")
    T = 6 + (rank if what == "lengths" else 0)
    layout = dmu.ShardLayout("contiguous", 2, rank, 2 * T)
    inputs = dict(input_ids=random_batch(2, T)["input_ids"], ulysses_layout=layout)
    if what == "positions on one rank" and rank:
        inputs["position_ids"] = torch.arange(T)
    if what == "whole mask on one rank" and rank:
        inputs["attention_mask"] = torch.ones(2, 2 * T)
    if what == "hole":
        inputs["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)
    if what == "labels" or (what == "labels on one rank" and rank):
        inputs["labels"] = inputs["input_ids"]
    if what == "cache" or (what == "cache on one rank" and rank):
        from transformers import DynamicCache

        inputs["cache"] = DynamicCache(config=model.config)
    if what == "images":
        inputs["pixel_values"] = torch.ones(1, 3, 14, 14)
    if what == "mask on one rank" and rank:
        inputs["attention_mask"] = torch.ones(2, T)
    if what == "mask of another kind":
        inputs["attention_mask"] = {"full_attention": None}
    if what == "embeddings on one rank":
        embeds = torch.ones(2, T, 48, dtype=torch.float64, requires_grad=rank == 0)
        inputs = dict(inputs_embeds=embeds, ulysses_layout=layout)
    if rank and what == "nothing on one rank":
        inputs = dict(ulysses_layout=layout)
    if rank and what == "both on one rank":
        inputs["inputs_embeds"] = torch.ones(2, T, 48, dtype=torch.float64)
    if rank and what == "flat on one rank":
        inputs["input_ids"] = inputs["input_ids"][0]
    if rank and what in ("beyond the vocabulary", "below the vocabulary"):
        inputs["input_ids"][1, 2] = 128 if what.startswith("beyond") else -1
    if what == "not causal":
        inputs["is_causal"] = False
    if what == "impossible label":
        handle = parallel_model("youtu")[1]
        return handle.loss(torch.ones(1, 4, 8), {"shift_labels": torch.full((1, 4), 8 if rank else 1)})
    if what == "group of others":
        group = dist.new_group([0])
        return dmu.parallelize(tiny_model("youtu"), group=group)
    layouts = {
        "layout of another kind": ("head_tail", 2, rank, 12),
        "layout of another rank": ("contiguous", 2, 0, 12),
        "layout of other ranks": ("contiguous", 4, rank, 24),
        "layout of another length": ("contiguous", 2, rank, 14),
    }
    if what in layouts:
        inputs["ulysses_layout"] = dmu.ShardLayout(*layouts[what])
    if rank and what == "truncated on one rank":
        inputs["input_ids"] = inputs["input_ids"][:, :5]
    if what == "layout that is none":
        inputs["ulysses_layout"] = False
    if what == "cu_seq_lens":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 6])
    if what == "logits_to_keep":
        inputs["logits_to_keep"] = 1
    if what == "dropout":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    if what == "bias":
        inputs["position_bias"] = torch.zeros(1)
    if what == "attentions":
        inputs["output_attentions"] = True
    if what == "backend changed":
        model.set_attn_implementation("eager")
    return model(**inputs)


@pytest.mark.parametrize(
    "what,error,message",
    [
        ("different batches", ValueError, r"hold different batches \(they differ in \['input_ids'"),
        ("different lengths", ValueError, "hold different batches"),
        ("bad on one rank", ValueError, "rank 1 of the group: labels must be"),
        ("lengths", ValueError, "inputs of different shapes"),
        ("positions on one rank", ValueError, "given on some ranks"),
        ("whole mask on one rank", ValueError, "rank 1 of the group: attention_mask must be this rank's"),
        ("mask on one rank", ValueError, "an attention_mask was given on some ranks"),
        ("mask of another kind", ValueError, "attention_mask must be a tensor"),
        ("embeddings on one rank", ValueError, "inputs require gradients on some ranks"),
        ("nothing on one rank", ValueError, "rank 1 of the group: give exactly one of input_ids and inputs_embeds"),
        ("both on one rank", ValueError, "rank 1 of the group: give exactly one of input_ids and inputs_embeds"),
        (
            "flat on one rank",
            ValueError,
            r"rank 1 of the group: input_ids must be this rank's \[B, T\] tokens, got \(6,\)",
        ),
        (
            "beyond the vocabulary",
            ValueError,
            "rank 1 of the group: input_ids has 128, which is outside the vocabulary of 128",
        ),
        (
            "below the vocabulary",
            ValueError,
            "rank 1 of the group: input_ids has -1, which is outside the vocabulary of 128",
        ),
        ("not causal", ValueError, "not causal"),
        ("impossible label", ValueError, "4 shift_labels of the batch are neither -100 nor one of the 8"),
        ("group of others", ValueError, "rank 1 of the group: group must be a torch.distributed ProcessGroup"),
        ("hole", ValueError, "padding inside a document"),
        ("labels", ValueError, "handle.loss"),
        ("labels on one rank", ValueError, "rank 1 of the group: labels cannot be given"),
        ("cache", ValueError, "cache and past_key_values are not supported"),
        ("cache on one rank", ValueError, "rank 1 of the group: cache and"),
        ("images", ValueError, "pixel_values are not supported"),
        ("layout of another kind", ValueError, "sharded as .*kind='head_tail'.* but the model has split='contiguous'"),
        (
            "layout of another rank",
            ValueError,
            "rank 1 of the group: the batch was sharded as .*rank=0.* this is rank 1 of 2",
        ),
        ("layout of other ranks", ValueError, r"sharded as .*ranks=4.* this is rank [01] of 2"),
        (
            "layout of another length",
            ValueError,
            "the inputs have 6 tokens on this rank, but the shard's layout says 7 of 14",
        ),
        ("truncated on one rank", ValueError, "rank 1 of the group: the inputs have 5 tokens .* says 6 of 12"),
        ("layout that is none", ValueError, "ulysses_layout must be the layout of a shard, .* got a bool"),
        ("cu_seq_lens", ValueError, "mark documents by position_ids"),
        ("logits_to_keep", ValueError, "logits_to_keep"),
        ("dropout", ValueError, "attention_dropout = 0.0"),
        ("bias", ValueError, "position_bias is not supported"),
        ("attentions", ValueError, "output_attentions"),
        ("backend changed", RuntimeError, r"call handle.restore\(\) first"),
    ],
)
def test_refused_on_every_rank(what, error, message):
    raises_on_ranks(2, error, message, bad_forward, what)


def no_cache_comes_back():
    model, handle = parallel_model()
    out = model(**handle.shard(random_batch(1, 12)).inputs, use_cache=True)
    return all(out.get(name) is None for name in ("cache", "past_key_values"))


def test_use_cache_is_passed_as_false():
    assert run_ranks(2, no_cache_comes_back) == [True, True]


def gradient_on_one_rank():
    """A parameter that only one rank has a gradient for is summed on both."""
    import torch.distributed as dist

    model, handle = parallel_model("youtu")
    parameter = model.model.norm.weight
    if dist.get_rank() == 1:
        parameter.grad = torch.ones_like(parameter)
    handle.sum_gradients()
    return [name for name, p in model.named_parameters() if p.grad is not None], float(parameter.grad.sum())


def test_gradients_that_one_rank_lacks():
    assert run_ranks(2, gradient_on_one_rank) == [(["model.norm.weight"], 48.0)] * 2


def partial_backward():
    """Backward towards one parameter only leaves no exchange in flight."""
    model, handle = parallel_model("youtu")
    shard = handle.shard(random_batch(1, 8))
    loss = handle.loss(model(**shard.inputs).logits, shard)
    torch.autograd.grad(loss, [model.model.layers[0].self_attn.kv_b_proj.weight])
    return torch._C._distributed_c10d._get_work_registry_size()


def test_partial_backward_leaves_nothing_in_flight():
    assert run_ranks(2, partial_backward) == [0, 0]
