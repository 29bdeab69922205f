"""Norms, MLPs and experts in tiles of tokens: equal to the plain model, and the memory and the forwards that they save."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import assert_gradients, gradients, packed_batch, padded_batch, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import GRADIENT, sharded_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.tiled_layers import TiledForward, tiled_forwards
from ds_mla_ulysses.stored_bytes import StoredBytes

#: Gated MLPs, RMSNorms and LayerNorms, norms of heads and latents, experts of both signatures, biases, MLPs beside attention.
FAMILIES = ("llama", "qwen3", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2_moe", "phimoe", "longcat_flash", "gemma2")


@pytest.fixture(autouse=True)
def leaves_no_process_group():
    """Tests of one process run in this one, where `parallelize` initialises torch.distributed."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def model_of(family, **settings):
    return tiny_model(family, attn_implementation="eager" if family in ("gpt_oss", "gemma2") else "sdpa", **settings)


BATCHES = {
    "plain": lambda: random_batch(2, 33),
    "packed": lambda: packed_batch([[13, 5, 15], [20, 1, 12]]),
    "padded": lambda: padded_batch([33, 20], 33),
}


def compare(family, kind, mlp_tile, checkpointing=None):
    batch = BATCHES[kind]()
    want = reference_step(model_of(family), batch)
    model = model_of(family)
    handle = dmu.parallelize(model, mlp_tile=mlp_tile)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=checkpointing))
    loss, got, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-7 * abs(want[0])
    assert_gradients(got, want[1], GRADIENT)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Tiles of 4 of the 17 local tokens of two rows."""
    run_ranks(2, compare, family, "plain", 4)


@pytest.mark.parametrize("mlp_tile", [1, 11, 34, 1000])
def test_tiles(mlp_tile):
    run_ranks(2, compare, "deepseek_v3", "plain", mlp_tile)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_documents(kind):
    run_ranks(4, compare, "qwen2_moe", kind, 3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_recomputation(family, reentrant):
    run_ranks(2, compare, family, "plain", 4, reentrant)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_auxiliary_loss(family):
    """Routers return the logits of all tokens, and the auxiliary loss of these has the same gradients."""
    found = []
    for mlp_tile in (None, 4):
        model = model_of(family, output_router_logits=True)
        handle = dmu.parallelize(model, mlp_tile=mlp_tile)
        shard = handle.shard(random_batch(2, 13))
        out = model(**shard.inputs)
        (handle.loss(out.logits, shard) + out.aux_loss).backward()
        found.append((out.aux_loss.item(), gradients(model)))
    kinds = Counter(
        vars(m)["forward"].kind for m in model.modules() if isinstance(vars(m).get("forward"), TiledForward)
    )
    assert kinds["router"] == kinds["experts"] > 0 and out.router_logits[0].shape[0] == 2 * 13
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-7)
    assert_gradients(found[1][1], found[0][1], GRADIENT)


def tiled(family="llama", mlp_tile=4, **settings):
    model = model_of(family, **settings)
    return model, dmu.parallelize(model, mlp_tile=mlp_tile)


def step(model, handle, batch):
    shard = handle.shard(batch)
    handle.loss(model(**shard.inputs).logits, shard).backward()


def test_what_runs_in_tiles():
    model, _ = tiled("deepseek_v3")
    found = Counter(type(m).__name__ for m in model.modules() if isinstance(vars(m).get("forward"), TiledForward))
    # Two layers with four norms, of which two are of latents, and the last norm; a dense MLP, and a shared expert;
    # a router and experts.
    assert found == {"DeepseekV3RMSNorm": 9, "DeepseekV3MLP": 2, "DeepseekV3TopkRouter": 1, "DeepseekV3Experts": 1}


def test_a_router_with_jitter_stays():
    """It multiplies its input in place, which the experts then take."""
    model, _ = tiled("phimoe")
    routers = [m for m in model.modules() if type(m).__name__ == "PhimoeTopKRouter"]
    assert routers and not any("forward" in vars(m) for m in routers)


def test_restore():
    model, handle = tiled("deepseek_v3")
    before = {name: set(vars(m)) for name, m in model_of("deepseek_v3").named_modules()}
    handle.restore()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert isinstance(model.model.layers[0].mlp.forward.__self__, nn.Module)


def test_plain_forwards_and_generation():
    """A family whose router computes in the model's dtype; fp32 would round differently in tiles."""
    plain = model_of("qwen2_moe").eval()
    model, handle = tiled("qwen2_moe")
    ids = random_batch(2, 9)["input_ids"]
    with torch.no_grad():
        want = plain(input_ids=ids).logits
        assert torch.allclose(model.eval()(input_ids=ids).logits, want, rtol=1e-12, atol=1e-12)
        wanted = plain.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
    with handle.plain():
        model.train()(input_ids=ids, use_cache=False).logits.square().sum().backward()
    plain.train()(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert_gradients(gradients(model), gradients(plain), 1e-10)


def test_frozen_weights_and_inputs():
    """A model whose lower half is frozen: the inputs of its first tiles need no gradient."""
    batch = random_batch(2, 13)
    plain = model_of("qwen2_moe")
    model = copy.deepcopy(plain)
    for m in (plain, model):
        for name, p in m.named_parameters():
            p.requires_grad_("layers.1" in name or "layers.0.mlp" in name)
    want = reference_step(plain, batch)
    handle = dmu.parallelize(model, mlp_tile=5)
    step(model, handle, batch)
    assert_gradients(gradients(model), want[1], 1e-10)


def test_gradients_twice():
    """backward with retain_graph, and gradients that add up."""
    model, handle = tiled()
    shard = handle.shard(random_batch(1, 9))
    loss = handle.loss(model(**shard.inputs).logits, shard)
    loss.backward(retain_graph=True)
    once = {name: g.clone() for name, g in gradients(model).items()}
    loss.backward()
    assert_gradients(gradients(model), {name: 2 * g for name, g in once.items()}, 1e-12)


def with_lora(model, dropout):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["down_proj", "up_proj", "o_proj"]
    config = LoraConfig(r=3, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(model, config).double()


def test_lora():
    batch = random_batch(2, 13)
    want = reference_step(with_lora(model_of("llama"), 0.0), batch)
    model = with_lora(model_of("llama"), 0.0)
    handle = dmu.parallelize(model, mlp_tile=5)
    step(model, handle, batch)
    assert set(want[1]) and all("lora" in name for name in want[1])
    assert_gradients(gradients(model), want[1], 1e-10)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_drawn_again(checkpointing):
    """With dropout in an adapter, the derivative along a direction is that of the same masks."""
    model = with_lora(model_of("llama"), 0.5).train()
    handle = dmu.parallelize(model, mlp_tile=5)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    shard = handle.shard(random_batch(2, 13))
    weight = next(p for name, p in model.named_parameters() if "layers.0.mlp.down_proj.lora_A" in name)

    def loss():
        torch.manual_seed(7)
        return handle.loss(model(**shard.inputs).logits, shard)

    loss().backward()
    direction, small = torch.randn_like(weight), 1e-4
    found = []
    with torch.no_grad():
        for sign in (1, -2):
            weight += sign * small * direction
            found.append(loss().item())
        weight += small * direction
    # Norms compute in fp32, which the difference of two losses shows.
    assert (found[0] - found[1]) / (2 * small) == pytest.approx((weight.grad * direction).sum().item(), rel=1e-3)
    value = loss()
    before = torch.get_rng_state()
    value.backward()
    assert torch.equal(before, torch.get_rng_state())


def mlp_of(kind, dtype=torch.float64, experts="eager", **settings):
    """An MLP or experts of transformers, 16 wide, and the forward that runs it in tiles of 3 tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    if kind == "mixtral":
        sizes |= dict(num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_key_value_heads=2, head_dim=8, **sizes, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=experts).train()
    return next((m, forward) for m, forward in tiled_forwards(model.model, 3) if forward.kind in ("mlp", "experts"))


@pytest.mark.parametrize("kind", ["seed_oss", "starcoder2"])
def test_dropout_that_is_a_function(kind):
    """These MLPs call F.dropout. With one tile, the same seed gives the same masks as without tiles."""
    mlp, forward = mlp_of(kind, residual_dropout=0.5)
    forward.elements = 1000
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (mlp, forward):
        torch.manual_seed(3)
        out = call(x)
        torch.manual_seed(4)  # whatever others draw in between
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])))
    assert (found[0][0] == 0).any()
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_of_adapters_equals_that_without_tiles(reentrant):
    """One tile draws the masks of the untiled model, checkpointed alike."""
    grads = []
    for mlp_tile in (None, 1000):
        model = with_lora(model_of("llama"), 0.5).train()
        handle = dmu.parallelize(model, mlp_tile=mlp_tile)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
        torch.manual_seed(5)
        step(model, handle, random_batch(2, 13))
        grads.append(gradients(model))
    assert_gradients(grads[1], grads[0], 1e-10)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    "kind,experts,dtype",
    [
        *(("llama", "eager", dtype) for dtype in DTYPES),
        *(("mixtral", "eager", dtype) for dtype in DTYPES),
        *(("mixtral", "grouped_mm", dtype) for dtype in DTYPES[1:3]),
    ],
)
def test_dtypes_and_strides(kind, experts, dtype):
    """Inputs whose tokens are not next to each other, in each dtype, against fp64."""
    exact, _ = mlp_of(kind)
    module, forward = mlp_of(kind, dtype, experts)
    module.load_state_dict(exact.state_dict())
    exact.load_state_dict(module.state_dict())
    rows = torch.randn(16, 14).t().to(dtype)
    x = rows if kind == "mixtral" else rows.unflatten(0, (7, 2)).transpose(0, 1)
    others = [torch.arange(28).view(14, 2) % 4, torch.rand(14, 2).to(dtype)] if kind == "mixtral" else []
    grad = torch.randn(x.shape)
    found = []
    for call, kind_of in ((forward, dtype), (exact, torch.float64)):
        args = [y.detach().to(kind_of).requires_grad_() if y.is_floating_point() else y for y in (x, *others)]
        assert not args[0].is_contiguous()
        out, of = call(*args), exact if call is exact else module
        inputs = [y for y in args if y.requires_grad]
        found.append((out, *torch.autograd.grad(out, [*inputs, *of.parameters()], grad.to(kind_of))))
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype and (got - want).norm() <= 8 * torch.finfo(dtype).eps * want.norm()


def test_hooks_of_weights():
    """A hook that scales the gradient of a weight runs once, and sees the sum over the tiles."""
    mlp, forward = mlp_of("llama")
    x, seen = torch.randn(1, 8, 16, dtype=torch.float64), []
    want = torch.autograd.grad(mlp(x).sum(), mlp.up_proj.weight)[0]
    handle = mlp.up_proj.weight.register_hook(lambda g: seen.append(g) or 0.5 * g)
    forward(x).sum().backward()
    assert len(seen) == 1
    assert torch.allclose(mlp.up_proj.weight.grad, 0.5 * want, rtol=1e-12, atol=1e-14)
    handle.remove()
    forward(x).sum().backward()
    assert len(seen) == 1


def test_no_tokens_and_tokens_without_experts():
    mlp, forward = mlp_of("llama")
    empty = torch.zeros(1, 0, 16, dtype=torch.float64, requires_grad=True)
    forward(empty).sum().backward()
    assert empty.grad.shape == (1, 0, 16) and not mlp.up_proj.weight.grad.any()
    experts, forward = mlp_of("mixtral")
    x = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[4, 4]] * 3 + [[0, 3]] * 4)  # there are 4 experts; the first tile's tokens have none
    found = []
    for call in (experts, forward):
        out = call(x, index, weights)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, weights, *experts.parameters()])))
    assert not found[0][0][:3].any()
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_compiled_layers():
    """Compiled code runs up to the tiles and goes on after them."""
    batch = random_batch(2, 13)
    want = reference_step(model_of("llama"), batch)
    model, handle = tiled(mlp_tile=5)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    step(model, handle, batch)
    assert_gradients(gradients(model), want[1], 1e-10)


def test_forwards_of_other_packages():
    """Liger puts forwards on instances. Its norms hold little, so they stay; its MLPs run in tiles; others are unknown."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.models.llama import modeling_llama

    model = model_of("llama")
    with mock.patch.dict(vars(modeling_llama)):  # it replaces classes there too
        _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, rope=False)
        of_class = model_of("llama")
    found = {type(m).__name__ for m, _ in tiled_forwards(of_class.model, 4)}
    assert found == {"LigerSwiGLUMLP"}
    ligers = {name: vars(m)["forward"] for name, m in model.named_modules() if "forward" in vars(m)}
    first, second = (layer.mlp for layer in model.model.layers)
    second.forward = lambda x: second.down_proj(x.roll(1, dims=1))
    handle = dmu.parallelize(model, mlp_tile=4)
    assert isinstance(vars(first)["forward"], TiledForward)
    assert vars(first)["forward"].original.__func__.__module__.startswith("liger_kernel.")
    assert not isinstance(vars(second)["forward"], TiledForward)
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__:
            assert vars(module)["forward"] is ligers[name]
    handle.restore()
    assert vars(first)["forward"] == ligers["model.layers.0.mlp"]


def test_autocast():
    """Backward runs the tiles in the dtype of the forward."""
    batch = random_batch(2, 13)
    grads = []
    for mlp_tile in (None, 5):
        model = model_of("qwen3", dtype=torch.float32)
        handle = dmu.parallelize(model, mlp_tile=mlp_tile)
        shard = handle.shard(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = handle.loss(model(**shard.inputs).logits, shard)
        loss.backward()
        grads.append(gradients(model))
    # In bf16 both round, at other places; fp32 tiles would be nearer to the truth, and as far apart.
    exact = reference_step(model_of("qwen3", dtype=torch.float32), batch)[1]
    errors = [max(float((got[n] - g).norm() / g.norm()) for n, g in exact.items() if g.norm() > 1e-3) for got in grads]
    assert 0.3 < errors[1] / errors[0] < 2, errors


def test_backward_runs_in_the_autocast_of_the_forward():
    """One tile multiplies the same bf16 matrices as the plain module, although backward is outside of autocast."""
    mlp, forward = mlp_of("llama", torch.float32)
    forward.elements = 1000
    x = torch.randn(2, 5, 16, requires_grad=True)
    found = []
    for call in (mlp, forward):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x.clone())  # autocast caches what it makes of a leaf, and then adds gradients in bf16
        found.append((out, *torch.autograd.grad(out.sum(), [x, *mlp.parameters()])))
    for plain, got in zip(*found, strict=True):
        assert got.dtype == plain.dtype and torch.equal(got, plain)


def test_gradients_of_weights_are_summed_in_fp32():
    """A thousand tiles of one token in bf16: sums in bf16 would stop growing."""
    torch.manual_seed(0)
    exact, model = model_of("llama", dtype=torch.float32), model_of("llama", dtype=torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    mlps = [m.model.layers[0].mlp for m in (exact, model)]
    ((_, forward),) = [pair for pair in tiled_forwards(model.model, 1) if pair[0] is mlps[1]]
    x = torch.randn(1, 1024, 48).bfloat16()
    grad = 1 + 0.1 * torch.randn(1, 1024, 48)
    want = torch.autograd.grad(mlps[0](x.float()), list(mlps[0].parameters()), grad)
    untiled = torch.autograd.grad(mlps[1](x), list(mlps[1].parameters()), grad.bfloat16())
    got = torch.autograd.grad(forward(x), list(mlps[1].parameters()), grad.bfloat16())
    for a, b, c in zip(got, untiled, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - c).norm() <= 1.5 * (b.float() - c).norm()


def test_recomputation_ends_before_the_tiles():
    """A checkpoint recomputes no tiles whose module is the layer's last: they run in forward and in backward."""
    model, handle = tiled("llama", mlp_tile=100)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    calls = Counter()
    for kind in ("LlamaMLP", "LlamaRMSNorm"):
        for module in (m for m in model.modules() if type(m).__name__ == kind):
            forward = vars(module)["forward"]
            forward.original = counted(forward.original, calls, kind)
    step(model, handle, random_batch(1, 16))
    # Two MLPs, in forward and in backward. Two norms in each layer, once more in recomputation, and the last norm, which no
    # checkpoint recomputes.
    assert calls == {"LlamaMLP": 2 * 2, "LlamaRMSNorm": 4 * 3 + 2}


def counted(function, calls, name):
    def call(*args):
        calls[name] += 1
        return function(*args)

    return call


# ---------------------------------------------------------------------- memory


def peak_of_mlp(tokens, mlp_tile):
    """Bytes of forward and backward of Llama-3-8B's norm and MLP beside weights, their gradients, input and output."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    config = AutoConfig.for_model("llama", hidden_size=4096, intermediate_size=14336)
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer = nn.Sequential(LlamaRMSNorm(4096), LlamaMLP(config))
        finally:
            torch.set_default_dtype(torch.float32)
        layer.config = config
        for p in layer.parameters():
            p.grad = torch.empty_like(p)
        if mlp_tile is not None:
            for module, forward in tiled_forwards(layer, mlp_tile):
                module.forward = forward
        x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
        with StoredBytes([x, *layer.parameters(), *(p.grad for p in layer.parameters())]) as stored:
            out = layer(x)
            out.backward(torch.empty_like(out))
        return stored.peak


def test_memory_of_a_token():
    """Output, its gradient, the normed input and two gradients, 2D each, whatever the MLP's width."""
    one, two = (peak_of_mlp(tokens, 8192) for tokens in (65_536, 131_072))
    assert (two - one) / 65_536 <= 5 * 2 * 4096
    plain = [peak_of_mlp(tokens, None) for tokens in (65_536, 131_072)]
    assert (plain[1] - plain[0]) / 65_536 >= 6 * 2 * 14336  # the count sees an MLP


# ---------------------------------------------------------------------- what is refused


def wrong_tile(mlp_tile):
    dmu.parallelize(
        model_of("llama"), mlp_tile=mlp_tile[dist.get_rank() % 2] if isinstance(mlp_tile, tuple) else mlp_tile
    )


@pytest.mark.parametrize(
    "mlp_tile,error,match",
    [
        (0, ValueError, "mlp_tile must be at least 1 token, got 0"),
        (True, TypeError, "mlp_tile must be None or a number of tokens, got True"),
        ("auto", TypeError, "mlp_tile must be None or a number of tokens, got 'auto'"),
        ((4, 8), ValueError, r"mlp_tile, rank by rank: \[4, 8\]"),
    ],
)
def test_wrong_tiles(mlp_tile, error, match):
    raises_on_ranks(2, error, match, wrong_tile, mlp_tile)


def test_a_model_without_known_mlps():
    """Its MLPs are of another package, so nothing says that they compute each token by itself."""

    class Mixing(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp.gate_proj

        def forward(self, x):
            return self.mlp(x.roll(1, dims=1))

    model = model_of("llama", intermediate_size=48)
    for layer in model.model.layers:
        layer.mlp = Mixing(layer.mlp)
    with pytest.raises(dmu.UnsupportedModelError, match="mlp_tile=4 needs MLPs or experts .* LlamaModel has none"):
        dmu.parallelize(model, mlp_tile=4)
    dmu.parallelize(model)


def test_hooks_inside():
    model, handle = tiled()
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks inside of it would see one tile at a time"):
        step(model, handle, random_batch(1, 8))
    hook.remove()
    outside = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: outside.append(out.shape))
    step(model, handle, random_batch(1, 8))
    assert outside == [(1, 8, 48)]


def test_other_arguments():
    model, _ = tiled("deepseek_v3")
    experts = model.model.layers[1].mlp.experts
    with pytest.raises(RuntimeError, match=r"Experts was called with \[\(3, 48\), 'NoneType', 'NoneType'\]"):
        experts(torch.randn(3, 48))
