"""The implementation "flash", with a plain replacement for the operator, which runs on GPUs only.

The replacement checks that its callers meet the requirements of the operator.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from moba_cases import inputs, product, random_case, run, seeds

from ds_mla_ulysses.moba import api, flash_implementation, moba_attention, moba_attn_varlen, moba_select
from ds_mla_ulysses.moba.boundaries import Document
from ds_mla_ulysses.moba.reference import reference_attention


@dataclasses.dataclass
class Operator:
    """The two functions of the operator. It records their calls."""

    forwards: list = dataclasses.field(default_factory=list)
    backwards: list = dataclasses.field(default_factory=list)

    def check(self, q, k, v, cu_q, cu_k, max_q, max_k, *like_q):
        (T, H, W), (S, G, _) = q.shape, k.shape
        assert k.shape == v.shape == (S, G, W) and H % G == 0 and W <= 256 and W % 8 == 0
        for x in (q, k, v, *like_q):
            assert x.dtype == q.dtype and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in x.stride()[:-1])
        assert all(x.shape == q.shape for x in like_q)
        lengths = []
        for cu, tokens, longest in ((cu_q, T, max_q), (cu_k, S, max_k)):
            assert cu.dtype == torch.int32 and cu.is_contiguous() and cu[0] == 0 and cu[-1] == tokens
            lengths.append(cu.diff().tolist())
            assert min(lengths[-1]) > 0 and max(lengths[-1]) == longest
        assert len(lengths[0]) == len(lengths[1])
        return lengths

    @staticmethod
    def scores(q, k, causal, scale):
        """Returns [H, T, S]. The last query is aligned with the last key."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("thw,shw->hts", wide(q), wide(k)) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        return scores.masked_fill(future, float("-inf")) if causal else scores

    def forward(self, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
        lengths = self.check(q, k, v, cu_q, cu_k, max_q, max_k)
        self.forwards.append((q, k, v, lengths, causal))
        outs, lses = [], []
        for q_, k_, v_ in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True):
            assert not causal or len(k_) >= len(q_)
            scores = self.scores(q_, k_, causal, scale)
            v_ = wide(v_).repeat_interleave(q.shape[1] // k.shape[1], 1)
            outs.append(torch.einsum("hts,shw->thw", scores.softmax(-1), v_).to(q.dtype))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses, 1)

    def backward(self, grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
        lengths = self.check(q, k, v, cu_q, cu_k, max_q, max_k, grad, out)
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and lse.dtype == wide(q).dtype
        self.backwards.append(lengths)
        R, grads = q.shape[1] // k.shape[1], []
        parts = [x.split(lengths[0]) for x in (grad, q, out, lse.t())] + [x.split(lengths[1]) for x in (k, v)]
        for grad_, q_, out_, lse_, k_, v_ in zip(*parts, strict=True):
            weights = (self.scores(q_, k_, causal, scale) - lse_.t().unsqueeze(-1)).exp()
            grad_, q_, out_, k_, v_ = map(wide, (grad_, q_, out_, k_, v_))
            k_, v_ = (x.repeat_interleave(R, 1) for x in (k_, v_))
            delta = (grad_ * out_).sum(-1).t().unsqueeze(-1)
            dscores = weights * (torch.einsum("thw,shw->hts", grad_, v_) - delta) * scale
            dq = torch.einsum("hts,shw->thw", dscores, k_)
            dk, dv = torch.einsum("hts,thw->shw", dscores, q_), torch.einsum("hts,thw->shw", weights, grad_)
            grads.append([dq, *(x.unflatten(1, (-1, R)).sum(2) for x in (dk, dv))])
        return [torch.cat(x).to(q.dtype) for x in zip(*grads, strict=True)]


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


@pytest.fixture
def operator(monkeypatch):
    operator = Operator()
    monkeypatch.setattr(flash_implementation, "is_available", lambda device: True)
    monkeypatch.setattr(flash_implementation, "_DTYPES", (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    monkeypatch.setattr(flash_implementation, "varlen_forward", operator.forward)
    monkeypatch.setattr(flash_implementation, "varlen_backward", operator.backward)
    return operator


def check_exact(qkv, cu, block_size, top_k, **settings):
    got, want = (run(qkv, cu, block_size, top_k, implementation=name, **settings) for name in ("flash", "reference"))
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    assert got[0].is_contiguous()
    return got


# Exactness.


@product(S=[1, 61, 251], top_k=[1, 2, 3, 5], block_size=[1, 5, 16, 60, 64, 128])
def test_odd_sizes(operator, S, block_size, top_k):
    check_exact(inputs(S, 2, 1, 8, seed=S + block_size), None, block_size, top_k)


@seeds(24, kept=8)
def test_documents(operator, seed):
    """Random documents, also empty ones, with all queries or only the last ones, grouped heads and unequal widths."""
    qkv, cu, block_size, top_k, settings = random_case(seed)
    check_exact(qkv, cu, block_size, top_k, **settings)


# Bugs that users of other implementations reported.


def test_top_k_1_is_attention_within_blocks(operator):
    check_exact(inputs(256), None, 64, 1)
    ((*_, lengths, causal),) = operator.forwards
    assert causal and lengths == [[64] * 4] * 2


def test_cu_seqlens_changed_in_place(operator):
    qkv, cu = inputs(256), torch.tensor([0, 128, 256], dtype=torch.int32)
    before = check_exact(qkv, cu, 64, 2)
    cu[1] = 64
    assert (check_exact(qkv, cu, 64, 2)[0] - before[0]).abs().max() > 0.1


@pytest.mark.parametrize("S", [256, 64])
def test_grouped_heads(operator, S):
    q, k, v = inputs(S, 4, 2)
    grouped = check_exact([q, k, v], None, 64, 3)
    repeated = check_exact([q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)], None, 64, 3)
    torch.testing.assert_close(grouped[:2], repeated[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("S,block_size,top_k", [(251, 60, 3), (40, 1, 5), (250, 63, 2), (13, 4, 2)])
def test_any_block_size(operator, S, block_size, top_k):
    check_exact(inputs(S), None, block_size, top_k)


def test_a_document_inside_padding(operator):
    qkv = inputs(200)
    out = check_exact(qkv, torch.tensor([0, 40, 200]), 64, 2)[0]
    alone = moba_attn_varlen(*(x.detach()[40:] for x in qkv), None, None, 64, 2, implementation="flash")
    torch.testing.assert_close(out[40:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("top_k", [2, 3])
def test_equal_keys(operator, top_k):
    q, k, v = inputs(256)
    check_exact([q, k.detach()[:1].repeat(256, 1, 1).requires_grad_(), v], None, 64, top_k)


@pytest.mark.parametrize("H,G", [(2, 2), (4, 1)])
@pytest.mark.parametrize("T", [64, 1, 100])
def test_the_last_queries_only(operator, T, H, G):
    qkv = inputs(256, H, G)
    whole = run(qkv, None, 64, 2, implementation="reference")[0]
    last = [qkv[0].detach()[-T:].requires_grad_(), *qkv[1:]]
    torch.testing.assert_close(check_exact(last, None, 64, 2)[0], whole[-T:], rtol=0, atol=1e-10)


def test_decoding_reads_picked_blocks_only(operator):
    """One query of 100 blocks reads its current block and two more of each head."""
    q, k, v = (x.detach() for x in inputs(1600, 2, T=1))
    moba_attn_varlen(q, k, v, None, None, 16, 3, implementation="flash")
    assert [len(keys) for _, keys, *_ in operator.forwards] == [16, 32, 32]


def test_decoding_a_batch(operator):
    """Documents of one query each, whose keys are not consecutive."""
    cu = torch.tensor([0, 100, 100, 130, 300])
    check_exact(inputs(300, 4, 2, T=3), cu, 16, 3, cu_seqlens_q=torch.tensor([0, 1, 1, 2, 3]))
    assert operator.forwards[0][3] == [[1, 1, 1], [4, 30, 10]]  # 30 keys are dense


def test_documents_that_top_k_blocks_cover_are_one_dense_call(operator):
    qkv = inputs(200, 4, 2)
    check_exact(qkv, torch.tensor([0, 40, 40, 131, 200]), 23, 4)
    ((q, k, v, lengths, causal),) = operator.forwards
    assert causal and lengths == [[40, 91, 69]] * 2
    for x, y in zip((q, k, v), qkv, strict=True):
        assert x.data_ptr() == y.data_ptr()


def test_scale_is_applied(operator):
    qkv = inputs(256)
    outs = [check_exact(qkv, None, 64, 2, scale=scale)[0] for scale in (None, 0.05, 2.0)]
    assert all((x - y).abs().max() > 0.1 for x, y in itertools.pairwise(outs))


@pytest.mark.parametrize("K,V", [(24, 16), (16, 24), (7, 1), (192, 128)])
def test_unequal_widths(operator, K, V):
    check_exact(inputs(130, 2, 1, K, V), None, 16, 3)
    assert {q.shape[-1] for q, *_ in operator.forwards} == {-(-max(K, V) // 8) * 8}


def test_int64_cu_seqlens(operator):
    qkv, cu = inputs(256), torch.tensor([0, 70, 256], dtype=torch.int32)
    assert all(map(torch.equal, check_exact(qkv, cu, 64, 2), check_exact(qkv, cu.long(), 64, 2)))


# Blocks, segments and operands.


def test_blocks_that_nobody_picks(operator):
    """Each head picks only block 0 or 3. The other blocks have no rows, and no gradient from past queries."""
    q, k, v = inputs(256, 2, 2, 16)
    with torch.no_grad():
        k[:, :, 0], q[:, :, 0] = 0, 100
        k[:32, 0, 0] = 1
        k[96:128, 1, 0] = 1
    got = check_exact([q, k, v], None, 32, 2)
    assert [len(lengths[0]) for *_, lengths, _ in operator.forwards[1:]] == [1, 4]
    assert all(x.isfinite().all() for x in got)


def test_segments_of_unequal_sizes_in_several_documents(operator):
    cu = torch.tensor([0, 200, 210, 210, 333, 400])
    check_exact(inputs(400, 6, 2), cu, 16, 3)
    current, *routed = operator.forwards
    assert current[4] and not any(causal for *_, causal in routed) and len(routed) == 2
    for q, k, _, lengths, _ in routed:
        assert q.shape[1] == k.shape[1] == 1 and set(lengths[1]) == {16} and len(set(lengths[0])) > 3


def test_key_value_heads_are_not_copied(operator):
    """This holds if all blocks except the last are picked, which is practically always so in training."""
    q, k, v = (x.detach() for x in inputs(300, 6, 2))
    moba_attn_varlen(q, k, v, None, None, 32, 3, implementation="flash")
    assert len(operator.forwards) == 3
    for _, k_, v_, *_ in operator.forwards:
        assert k_.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert v_.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_strides_and_gradients_without_strides(operator):
    """Operands that the operator cannot read in place are copied: it would read wrong addresses, or crash."""

    def parts(row, *starts):
        buffer = torch.randn(90, row, dtype=torch.float64)
        return [buffer[:, a : a + 16].unflatten(1, (2, 8)).requires_grad_() for a in starts]

    odd = [torch.randn(2, 12, 90, dtype=torch.float64).permute(2, 0, 1).requires_grad_() for _ in range(3)]
    heads = [torch.randn(2, 90, 8, dtype=torch.float64).transpose(0, 1).requires_grad_() for _ in range(3)]
    for qkv in (parts(101, 0, 16, 32), parts(104, 1, 17, 33), odd, heads):
        got, want = (
            torch.autograd.grad(moba_attn_varlen(*qkv, None, None, 16, 2, implementation=name).sum(), qkv)
            for name in ("flash", "reference")
        )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_batches(operator):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, heads, 8, dtype=torch.float64) for n, heads in ((20, 4), (75, 2), (75, 2)))
    got, want = (moba_attention(q, k, v, 16, 2, implementation=name) for name in ("flash", "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_nothing(operator):
    q, k, v = (torch.randn(0, 2, 8, requires_grad=True) for _ in range(3))
    moba_attn_varlen(q, k, v, torch.tensor([0, 0]), 0, 4, 2, implementation="flash").sum().backward()
    assert q.grad.shape == k.grad.shape == (0, 2, 8) and not operator.forwards
    q, k, v = torch.randn(0, 2, 8, requires_grad=True), *torch.randn(2, 30, 2, 8, requires_grad=True).unbind()
    out = moba_attn_varlen(q, k, v, None, 30, 4, 2, implementation="flash")
    assert out.shape == (0, 2, 8)
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


# Rounding.


def errors(got, want):
    """Returns relative root mean square errors."""
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]


@product(dtype=[torch.bfloat16, torch.float16], sizes=[(500, 50, 4), (400, 130, 2), (400, 16, 20)])
def test_rounding(operator, dtype, sizes, monkeypatch):
    """The error is little more than that of dense attention, however many partial results are summed."""
    S, block_size, top_k = sizes
    qkv = inputs(S, 4, 2, 32, dtype=dtype)
    blocks = moba_select(*qkv[:2], None, block_size, top_k)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    dense = errors(run(qkv, None, S, 1, implementation="flash"), run(exact, None, S, 1, implementation="reference"))
    monkeypatch.setattr(api, "reference_attention", functools.partial(reference_attention, blocks_THJ=blocks))
    found = errors(
        run(qkv, None, block_size, top_k, implementation="flash"),
        run(exact, None, block_size, top_k, implementation="reference"),
    )
    assert all(0 < mine <= 1.5 * theirs for mine, theirs in zip(found, dense, strict=True)), (found, dense)


def test_sums_are_wide_and_have_no_gaps(operator):
    """Sums are rounded once, by the caller. Results that need no sum keep the dtype of the operator."""
    documents = [Document(0, 0, 100, 100)]
    q, k, v = (x.detach() for x in inputs(100, 4, 2, 16, 8, dtype=torch.bfloat16))
    for block_size, top_k, dtype in ((16, 3, torch.float32), (50, 2, torch.bfloat16)):
        out, lse, blocks = flash_implementation.forward(q, k, v, documents, block_size, top_k, top_k - 1, 0.3)
        grads = flash_implementation.backward(
            v.repeat(1, 2, 1), q, k, v, out.to(q.dtype), lse, blocks, documents, block_size, top_k, 0.3
        )
        assert lse.dtype == torch.float32 and [x.dtype for x in (out, *grads)] == [dtype] * 4
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert all(x.is_contiguous() for x in (out, lse, blocks, *grads))


def test_two_runs_give_the_same_bits(operator):
    torch.set_num_threads(2)
    qkv, cu = inputs(90, 4, 2, 32, dtype=torch.bfloat16), torch.tensor([0, 30, 90])
    first = run(qkv, cu, 16, 4, implementation="flash")
    assert all(map(torch.equal, run(qkv, cu, 16, 4, implementation="flash"), first))


def test_runs_where_only_deterministic_algorithms_are_allowed(operator):
    qkv = inputs(200, 4, 2)
    want = run(qkv, torch.tensor([0, 90, 200]), 16, 3, implementation="flash")
    torch.use_deterministic_algorithms(True)
    try:
        got = run(qkv, torch.tensor([0, 90, 200]), 16, 3, implementation="flash")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, got, want))


def test_compiles_to_one_graph(operator):
    qkv, cu = inputs(120, 4, 2), torch.tensor([0, 50, 120])
    want = run(qkv, cu, 16, 2, implementation="flash")
    attend = functools.partial(moba_attn_varlen, implementation="flash")
    step = torch.compile(lambda *x: attend(*x, None, 16, 2), backend="aot_eager", fullgraph=True)
    out = step(*qkv, cu)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for x, y in zip([out, *torch.autograd.grad(out, qkv, grad)], want, strict=True):
        assert torch.equal(x, y)


# Errors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_refused(dtype, monkeypatch):
    monkeypatch.setattr(flash_implementation, "is_available", lambda device: True)
    with pytest.raises(ValueError, match=f"'flash' runs in bf16 and fp16, got {dtype}: choose 'torch'"):
        run(inputs(8, dtype=dtype), None, 4, 2, implementation="flash")


@pytest.mark.parametrize("K,V", [(264, 8), (8, 257)])
def test_wide_heads_are_refused(operator, K, V):
    with pytest.raises(ValueError, match=f"head widths up to 256, got q and k {K}, v {V}: choose 'torch'"):
        run(inputs(8, K=K, V=V), None, 4, 2, implementation="flash")


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="needs an NVIDIA GPU of .* got tensors on cpu: choose 'torch'"):
        run(inputs(8, dtype=torch.bfloat16), None, 4, 2, implementation="flash")


def test_too_many_segments_are_refused(operator):
    with pytest.raises(ValueError, match="at most 65535 blocks .* got 65536: choose a larger block_size, or 'torch'"):
        run(inputs(65536, 1, 1, 1), None, 1, 1, implementation="flash")


def test_too_many_pairs_are_refused(operator):
    blocks_THJ = torch.empty(1, dtype=torch.int32).expand(2**27, 1, 16)
    with pytest.raises(ValueError, match="in int32, got 134217728 queries of 1 heads with 16 past blocks each"):
        next(flash_implementation._kv_heads(blocks_THJ, 1, [], 4))


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_flash_attention_backward"])
def test_torch_has_the_operators(name):
    """torch accepts the arguments that are passed. Meta tensors give the shapes without a GPU."""
    q, k = (torch.empty(n, heads, 16, dtype=torch.bfloat16, device="meta") for n, heads in ((10, 4), (20, 2)))
    bounds = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(3, dtype=torch.int32, device="meta"), 6, 12
    out, lse = flash_implementation.varlen_forward(q, k, k, *bounds, True, 0.3)
    assert out.shape == q.shape and lse.shape == (4, 10) and lse.dtype == torch.float32
    if name.endswith("backward"):
        grads = flash_implementation.varlen_backward(out, q, k, k, out, lse, *bounds, True, 0.3)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
