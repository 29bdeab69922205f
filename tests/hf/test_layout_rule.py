"""A forward is sequence-parallel if it is given a layout. Without one it is the plain model, or refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, padded_batch, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import sharded_step

from ds_mla_ulysses.comm.group import SequenceGroup

REFUSED = "was given no layout, so it would train on this rank's tokens alone"


def parallel(family="llama", **settings):
    import ds_mla_ulysses as dmu

    model = tiny_model(family)
    return model, dmu.parallelize(model, **settings)


def forward(what):
    from torch.utils.checkpoint import checkpoint

    model, _handle = parallel()
    ids = random_batch(1, 16)["input_ids"]
    embeds = torch.randn(1, 16, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    if what.startswith("frozen"):
        model.requires_grad_(False)
    if what == "training":
        return model(input_ids=ids)
    if what == "eval mode":  # from_pretrained returns it, and loops train in it
        return model.eval()(input_ids=ids)
    if what == "frozen, embeddings train":
        return model(inputs_embeds=embeds)
    if what == "frozen, embeddings train, by position":
        return model.model(None, None, None, None, embeds)
    if what == "frozen, a cache trains":  # as in prefix tuning
        from transformers import DynamicCache

        config = model.config
        prefix = torch.randn(1, config.num_key_value_heads, 3, config.head_dim, dtype=torch.float64, requires_grad=True)
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(prefix, prefix, layer)
        return model(input_ids=ids, past_key_values=cache)
    if what == "reentrant checkpoint of the whole model":  # the first forward is without gradients
        checkpoint(lambda x: model(inputs_embeds=x).logits, embeds, use_reentrant=True).sum().backward()
    if what == "checkpoint of the whole model":
        checkpoint(lambda x: model(inputs_embeds=x).logits, embeds, use_reentrant=False).sum().backward()
    if what == "lora, base frozen":
        from peft import LoraConfig, get_peft_model

        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))(input_ids=ids)


@pytest.mark.parametrize(
    "what",
    [
        "training",
        "eval mode",
        "frozen, embeddings train",
        "frozen, embeddings train, by position",
        "frozen, a cache trains",
        "reentrant checkpoint of the whole model",
        "checkpoint of the whole model",
        "lora, base frozen",
    ],
)
def test_refused(what):
    raises_on_ranks(2, RuntimeError, REFUSED, forward, what)


def on_one_rank():
    """The other rank waits for nobody: it is not in a collective."""
    model, handle = parallel()
    ids = random_batch(1, 16)["input_ids"]
    if handle.group.rank == 0:
        with torch.no_grad():
            return bool(model(input_ids=ids).logits.isfinite().all())
    with pytest.raises(RuntimeError, match=REFUSED):
        model(input_ids=ids)
    return True


def test_a_rank_without_a_layout_raises_at_once():
    assert run_ranks(2, on_one_rank, timeout=30) == [True, True]


def permitted():
    batch = random_batch(1, 16)
    ids = batch["input_ids"]
    want = tiny_model("llama")(input_ids=ids, use_cache=False).logits
    model, handle = parallel()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
    model.requires_grad_(False)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)  # a frozen reference model
    model.requires_grad_(True)
    with handle.plain():
        assert torch.equal(model(input_ids=ids, use_cache=False, ulysses_layout=None).logits, want)
    alone, _handle_alone = parallel(sp_size=1)
    assert torch.equal(alone(input_ids=ids, use_cache=False).logits, want)  # one rank has whole sequences


def test_permitted():
    run_ranks(2, permitted)


def checkpoint_of_the_whole_model(use_reentrant):
    """Permitted inside plain(), and recomputed plainly after the block; with a layout it is sequence-parallel."""
    from torch.utils.checkpoint import checkpoint

    batch = random_batch(1, 16)
    want = reference_step(tiny_model("llama"), batch)
    model, handle = parallel()
    embeds = model.get_input_embeddings()(batch["input_ids"])

    def whole(x):
        return model(inputs_embeds=x, labels=batch["labels"], use_cache=False).loss

    with handle.plain():
        loss = checkpoint(whole, embeds, use_reentrant=use_reentrant)
        if use_reentrant:  # its recomputation cannot be told from a forward of its own
            loss.backward()
    if not use_reentrant:
        loss.backward()
    assert_gradients(gradients(model), want[1], 1e-6)

    model.zero_grad()
    shard = handle.shard(batch)
    ids, rest = shard.inputs["input_ids"], {name: x for name, x in shard.inputs.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(ids)
    logits = checkpoint(lambda x: model(inputs_embeds=x, **rest).logits, embeds, use_reentrant=use_reentrant)
    handle.loss(logits, shard).backward()
    handle.sum_gradients()
    assert_gradients(gradients(model), want[1], 1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_the_whole_model(use_reentrant):
    run_ranks(2, checkpoint_of_the_whole_model, use_reentrant)


def moved(how):
    """Whatever users do with a batch, its layout arrives."""
    import copy
    import pickle

    import deepspeed.runtime.utils
    from accelerate.utils import send_to_device

    ways = {
        "deepspeed": lambda batch: deepspeed.runtime.utils.move_to_device(batch, torch.device("cpu")),
        "by hand": lambda batch: {k: v.to("cpu", non_blocking=True) for k, v in batch.items()},
        "accelerate": lambda batch: send_to_device(batch, torch.device("cpu"), non_blocking=True),
        "clone": lambda batch: {k: v.detach().clone().contiguous().cpu() for k, v in batch.items()},
        "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
        "deepcopy": copy.deepcopy,
    }
    batch = random_batch(2, 17)
    want = reference_step(tiny_model("llama"), batch)
    model, handle = parallel()
    shard = handle.shard(batch)
    loss = handle.loss(model(**ways[how](shard.inputs)).logits, shard)
    assert abs(loss.item() - want[0]) < 1e-9
    assert list(shard.inputs)[-1] == "ulysses_layout"
    as_batch = ways[how](shard.as_batch())  # as the Trainer's loader yields it
    inputs = {name: x for name, x in as_batch.items() if name != "shift_labels"}
    assert torch.equal(handle.loss(model(**inputs).logits, as_batch), loss)
    assert handle.num_items([shard, as_batch]) == 2 * int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("how", ["deepspeed", "by hand", "accelerate", "clone", "pickle", "deepcopy"])
def test_layouts_survive(how):
    run_ranks(2, moved, how)


def misused(what):
    model, handle = parallel()
    shard = handle.shard(random_batch(1, 8))
    logits = torch.zeros(1, 4, 128)
    if what == "labels in place of the shard":
        handle.loss(logits, shard.shift_labels)
    if what == "no labels":
        batch = random_batch(1, 8)
        del batch["labels"]
        handle.loss(logits, handle.shard(batch))
    if what == "sharded twice":
        handle.shard(shard.as_batch())
    if what == "another num_items":
        handle.loss(logits, shard, num_items=3 + handle.group.rank)
    if what == "num_items on one rank":
        handle.loss(logits, shard, num_items=3 if handle.group.rank else None)
    if what == "other weights":
        with torch.no_grad():
            list(model.parameters())[-1][0].add_(1e-3 * handle.group.rank)
        handle.loss(logits, shard)
    if what == "gradients on one rank":
        with torch.set_grad_enabled(handle.group.rank == 0):
            model(**shard.inputs)
    if what == "checkpointing on one rank" and handle.group.rank:
        model.gradient_checkpointing_enable()
    if what == "checkpointing on one rank":
        model(**shard.inputs)
    if what == "autocast on one rank":
        with torch.autocast("cpu", enabled=handle.group.rank == 0):
            model(**shard.inputs)
    is_last = handle.group.rank == 1
    if what == "logits of another shard on one rank":
        handle.loss(logits[:, : 4 - handle.group.rank], shard)
    if what == "no logits on one rank":
        handle.loss(None if is_last else logits, shard)
    if what == "no shard on one rank":
        handle.loss(logits, None if is_last else shard)
    if what == "a text for num_items on one rank":
        handle.loss(logits, shard, num_items="3" if is_last else 3)
    if what == "no batch on one rank":
        handle.shard(None if is_last else random_batch(1, 8))
    if what == "shards without labels on one rank":
        handle.num_items([{}] if is_last else [shard])
    if what == "restored":
        handle.restore()
        handle.loss(logits, shard)
    if what == "sharded after restore":
        handle.restore()
        handle.shard(random_batch(1, 8))


@pytest.mark.parametrize(
    "what,error,message",
    [
        ("labels in place of the shard", TypeError, "give the shard, .* not a Tensor"),
        ("no labels", ValueError, "the shard has no labels"),
        ("sharded twice", ValueError, "is a shard already"),
        ("another num_items", ValueError, "num_items differs between the ranks .* mean is 3.5"),
        ("num_items on one rank", ValueError, "num_items differs between the ranks"),
        ("other weights", ValueError, "the weights of ranks 0 and 1 .* differ: load or seed the model alike"),
        ("gradients on one rank", ValueError, "gradients were enabled on some ranks"),
        ("checkpointing on one rank", ValueError, "activation checkpointing was enabled on some ranks"),
        ("autocast on one rank", ValueError, "autocast was enabled on some ranks"),
        (
            "logits of another shard on one rank",
            ValueError,
            r"^(rank 1 of the group: )?logits \(1, 3, 128\) and shift_labels \(1, 4\) must be this rank's",
        ),
        (
            "no logits on one rank",
            TypeError,
            "^(rank 1 of the group: )?logits and shift_labels must be .* NoneType and Te",
        ),
        ("no shard on one rank", TypeError, "^(rank 1 of the group: )?give the shard, .* not a NoneType"),
        ("a text for num_items on one rank", TypeError, "^(rank 1 of the group: )?num_items must be .* got '3'"),
        ("no batch on one rank", TypeError, "rank 1 of the group: batch must be a dict of tensors .* got a NoneType"),
        ("shards without labels on one rank", ValueError, "^(rank 1 of the group: )?the shard has no labels"),
        ("sharded after restore", RuntimeError, r"handle.restore\(\) was called"),
        ("restored", RuntimeError, r"handle.restore\(\) was called"),
    ],
)
def test_misuse(what, error, message):
    raises_on_ranks(2, error, message, misused, what)


def problems_without_checks():
    """Where no check is due, a problem is raised on its rank, before any collective."""
    import ds_mla_ulysses as dmu

    handle = dmu.parallelize(tiny_model("llama"), checks="never")
    shard = handle.shard(random_batch(1, 8))
    if handle.group.rank == 1:
        with pytest.raises(ValueError, match=r"^logits \(1, 3, 128\) and shift_labels"):
            handle.loss(torch.zeros(1, 3, 128), shard)
        with pytest.raises(TypeError, match="^batch must be a dict"):
            handle.shard(None)


def test_problems_without_checks():
    run_ranks(2, problems_without_checks)


def collectives_of_checks(policy):
    """The collectives of sharding, the loss and the engine's check of it, in each of three steps."""
    import ds_mla_ulysses as dmu

    handle = dmu.parallelize(tiny_model("llama"), checks=policy)
    # With an engine, the loss does not compare weights, which would happen once under every policy.
    handle._engine = SimpleNamespace(gradient_accumulation_steps=lambda: 1)
    calls = []
    for _ in range(3):
        with dmu.TrafficMeter() as meter:
            shard = handle.shard(random_batch(1, 8))
            handle.check_loss(handle.loss(torch.zeros(1, 4, 128), shard))
        calls.append(sum(meter.calls.values()))
    return calls


def test_each_check_runs_always_once_or_never():
    always, first, never = (run_ranks(2, collectives_of_checks, policy)[0] for policy in ("always", "first", "never"))
    assert len(set(always)) == len(set(never)) == 1 and always[0] > never[0]
    assert first == [always[0], never[0], never[0]]


def checked(of_ranks):
    """The check of a loss before the engine's backward; values by rank."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    handle = dmu.parallelize(tiny_model("llama"))
    handle.check_loss(torch.tensor(of_ranks[dist.get_rank()]))


NOT_FINITE = (2.0, float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("of_ranks", [(2.0, 2.0000002), *zip(NOT_FINITE, NOT_FINITE, strict=True)])
def test_losses_that_are_the_same_number(of_ranks):
    """An overflow in fp16 has to reach the loss scaler of the engine, which skips the step."""
    run_ranks(2, checked, of_ranks)


@pytest.mark.parametrize("of_ranks", [(2.0, 2.001), (2.0, -2.0), (0.0, 1e-30), *itertools.permutations(NOT_FINITE, 2)])
def test_losses_that_differ(of_ranks):
    raises_on_ranks(
        2,
        RuntimeError,
        "the loss is not that of the sequence-parallel group: it is .+ on one rank and .+ on another",
        checked,
        of_ranks,
    )


def waits_of_a_forward(strategy, kind):
    """How often the host reads a tensor in a whole forward: item, nonzero, or a copy of it."""
    from unittest import mock

    from torch.utils._python_dispatch import TorchDispatchMode

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.layout import documents

    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in ("_local_scalar_dense", "nonzero", "equal"):
                found.append(name)
            return func(*args, **(kwargs or {}))

    def read(x):  # a copy to the host, which on a CPU no operator shows
        found.append("to_host")
        return x.numpy()

    # Experts, which wait themselves, are left out.
    model = tiny_model("deepseek_v3", first_k_dense_replace=2) if strategy == "latent_qkv" else tiny_model("llama")
    handle = dmu.parallelize(model, strategy=strategy)
    batches = {"packed": packed_batch([[9, 5, 2], [1, 15]]), "left": padded_batch([16, 9], 16)}
    shard = handle.shard(batches[kind])
    with dmu.TrafficMeter() as meter, mock.patch.object(documents, "to_host", read), Count():
        model(**shard.inputs)
    return found, dict(meter.calls)


@pytest.mark.parametrize("kind", ["packed", "left"])
@pytest.mark.parametrize("strategy", ["packed", "latent_qkv"])
def test_one_exchange_and_one_wait_for_each_forward(strategy, kind):
    for waits, calls in run_ranks(2, waits_of_a_forward, strategy, kind):
        assert waits == ["to_host"]
        of_setup = {key: n for key, n in calls.items() if key[1] == "setup"}
        # Integers; positions with padding. latent_qkv gathers RoPE's two tables and the positions as well.
        assert of_setup == {("all_gather", "setup"): 2 + 3 * (strategy == "latent_qkv")}


def loses_documents():
    """A decoder layer that does not hand its keyword arguments on."""
    from types import MethodType

    model, handle = parallel()
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    def without_documents(self, *args, ulysses_documents=None, **kwargs):
        return forward(self, *args, **kwargs)

    attention.forward = MethodType(without_documents, attention)
    with torch.no_grad():
        model(input_ids=random_batch(1, 8)["input_ids"])  # plain, it is right
    model(**handle.shard(random_batch(1, 8)).inputs)


def test_a_layer_without_its_documents():
    message = "LlamaAttention was called without the keyword arguments of the model's forward"
    raises_on_ranks(2, RuntimeError, message, loses_documents)


def nested(inner):
    """Another forward inside of a sequence-parallel one leaves its positions and documents alone."""
    batch = random_batch(1, 24)
    want = reference_step(tiny_model("minicpm3"), batch)
    model, handle = parallel("minicpm3")
    other, other_handle = parallel()
    if inner == "another model":
        inputs = other_handle.shard(batch).inputs
        runs = lambda *_: other(**inputs)  # noqa: E731
    else:
        ids, active = batch["input_ids"][:, :8], []

        def runs(*_):
            if not active:  # its own forward calls the hook as well
                active.append(True)
                with torch.no_grad():
                    model(input_ids=ids, use_cache=False)
                active.clear()

    hook = model.model.embed_tokens.register_forward_hook(lambda *_: runs() and None)
    loss, grads, _ = sharded_step(model, batch, handle)
    hook.remove()
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("inner", ["another model", "the model itself, plain"])
def test_a_forward_inside_of_a_forward(inner):
    run_ranks(2, nested, inner)


def test_large_numbers_of_items_are_compared_exactly():
    from ds_mla_ulysses.layout import loss

    for ranks in (2, 3, 5, 8, 24):
        for given in (-1, 0, 63_999_999, 2**40 + 12345):
            low, high = given % loss._PART, given // loss._PART
            sums = [0.0, *(float(sum([x] * ranks)) for x in (low, low**2, high, high**2)), 0.0]
            loss._raise_if_wrong(sums, SequenceGroup(None, 0, ranks), 8)
            sums[1] += 1
            sums[2] += 2 * low + 1
            with pytest.raises(ValueError, match="num_items differs"):
                loss._raise_if_wrong(sums, SequenceGroup(None, 0, ranks), 8)


def fails_at(step):
    """A patch whose n-th replacement fails leaves the model as it was, and it can be parallelized again."""
    from unittest import mock

    from test_lifecycle import snapshot

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.patch import ModelPatch

    model = tiny_model("minicpm3")
    before = snapshot(model)
    replace, register, count = ModelPatch._replace, torch.nn.Module.register_forward_pre_hook, [0]

    def failing(original):
        def run(*args, **kwargs):
            count[0] += 1
            if count[0] == step:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return run

    with (
        mock.patch.object(ModelPatch, "_replace", failing(replace)),
        mock.patch.object(torch.nn.Module, "register_forward_pre_hook", failing(register)),
        mock.patch.object(torch.nn.Module, "register_forward_hook", failing(torch.nn.Module.register_forward_hook)),
    ):
        try:
            handle = dmu.parallelize(model, strategy="latent_qkv")
        except KeyboardInterrupt:
            handle = None
    if handle is not None:
        handle.restore()
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, (kind, attributes, hooks) in before.items():
        now = after[name]
        assert now[0] is kind and now[2] == hooks and now[1].keys() == attributes.keys(), name
        assert all(now[1][k] is attributes[k] for k in attributes), name
    assert dmu.handle_of(model) is None
    again = dmu.parallelize(model)
    sharded_step(model, random_batch(1, 12), again)
    return count[0] < step  # no step is left


def test_a_patch_applies_wholly_or_not_at_all():
    for step in range(1, 100):
        done = run_ranks(2, fails_at, step)
        assert done[0] == done[1]
        if done[0]:
            break
    assert step > 10
