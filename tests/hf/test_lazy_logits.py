"""Logits that are not made yet: what is recorded, what makes them, and gradients against the plain model in one process."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, gradients, random_batch, reference_loss, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import own_tokens, sharded_step

import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.lazy_logits import LazyLogits
from ds_mla_ulysses.layout.tiled_loss import (
    scaled,
    sum_of_cross_entropies,
    tiled_sum_of_cross_entropies,
    tokens_of_tile,
)


@pytest.fixture(autouse=True)
def leaves_no_process_group():
    """Tests of one process run in this one, where `parallelize` initialises torch.distributed."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def family_of(name):
    """Settings of heads that do something to logits, and the model."""
    attention = "eager" if name == "gemma2" else "sdpa"
    more = dict(final_logit_softcapping=2.0) if name == "gemma2" else {}
    return tiny_model(name, attn_implementation=attention, **more)


def pair(name="llama", **way):
    plain = family_of(name)
    model = copy.deepcopy(plain)
    return plain, model, dmu.parallelize(model, **way)


def lazy(name="llama", batch=None, **way):
    """Logits of one process's batch, with the plain model's and the handle."""
    batch = batch or random_batch(2, 13)
    plain, model, handle = pair(name, **way)
    shard = handle.shard(batch)
    out = model(**shard.inputs)
    assert isinstance(out.logits, LazyLogits)
    return out.logits, plain(input_ids=batch["input_ids"], use_cache=False).logits, handle, shard


@pytest.mark.parametrize("tile", [1, 5, 26, 100, "auto"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "minicpm3", "deepseek_v3"])
def test_one_process(name, tile):
    batch = random_batch(2, 13)
    plain, model, handle = pair(name, loss_tile=tile)
    loss, want, _ = reference_step(plain, batch)
    shard = handle.shard(batch)
    got = handle.loss(model(**shard.inputs).logits, shard)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-12)
    assert_gradients(gradients(model), want, 1e-11)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2", "minicpm3"])
def test_ranks(name, size):
    run_ranks(size, against_one_process, name)


def against_one_process(name):
    batch = random_batch(2, 33)
    plain, model, handle = pair(name, loss_tile=3)
    want = reference_step(plain, batch)
    loss, grads, logits = sharded_step(model, batch, handle)
    tolerance = 1e-6 if name == "gemma2" else 1e-9  # its norms are in fp32
    assert loss == pytest.approx(want[0], rel=tolerance)
    assert_gradients(grads, want[1], tolerance)
    expected = own_tokens(want[2], handle)
    torch.testing.assert_close(logits[:, : expected.shape[1]], expected, rtol=tolerance, atol=tolerance)


OPERATIONS = {
    "mul": lambda z: z * 3.0,
    "reflected": lambda z: 3 * z,
    "div": lambda z: z / 3.0,
    "cap": lambda z: torch.tanh(z / 2.0) * 2.0,
    "method": lambda z: z.div(2.0).tanh().mul(2),
    "float": lambda z: z.float(),
    "to": lambda z: z.to(torch.float32),
    "to dtype": lambda z: z.to(dtype=torch.float32),
    "half and back": lambda z: z.to(torch.bfloat16).double(),
    "same device": lambda z: z.to("cpu"),
    "clone": lambda z: z.clone().contiguous(),
    "whole slices": lambda z: z[:, :, :][...][:],
    "shift": lambda z: (z + 1) - 0.5,
    "vocabulary": lambda z: z[..., :100],
    "vocabulary of all": lambda z: z[:, :, 3:],
}


def in_place(z):
    other = z
    z *= 2.0
    z.div_(3.0)
    z.tanh_()
    assert other is z
    return z


@pytest.mark.parametrize("operation", [*OPERATIONS.values(), in_place], ids=[*OPERATIONS, "in place"])
def test_recorded_operations(operation):
    logits, plain, _, _ = lazy(loss_tile=4)
    got, want = operation(logits), operation(plain.clone())
    made = isinstance(got, LazyLogits)
    assert made or operation is OPERATIONS["same device"]
    assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
    labels = torch.randint(0, want.shape[-1], (want.shape[:-1].numel(),))
    torch.testing.assert_close(
        sum_of_cross_entropies(got, labels), sum_of_cross_entropies(want, labels), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(got + torch.zeros(()), want, rtol=1e-6, atol=1e-9)


def test_looks_like_logits():
    logits, plain, _, _ = lazy()
    assert logits.shape == plain.shape and logits.size() == plain.size() and logits.size(-1) == plain.size(-1)
    assert logits.ndim == plain.ndim == logits.dim() and logits.numel() == plain.numel() and len(logits) == len(plain)
    assert logits.dtype == plain.dtype and logits.device == plain.device and logits.is_floating_point()
    assert logits.requires_grad and logits.grad_fn is not None and not logits.is_leaf
    assert "not made yet" in repr(logits) and not logits._real
    detached = logits.detach()
    assert isinstance(detached, LazyLogits) and not detached.requires_grad and detached.shape == plain.shape


MAKERS = {
    "argmax": lambda z: z.argmax(-1),
    "slice": lambda z: z[:, 2:5],
    "index": lambda z: z[0, 3],
    "gather": lambda z: z.log_softmax(-1).gather(-1, torch.ones(2, 13, 1, dtype=torch.long)),
    "cat": lambda z: torch.cat([z, z], dim=1),
    "tensor": lambda z: z * torch.full((), 2.0, dtype=torch.float64),
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "view": lambda z: z.view(-1, z.size(-1)),
    "list": lambda z: torch.tensor(z.tolist(), dtype=z.dtype),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "iteration": lambda z: torch.stack(list(z)),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=list(MAKERS))
def test_everything_else_makes_them(maker):
    logits, plain, _, _ = lazy()
    got, want = maker(logits), maker(plain)
    assert not isinstance(got, LazyLogits)
    torch.testing.assert_close(got, want)


def test_saving_makes_them():
    logits, plain, _, _ = lazy()
    file = io.BytesIO()
    torch.save({"logits": logits.detach()}, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file)["logits"], plain.detach())


@pytest.mark.parametrize("loss", ["own", "both", "twice"])
def test_gradients_of_other_uses(loss):
    """Real logits alone, beside the tiled loss, and two tiled losses of the same logits."""
    batch = random_batch(2, 13)
    plain, model, handle = pair("gemma2", loss_tile=4)
    want = plain(input_ids=batch["input_ids"], use_cache=False).logits
    shard = handle.shard(batch)
    got = model(**shard.inputs).logits

    def own(z):
        return z[:, ::2].pow(2).mean() + z.logsumexp(-1).mean()

    def total(z, cross_entropy):
        return {
            "own": lambda: own(z),
            "both": lambda: 2 * cross_entropy(z) + 0.5 * own(z),
            "twice": lambda: 3 * cross_entropy(z) + cross_entropy(z / 2),
        }[loss]()

    result = total(got, lambda z: handle.loss(z, shard))
    expected = total(want, lambda z: reference_loss(z, batch["labels"]))
    result.backward()
    expected.backward()
    torch.testing.assert_close(result, expected)
    assert_gradients(gradients(model), gradients(plain), 1e-11)


def test_backward_twice():
    """The gradients are not scaled in place; without retain_graph torch raises as for any loss."""
    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    reference_step(plain, batch)
    want = reference_step(plain, batch)[1]
    shard = handle.shard(batch)
    loss = handle.loss(model(**shard.inputs).logits, shard)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_gradients(gradients(model), want, 1e-11)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_hooks_may_multiply():
    """As DeepSpeed's hooks on outputs do; those of others would see no gradient of logits, and are refused."""
    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    want = reference_step(plain, batch)[1]
    shard = handle.shard(batch)
    logits = model(**shard.inputs).logits

    def half(grad):
        return grad / 2

    with pytest.raises(RuntimeError, match="hook on the logits needs their gradient.*loss_tile=None"):
        logits.register_hook(half)
    with pytest.raises(RuntimeError, match="loss_tile=None"):
        logits.retain_grad()
    half.__module__ = "deepspeed.runtime.utils"
    logits.register_hook(half)
    handle.loss(logits, shard).backward()
    assert_gradients({n: 2 * g for n, g in gradients(model).items()}, want, 1e-11)


def test_hooks_of_the_weight():
    """A hook that scales the gradient of the head runs once, whatever the tile."""
    batch, found = random_batch(2, 13), []
    for loss_tile in (None, 4):
        _, model, handle = pair(loss_tile=loss_tile)
        seen = []
        model.lm_head.weight.register_hook(lambda g, seen=seen: seen.append(g) or g / 2)
        shard = handle.shard(batch)
        handle.loss(model(**shard.inputs).logits, shard).backward()
        assert len(seen) == 1
        found.append(gradients(model))
    assert_gradients(found[1], found[0], 1e-11)


def test_where_it_defers():
    """Only with a layout and gradients; the head's hooks are called, and nothing of the head is replaced but its call."""
    batch = random_batch(2, 13)
    model = tiny_model("llama")
    head, names = model.lm_head, list(model.state_dict())
    handle = dmu.parallelize(model, loss_tile=4)
    assert handle.loss_tile == 4 and model.lm_head is head and list(model.state_dict()) == names
    shard = handle.shard(batch)
    with torch.no_grad():
        assert type(model(**shard.inputs).logits) is torch.Tensor
    ids = dict(input_ids=batch["input_ids"], use_cache=False)
    assert type(model(**ids).logits) is torch.Tensor
    hidden = torch.randn(3, 48, dtype=torch.float64)
    assert type(model.lm_head(hidden)) is torch.Tensor
    seen = []
    remove = head.register_forward_hook(lambda m, args, out: seen.append(type(out)))
    assert type(model(**shard.inputs).logits) is torch.Tensor and seen == [torch.Tensor]
    remove.remove()
    assert isinstance(model(**shard.inputs).logits, LazyLogits)
    with pytest.raises(Exception):  # noqa: B017 (whatever a model raises; the next call of the head is plain)
        model(**shard.inputs, unknown_argument=object(), inputs_embeds=torch.ones(1))
    assert type(model.lm_head(hidden)) is torch.Tensor
    handle.restore()
    assert "_call_impl" not in vars(head) and type(model(**ids).logits) is torch.Tensor


def test_switched_off():
    batch = random_batch(2, 13)
    _, model, handle = pair(loss_tile=None)
    assert handle.loss_tile is None
    assert type(model(**handle.shard(batch).inputs).logits) is torch.Tensor


@pytest.mark.parametrize(
    "tile,error,match",
    [(0, ValueError, "positive number of tokens"), (2.5, TypeError, 'must be "auto"'), ("all", TypeError, 'must be "auto"'), (True, TypeError, 'must be "auto"')],
)  # fmt: skip
def test_refused_tiles(tile, error, match):
    with pytest.raises(error, match=match):
        dmu.parallelize(tiny_model("llama"), loss_tile=tile)
    with pytest.raises(error, match=match):
        dmu.install(loss_tile=tile)


def test_ranks_need_the_same_tile():
    raises_on_ranks(2, ValueError, "loss_tile, rank by rank: \\[3, 4\\]", different_tiles)


def different_tiles():
    import torch.distributed as dist

    dmu.parallelize(tiny_model("llama"), loss_tile=3 + dist.get_rank())


def test_evaluation_is_plain():
    plain, model, handle = pair()
    prompt = random_batch(1, 7)["input_ids"]
    shard = handle.shard(random_batch(1, 7))
    handle.loss(model(**shard.inputs).logits, shard).backward()
    want, got = (m.generate(prompt, max_new_tokens=5, do_sample=False) for m in (plain.eval(), model.eval()))
    assert torch.equal(want, got)


@pytest.mark.parametrize("part", ["head", "body", "nothing"])
def test_frozen(part):
    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(
                {"head": name != "lm_head.weight", "body": name == "lm_head.weight"}.get(part, False)
            )
    logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
    want = reference_loss(logits, batch["labels"])
    shard = handle.shard(batch)
    got = handle.loss(model(**shard.inputs).logits, shard)
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        want.backward()
        got.backward()
        assert gradients(model).keys() == gradients(plain).keys()
        assert_gradients(gradients(model), gradients(plain), 1e-11)


@pytest.mark.parametrize("kind", ["bias", "lora", "modules_to_save", "dora"])
def test_kinds_of_heads(kind):
    batch = random_batch(2, 13)
    plain = tiny_model("llama")
    if kind == "bias":
        plain.lm_head.bias = torch.nn.Parameter(torch.randn(128, dtype=torch.float64))
    else:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        way = dict(modules_to_save=["lm_head"]) if kind == "modules_to_save" else dict(use_dora=kind == "dora")
        targets = ["q_proj"] if kind == "modules_to_save" else ["q_proj", "lm_head"]
        plain = get_peft_model(plain, LoraConfig(r=3, target_modules=targets, init_lora_weights=False, **way)).double()
    model = copy.deepcopy(plain)
    handle = dmu.parallelize(model, loss_tile=4)
    _, want, _ = reference_step(plain, batch)
    shard = handle.shard(batch)
    logits = model(**shard.inputs).logits
    assert isinstance(logits, LazyLogits) == (kind != "dora")
    handle.loss(logits, shard).backward()
    assert_gradients(gradients(model), want, 1e-10)


def test_autocast():
    """The head runs in autocast's dtype, although the loss is computed outside of it."""
    batch = random_batch(2, 13)
    plain = tiny_model("llama", torch.float32)
    model = copy.deepcopy(plain)
    handle = dmu.parallelize(model, loss_tile=4)
    shard = handle.shard(batch)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(input_ids=batch["input_ids"], use_cache=False).logits
        got = model(**shard.inputs).logits
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got.detach() + torch.zeros((), dtype=torch.bfloat16), want.detach())
    loss, expected = handle.loss(got, shard), reference_loss(want, batch["labels"])
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_gradients(gradients(model), gradients(plain), 2e-2)
    assert gradients(model)["lm_head.weight"].dtype == torch.float32


def test_conversion_of_outputs_by_accelerate():
    from accelerate.utils.operations import convert_outputs_to_fp32

    batch = random_batch(2, 13)
    model = tiny_model("llama", torch.bfloat16)
    handle = dmu.parallelize(model, loss_tile=4)
    shard = handle.shard(batch)
    out = convert_outputs_to_fp32(lambda **kwargs: model(**kwargs))(**shard.inputs)
    assert isinstance(out.logits, LazyLogits) and out.logits.dtype == torch.float32
    torch.testing.assert_close(handle.loss(out.logits, shard), handle.loss(out.logits + torch.zeros(()), shard))


def test_no_graph_without_gradients():
    logits, plain, handle, shard = lazy(loss_tile=4)
    with torch.no_grad():
        loss = handle.loss(logits, shard)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference_loss(plain, random_batch(2, 13)["labels"]).detach())
    assert not handle.loss(logits.detach(), shard).requires_grad


def test_weights_and_smoothing():
    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    shard = handle.shard(batch)
    weights = torch.rand(2, 13, dtype=torch.float64)
    got = handle.loss(model(**shard.inputs).logits, shard, label_smoothing=0.2, token_weights=weights)
    logits = plain(input_ids=batch["input_ids"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), shard.shift_labels.flatten(), reduction="none", label_smoothing=0.2
    )
    want = (losses * weights.flatten()).sum() / (shard.shift_labels != -100).sum()
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    assert_gradients(gradients(model), gradients(plain), 1e-11)
    with pytest.raises(ValueError, match="token_weights must be a tensor \\(2, 13\\) like shift_labels, got \\(13,\\)"):
        handle.loss(logits, shard, token_weights=weights[0])


def test_whole_model_compiled():
    """Compiled code makes the logits whole."""
    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    want = reference_step(plain, batch)[1]
    shard = handle.shard(batch)
    compiled = torch.compile(model, backend="eager")
    handle.loss(compiled(**shard.inputs).logits, shard).backward()
    assert_gradients(gradients(model), want, 1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1, 7, 64])
def test_sums(dtype, tile):
    """Sums over tiles are in fp32 or wider, so they are as near to fp64 as whole logits are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator).to(dtype)
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (64,), generator=generator)
    labels[::5] = -100

    def head(hidden):
        return hidden @ weight.T

    sums = tiled_sum_of_cross_entropies(head, x, labels, tile, [weight])
    exact_x, exact_w = (y.detach().clone().double().requires_grad_() for y in (x, weight))
    exact = sum_of_cross_entropies(exact_x @ exact_w.T, labels)
    exact.backward()
    whole_x = x.clone().requires_grad_()
    whole = sum_of_cross_entropies(head(whole_x), labels)
    whole.backward()
    assert sums.value.dtype == whole.dtype and sums.hidden.dtype == dtype
    for got, stock, want in [
        (sums.value, whole.detach(), exact.detach()),
        (sums.hidden, whole_x.grad, exact_x.grad),
        (sums.parameters[0], weight.grad, exact_w.grad),
    ]:
        noise = float((stock.double() - want).norm() / want.norm())
        assert float((got.double() - want).norm() / want.norm()) <= 2 * noise + 1e-15


def test_no_supervised_token():
    x, weight = torch.randn(9, 4), torch.randn(5, 4, requires_grad=True)
    sums = tiled_sum_of_cross_entropies(lambda h: h @ weight.T + torch.inf, x, torch.full((9,), -100), 4, [weight])
    assert sums.value == 0 and not sums.hidden.isnan().any()


def test_scaled_does_not_round_its_factor():
    x, factor = torch.full((7,), 3.0, dtype=torch.bfloat16), torch.tensor(1 / 3 * (1 + 2**-12))
    assert scaled(x, factor, torch.float32).eq(3.0 * factor).all()


def test_automatic_tiles():
    assert [tokens_of_tile("auto", v) for v in (128_256, 32_000, 10**9)] == [2048, 8192, 1]
    assert tokens_of_tile(17, 128_256) == 17


def left_out(module, name, value):
    """Runs one step with a function of the package replaced, and returns by how much gradients are off."""
    from unittest import mock

    from models import gradient_errors

    batch = random_batch(2, 13)
    plain, model, handle = pair(loss_tile=4)
    want = reference_step(plain, batch)[1]
    shard = handle.shard(batch)
    with mock.patch.object(module, name, value):
        handle.loss(model(**shard.inputs).logits, shard).backward()
    return gradient_errors(gradients(model), want)[0][0]


def test_broken_lines_are_noticed():
    from ds_mla_ulysses.hf import lazy_logits

    assert left_out(lazy_logits, "scaled", scaled) < 1e-11

    def unscaled_head(x, factor, dtype):
        return x.to(dtype) if x.shape == (128, 48) else scaled(x, factor, dtype)

    def without_last_tile(head, hidden, labels, tile, *args, **kwargs):
        labels = labels.clone()
        labels[-tile:] = -100
        return tiled_sum_of_cross_entropies(head, hidden, labels, tile, *args, **kwargs)

    assert left_out(lazy_logits, "scaled", unscaled_head) > 0.1
    assert left_out(lazy_logits, "tiled_sum_of_cross_entropies", without_last_tile) > 0.1


@pytest.mark.parametrize("loss_tile", [3, None])
def test_one_supervised_token(loss_tile):
    batch = random_batch(1, 13)
    batch["labels"][:, :7] = batch["labels"][:, 8:] = -100
    plain, model, handle = pair(loss_tile=loss_tile)
    want = reference_step(plain, batch)
    shard = handle.shard(batch)
    loss = handle.loss(model(**shard.inputs).logits, shard)
    loss.backward()
    assert loss.item() == pytest.approx(want[0], rel=1e-12)
    assert_gradients(gradients(model), want[1], 1e-11)


@pytest.mark.parametrize("loss_tile", [3, None])
def test_the_first_label_beyond_the_vocabulary(loss_tile):
    _, model, handle = pair(loss_tile=loss_tile)
    batch = random_batch(1, 13)
    for label, is_refused in ((model.config.vocab_size - 1, False), (model.config.vocab_size, True)):
        batch["labels"][0, 5] = label
        shard = handle.shard(batch)
        logits = model(**shard.inputs).logits
        if is_refused:
            with pytest.raises(
                ValueError, match="1 shift_labels of the batch are neither -100 nor one of the 128 tokens"
            ):
                handle.loss(logits, shard)
        else:
            handle.loss(logits, shard)
