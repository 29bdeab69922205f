"""The auxiliary loss of MoE routers over a group equals that of one process: value and all gradients, fp64."""

import contextlib
import sys
from unittest import mock

import pytest
import torch
import transformers
from models import (
    assert_gradients,
    document_lengths,
    gradients,
    packed_batch,
    padded_batch,
    random_batch,
    reference_loss,
    tiny_model,
)
from packaging.version import Version
from rank_pool import raises_on_ranks, run_ranks

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe")
#: Before 5.20, GraniteMoE returns no router logits, and the plain model fails.
if Version(transformers.__version__) >= Version("5.20"):
    FAMILIES += ("granitemoe",)
#: Large beside the cross entropy, so that its gradient shows in every parameter.
COEFFICIENT = 3.0
#: Eager attention takes its softmax in fp32, in which transformers' own masks are NaN if they are fp64's.
EAGER = ("gpt_oss",)
#: Relative tolerances of the value and the gradients. GraniteMoE's router logits are fp32.
RTOL = dict.fromkeys(FAMILIES, (1e-8, 1e-6)) | {"gpt_oss": (1e-5, 1e-4), "granitemoe": (1e-6, 1e-5)}


def batch_of(kind, family=None):
    if kind == "packed":
        return packed_batch([[13, 5, 15], [20, 1, 12]])
    if kind in ("left", "right"):
        # In eager attention a row without keys averages all of them, those of added padding too: the length is even.
        return padded_batch([33, 21], 34 if family in EAGER else 33, kind)
    return random_batch(2, 33 if kind == "odd" else 32)


def model_of(family, **overrides):
    eager = dict(attn_implementation="eager", dtype=torch.float32) if family in EAGER else {}
    return tiny_model(family, **eager | overrides)


@contextlib.contextmanager
def wide_reference(model):
    """The model's function sums in fp32; here it is computed as the formula is written, in fp64."""

    def load_balancing(gate_logits, num_experts, top_k, attention_mask=None):
        routing = torch.cat([torch.softmax(layer, dim=-1) for layer in gate_logits])
        chosen = torch.nn.functional.one_hot(routing.topk(top_k, dim=-1).indices, num_experts).sum(1).double()
        if attention_mask is not None:
            kept = attention_mask.flatten().repeat(len(gate_logits)).bool()
            routing, chosen = routing[kept], chosen[kept]
        return num_experts * (chosen.mean(0) * routing.mean(0)).sum()

    with mock.patch.object(sys.modules[type(model).__module__], "load_balancing_loss_func", load_balancing):
        yield


def one_process(family, batches, wide=True, num_items=None, **overrides):
    """The losses and the gradients of the sum over micro-batches."""
    model = model_of(family, **overrides)
    losses = []
    with wide_reference(model) if wide else contextlib.nullcontext():
        for batch in batches:
            logits, aux_loss = plain_forward(model, batch)
            (reference_loss(logits, batch["labels"], num_items) + COEFFICIENT * aux_loss).backward()
            losses.append(float(aux_loss.detach()))
    return losses, gradients(model)


def plain_forward(model, batch):
    """Logits and auxiliary loss in one process; packed documents run one by one, so that no stock mask is trusted."""
    settings = dict(output_router_logits=True, use_cache=False)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if "position_ids" not in batch or "attention_mask" in batch:
        out = model(**inputs, **settings)
        return out.logits, out.aux_loss
    rows, routed = [], []
    for row, lengths in enumerate(document_lengths(batch)):
        ids = batch["input_ids"][row : row + 1].split(lengths, dim=1)
        outs = [model(input_ids=document, **settings) for document in ids]
        rows.append(torch.cat([out.logits for out in outs], dim=1))
        routed += [out.router_logits for out in outs]
    layers = tuple(torch.cat(of_layer) for of_layer in zip(*routed, strict=True))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return torch.cat(rows), function(layers, model.num_experts, model.num_experts_per_tok)


def over_ranks(model, handle, batches, num_items=None, group=None):
    losses = []
    for batch in batches:
        shard = handle.shard(batch)
        out = model(**shard.inputs, output_router_logits=True)
        (handle.loss(out.logits, shard, num_items) + COEFFICIENT * out.aux_loss).backward()
        losses.append(float(out.aux_loss.detach()))
    handle.sum_gradients(group=group)
    return losses, gradients(model)


def compare(family, kind, split="contiguous", strategy="packed"):
    import ds_mla_ulysses as dmu

    batches, (rtol, gradient_rtol) = [batch_of(kind, family)], RTOL[family]
    want, want_gradients = one_process(family, batches)
    model = model_of(family)
    handle = dmu.parallelize(model, split=split, strategy=strategy)
    got, got_gradients = over_ranks(model, handle, batches)
    assert got == pytest.approx(want, rel=rtol)
    assert_gradients(got_gradients, want_gradients, gradient_rtol)
    stock, stock_gradients = one_process(family, batches, wide=False)
    assert got == pytest.approx(stock, rel=1e-5)
    assert_gradients(got_gradients, stock_gradients, max(gradient_rtol, 1e-5))
    return got


@pytest.mark.parametrize("kind", ["odd", "packed", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_process(family, kind):
    first, second = run_ranks(2, compare, family, kind)
    assert first == second


def test_an_odd_length_on_4_ranks():
    run_ranks(4, compare, "qwen3_moe", "odd", "head_tail", "gather_kv")


def data_parallel():
    """Two micro-batches of two groups: the auxiliary losses of all four add up, as in one process that accumulates."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    batches = [[random_batch(1, 21 + 4 * step, seed=10 * step + d) for d in range(2)] for step in range(2)]
    mixed = [batch for step in batches for batch in step]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in mixed)
    want, want_gradients = one_process("qwen3_moe", mixed, num_items=items)
    model = model_of("qwen3_moe")
    handle = dmu.parallelize(model, sp_size=2)
    mine = [step[handle.data_rank] for step in batches]
    got, got_gradients = over_ranks(model, handle, mine, num_items=items, group=dist.group.WORLD)
    assert got == pytest.approx(want[handle.data_rank :: 2], rel=1e-8)
    assert_gradients(got_gradients, want_gradients, 1e-6)


def test_accumulation_and_data_parallel_groups_add_up():
    run_ranks(4, data_parallel)


def masked_without_padding(kind):
    """The mask of ones that a collator makes, and its zeros, count like no mask and like no tokens."""
    batch = batch_of("odd")
    if kind == "ones":
        return batch | dict(attention_mask=torch.ones_like(batch["input_ids"]))
    return batch


def values(kinds):
    import ds_mla_ulysses as dmu

    model = model_of("mixtral")
    handle = dmu.parallelize(model)
    found = []
    for kind in kinds:
        with torch.no_grad():
            out = model(**handle.shard(masked_without_padding(kind)).inputs, output_router_logits=True)
        found.append(float(out.aux_loss))
        assert out.loss is None
    return found


def test_a_mask_of_ones_changes_nothing():
    for without, ones in run_ranks(2, values, ["none", "ones"]):
        assert without == ones


def traffic():
    import ds_mla_ulysses as dmu

    calls = []
    for wanted in (False, True):
        model = model_of("qwen3_moe")
        handle = dmu.parallelize(model)
        shard = handle.shard(random_batch(1, 32))
        with dmu.TrafficMeter() as meter:
            model(**shard.inputs, output_router_logits=wanted).logits.sum().backward()
        calls.append((meter.calls["all_reduce", "loss"], meter.bytes["all_reduce", "loss"]))
    return calls


def test_one_all_reduce_of_all_layers():
    experts, wide, ranks = 8, 8, 2
    numbers = 2 * experts + 2  # counts, probabilities, rows, and whether the model's own loss differs
    assert run_ranks(2, traffic) == [[(0, 0), (1, 2 * numbers * wide * (ranks - 1) // ranks)]] * 2


def plain_ones():
    """A forward without a layout, after one with it, has the model's own loss; so has a restored model."""
    import ds_mla_ulysses as dmu

    batch, model = random_batch(1, 32), model_of("qwen3_moe")
    inputs = {"input_ids": batch["input_ids"], "output_router_logits": True}
    want = model(**inputs).aux_loss.detach()
    handle = dmu.parallelize(model)
    model(**handle.shard(batch).inputs, output_router_logits=True)
    with handle.plain():
        inside = model(**inputs).aux_loss
    handle.restore()
    return [float(x) - float(want) for x in (inside, model(**inputs).aux_loss)], inside.requires_grad


def test_plain_forwards_keep_the_models_own_loss():
    assert run_ranks(2, plain_ones) == [([0.0, 0.0], True)] * 2


def under_peft():
    """PEFT calls `forward` of the model that it wraps, so hooks of that one do not run."""
    from peft import LoraConfig, get_peft_model

    import ds_mla_ulysses as dmu

    batch = random_batch(2, 33)
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    want = get_peft_model(model_of("qwen3_moe"), settings)(
        input_ids=batch["input_ids"], output_router_logits=True
    ).aux_loss
    model = get_peft_model(model_of("qwen3_moe"), settings)
    handle = dmu.parallelize(model)
    got = model(**handle.shard(batch).inputs, output_router_logits=True).aux_loss
    assert float(got) == pytest.approx(float(want), rel=1e-5)


def test_adapters():
    run_ranks(2, under_peft)


def with_shift_labels():
    """Labels beside shift_labels make the model compute a loss of local tokens, which must not be taken for another."""
    import ds_mla_ulysses as dmu

    model = model_of("qwen3_moe")
    handle = dmu.parallelize(model)
    shard = handle.shard(random_batch(1, 32))
    labels = shard.shift_labels
    return model(**shard.inputs, labels=labels, shift_labels=labels, output_router_logits=True).loss


def test_a_loss_with_the_local_auxiliary_loss_is_taken_away():
    assert run_ranks(2, with_shift_labels) == [None, None]


def otherwise(change):
    import ds_mla_ulysses as dmu

    model = model_of("qwen3_moe")
    handle = dmu.parallelize(model)
    inputs = handle.shard(random_batch(1, 32)).inputs
    with change(model) as more:
        model(**inputs, output_router_logits=True, **(more or {}))


@contextlib.contextmanager
def another_function(model):
    module = sys.modules[type(model).__module__]
    original = module.load_balancing_loss_func

    def squared(*args, **kwargs):
        return original(*args, **kwargs) ** 2

    with mock.patch.object(module, "load_balancing_loss_func", squared):
        yield


@contextlib.contextmanager
def another_top_k(model):
    """The model's forward reads the number from elsewhere than we do."""
    module = sys.modules[type(model).__module__]
    original = module.load_balancing_loss_func

    def of_three(gate_logits, num_experts, top_k, attention_mask=None):
        return original(gate_logits, num_experts, 3 if num_experts == model.num_experts else top_k, attention_mask)

    with mock.patch.object(module, "load_balancing_loss_func", of_three):
        yield


@contextlib.contextmanager
def as_tuple(model):
    yield {"return_dict": False}


@pytest.mark.parametrize(
    "change,message",
    [
        (another_function, "its load_balancing_loss_func is not transformers' usual one"),
        (another_top_k, "is not that of its router logits with 2 experts per token"),
        (as_tuple, "return_dict=False is not supported with output_router_logits"),
    ],
)
def test_other_forms_are_refused(change, message):
    raises_on_ranks(2, ValueError, message, otherwise, change)


def mutated(name):
    """One fault in our sums, on every rank: whether `compare` still passes."""
    import ds_mla_ulysses.hf.aux_loss as module

    faults = {
        "padding counts": (module.AuxLoss, "_is_real", lambda self, forward, weights: torch.ones_like(weights[0])),
        "the mask is ignored": (module.AuxLoss, "_weights", staticmethod(ignore_mask(module.AuxLoss._weights))),
        "the gradient is the local mean's": (module, "with_value", lambda share, value, scale: 2 * share + (value - 2 * share).detach()),
        "nothing is replaced": (module.AuxLoss, "_replace", lambda *_: None),
    }  # fmt: skip
    owner, attribute, fault = faults[name]
    with mock.patch.object(owner, attribute, fault):
        try:
            compare("qwen3_moe", "right" if "mask" in name else "odd")
        except AssertionError:
            return False
        except ValueError as error:  # the comparison with the model's own loss of the local tokens
            assert "is not that of its router logits" in str(error)
            return False
    return True


def ignore_mask(original):
    def weights(forward, logits):
        return torch.ones_like(original(forward, logits))

    return weights


@pytest.mark.parametrize(
    "name",
    ["padding counts", "the mask is ignored", "the gradient is the local mean's", "nothing is replaced"],
)
def test_a_fault_is_noticed(name):
    assert run_ranks(2, mutated, name) == [False, False]
