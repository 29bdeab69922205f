"""head_chunks: parts of the own heads one after the other give the numbers of all at once, and hold less."""

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, compare, sharded_step

import ds_mla_ulysses as dmu

WAYS = {
    "packed": dict(strategy="packed"),
    "latent_kv": dict(strategy="latent_kv"),
    "latent_qkv": dict(strategy="latent_qkv"),
    "gather_kv": dict(strategy="gather_kv"),
    "head_tail": dict(strategy="gather_kv", split="head_tail"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("size,heads,chunks", [(1, 5, 3), (2, 8, 4), (2, 7, 3), (4, 8, 2)])
@EVERY_WAY
def test_one_process(way, size, heads, chunks):
    """Odd numbers of heads and of parts too."""
    run_ranks(size, compare, "deepseek_v3", "packed", heads=heads, head_chunks=chunks, **WAYS[way])


def same_as_one_chunk(way):
    steps = []
    for chunks in (1, 2, 4):
        model = tiny_model("deepseek_v3", heads=8, first_k_dense_replace=2)  # routers work in fp32
        handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
        steps.append(sharded_step(model, packed_batch(DOCUMENTS), handle))
    for loss, grads, logits in steps[1:]:
        assert abs(loss - steps[0][0]) <= 1e-12 * abs(loss)
        assert (logits - steps[0][2]).abs().max() <= 1e-12 * logits.abs().max()
        assert_gradients(grads, steps[0][1], 1e-12)


@EVERY_WAY
def test_to_the_last_digits(way):
    run_ranks(2, same_as_one_chunk, way)


def with_everything(way, what):

    def step(chunks):
        model = tiny_model("deepseek_v3", torch.float32, heads=8)
        handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
        if what == "reentrant" or what == "not reentrant":
            settings = dict(use_reentrant=what == "reentrant")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        if what == "compiled":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        return sharded_step(model, packed_batch(DOCUMENTS), handle)

    want, got = step(1), step(2)
    assert abs(want[0] - got[0]) < 1e-6
    assert_gradients(got[1], want[1], 1e-5)


@pytest.mark.parametrize("what", ["reentrant", "not reentrant", "compiled"])
@pytest.mark.parametrize("way", ["packed", "latent_kv", "latent_qkv", "head_tail"])
def test_with_recomputation_and_compiled(way, what):
    run_ranks(2, with_everything, way, what)


def frozen(way):
    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("kv_b_proj" in name)
    want = reference_step(plain, random_batch(2, 22))
    handle = dmu.parallelize(model, head_chunks=2, **WAYS[way])
    _, grads, _ = sharded_step(model, random_batch(2, 22), handle)
    assert_gradients(grads, want[1], 1e-6)
    with torch.no_grad():
        model(**handle.shard(random_batch(1, 16)).inputs)


@EVERY_WAY
def test_frozen_and_without_gradients(way):
    run_ranks(2, frozen, way)


def rounded_once():
    """Gradients of three parts, twice 3 * 2**-10 and 1, are 1 + 2**-7 in bf16; added to the last one by one, they stay 1."""
    from ds_mla_ulysses.attention.chunks import for_chunks

    x = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    parts = list(for_chunks(3, x))
    small = 3 * 2.0**-10
    for _ in range(2):  # the second backward begins with an empty sum
        (grad,) = torch.autograd.grad((small * parts[0] + small * parts[1] + parts[2]).sum(), x, retain_graph=True)
        assert (grad == torch.tensor(1 + 2 * small).bfloat16()).all() and (grad != 1).all()
    (of_two,) = torch.autograd.grad((parts[0] + small * parts[2]).sum(), x)  # a part that is not used
    assert (of_two == torch.tensor(1 + small).bfloat16()).all()


def test_gradients_are_summed_in_fp32():
    rounded_once()


def refused(kind, **settings):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama" if kind == "llama" else "deepseek_v3")
    if kind == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules=["kv_b_proj"]))
    dmu.parallelize(model, **settings)


@pytest.mark.parametrize(
    "kind,settings,message",
    [
        ("llama", dict(head_chunks=3), "head_chunks=3 must be from 1 to 2, the fewest heads"),
        ("llama", dict(head_chunks=5, strategy="gather_kv"), "head_chunks=5 must be from 1 to 4, the fewest heads"),
        ("mla", dict(head_chunks=3), "head_chunks=3 must be from 1 to 2, the fewest heads"),
        ("mla", dict(head_chunks=0), "head_chunks must be an int >= 1, got 0"),
        ("adapters", dict(head_chunks=2, strategy="gather_kv"), "kv_b_proj is a Linear .* leave head_chunks out"),
    ],
)
def test_refused(kind, settings, message):
    raises_on_ranks(2, ValueError, message, refused, kind, **settings)


def largest_keys(way, chunks):
    """Elements of the largest key that a call of the attention function sees."""
    model = tiny_model("deepseek_v3", heads=8)
    handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
    seen = []
    for layer in model.model.layers:
        kernel = vars(layer.self_attn)["_ulysses"].kernel
        original = kernel._attend

        def watched(call, q, k, *rest, original=original):
            seen.append(k.shape[1])
            return original(call, q, k, *rest)

        kernel._attend = watched
    sharded_step(model, random_batch(1, 32), handle)
    assert gradients(model)
    return max(seen), len(seen)


@EVERY_WAY
def test_keys_of_one_part_at_a_time(way):
    (whole, calls), *_ = run_ranks(2, largest_keys, way, 1)
    (part, more), *_ = run_ranks(2, largest_keys, way, 4 if whole == 8 else 2)
    assert part * (4 if whole == 8 else 2) == whole
    assert more == 2 * calls * (4 if whole == 8 else 2)  # and once more in backward


def attention_with_dropout(kind, chunks, group):
    """The attention class as a function of its tensors, which draws the same random numbers in every call."""
    N, R, V, L, heads = 3, 2, 2, 4, 4
    torch.manual_seed(1)
    weight = torch.randn(heads, N + V, L, dtype=torch.float64)

    def dropping(q, k, v, first_query=0):
        scores = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
        return torch.einsum("bhts,bshv->bthv", torch.nn.functional.dropout(scores, 0.5), v)

    def expand(latent, own):
        return torch.einsum("bsl,mpl->bsmp", latent, weight[own])

    attention = kind(dropping, group, nope_dim=N, rope_dim=R, value_dim=V, head_chunks=chunks)

    def run(q, latent, shared):
        torch.manual_seed(0)
        return attention(q, latent, shared, expand=expand)

    shapes = (1, 2, heads, N + R), (1, 2, L), (1, 2, R)
    return run, [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kind", ["LatentKVMLAAttention", "GatherKVMLAAttention"])
def test_random_numbers_of_the_local_attention_are_drawn_once(kind):
    run, tensors = attention_with_dropout(getattr(dmu, kind), 2, None)
    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("kind", ["UlyssesMLAAttention", "LatentKVMLAAttention", "GatherKVMLAAttention"])
@pytest.mark.parametrize("parts", [0, -1, "2", 2.5, None, True])
def test_parts_are_a_number(kind, parts):
    with pytest.raises(ValueError, match="head_chunks must be an int >= 1"):
        attention_with_dropout(getattr(dmu, kind), parts, None)
    with pytest.raises(ValueError, match="head_chunks must be an int >= 1"):
        dmu.install(head_chunks=parts)


def test_a_key_that_is_on_its_way_goes_without_latents():
    run, (q, latent, shared) = attention_with_dropout(dmu.LatentKVMLAAttention, 1, None)
    pending = dmu.UlyssesMLAAttention(run, None, nope_dim=3, rope_dim=2, value_dim=2).gather_shared_key(shared)
    with pytest.raises(ValueError, match="LatentKVMLAAttention gathers the shared key together with the latents"):
        run(q, latent, pending)
