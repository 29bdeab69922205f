"""WIP"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from ds_mla_ulysses.stored_bytes import StoredBytes

ATTENTION = "flash_stand_in"

LLAMA3 = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
CFG: dict[str, tuple[str, dict[str, Any]]] = {
  "llama-3-8b": ("llama", LLAMA3 | dict(num_hidden_layers=32)),
  "qwen3-8b": ("qwen3", dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, num_hidden_layers=36)),
  "deepseek-v2-lite": ("deepseek_v2", dict(hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, vocab_size=102400, num_hidden_layers=27, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)),
  "glm-4.7-flash": ("glm4_moe_lite", dict()),
  "deepseek-v3": ("deepseek_v3", dict()),
}


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):      # [B, H, T, K]
        B, H, T, K = q.shape
        out = q.new_empty(B, T, H, v.shape[-1])
        lse = q.new_empty(B, H, T, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        acc = q.new_empty(q.shape, dtype=torch.float32)
        e = lambda x: x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)
        dq, dk, dv = e(q), e(k), e(v)
        return dq, dk, dv


def flash(module, query, key, value, attention_mask, **kwargs):
    return _Flash.apply(query, key, value), None


@contextlib.contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    import ds_mla_ulysses.hf.parallelize as P
    import ds_mla_ulysses.hf.patch as H
    from ds_mla_ulysses.layout.documents import Documents

    def one_document(position_ids, attention_mask, shape, device, group, *rest):
        B, T = shape
        starts = torch.zeros(B, T * group.size, dtype=torch.bool, device=device)
        positions = torch.zeros(B, T * group.size, dtype=torch.long, device=device)
        return Documents(starts, None, positions, [0]), torch.zeros(B, T, dtype=torch.long, device=device)

    def raise_problem(problem, settings):
        if problem is not None:
            raise problem

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, flash)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(sys.modules["ds_mla_ulysses.hf.parallelize"], "_check_alike", raise_problem), mock.patch.object(H, "gather_documents", one_document):
            yield
    finally:
        dist.destroy_process_group()


class Endpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_empty(())
    @staticmethod
    def backward(ctx, g):
        return g.new_empty(ctx.shape, dtype=ctx.dtype)


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w); return torch.empty_like(x)
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors; return torch.empty_like(x), torch.empty_like(w)


class End(nn.Module):
    def forward(self, x):
        return Endpoint.apply(x)


def measure(name, tokens, ranks, *, layers=("dense",), head=False, recompute=True, cls=StoredBytes, offload=False, fused=False, explains=False, norm=True, **settings):
    import ds_mla_ulysses as dmu
    from transformers import AutoConfig, AutoModelForCausalLM
    from ds_mla_ulysses.layout.shard import ShardLayout, LAYOUT

    kind, kw = CFG[name]
    config = AutoConfig.for_model(kind, **kw)
    config.max_position_embeddings = 2**24
    for k, v in settings.pop("config", {}).items(): setattr(config, k, v)
    config.num_hidden_layers = max(1, len(layers))
    if hasattr(config, "mlp_layer_types") and config.mlp_layer_types is not None:
        config.mlp_layer_types = ["sparse" if x == "moe" else "dense" for x in layers] or ["dense"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = sum(x == "dense" for x in layers)
    if getattr(config, "layer_types", None): config.layer_types = config.layer_types[:config.num_hidden_layers]
    T = tokens // ranks
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
    model.config._attn_implementation_internal = ATTENTION
    model.config._experts_implementation_internal = "grouped_mm"
    handle = dmu.parallelize(model, checks="never", **settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        x = torch.empty(1, T, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(1, T, dtype=torch.long)
        if not head:
            model.model.norm = End()
        if fused:
            import types
            for m in model.modules():
                if type(m).__name__.endswith("RMSNorm"):
                    m.forward = types.MethodType(lambda self, x: FusedNorm.apply(x, self.weight), m)
        if not layers:
            model.model.layers = nn.ModuleList()
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        given = [x, labels, *model.parameters(), *[p.grad for p in model.parameters()]]
        layout = ShardLayout("contiguous", ranks, dist.get_rank(), tokens)
        counter = cls(given, ("ds_mla_ulysses",), explains)
        with counter:
            if head:
                from ds_mla_ulysses.layout.shard import Shard
                out = model(inputs_embeds=x, **{LAYOUT: layout})
                out = handle.loss(out.logits, Shard({}, labels, layout))
            else:
                out = model.model(inputs_embeds=x, **{LAYOUT: layout}).last_hidden_state
            after = counter.now
            out.backward()
    return counter, after, T


if __name__ == "__main__":
    import json, os
    cases = json.loads(sys.argv[1])
    ranks, rank = int(os.environ.get("RANKS", 8)), int(os.environ.get("AT", 0))
    with fake_ranks(ranks, rank):
        for name, kw in cases:
            found = []
            for tokens in (2**19, 2**20):
                c, after, T = measure(name, tokens, ranks, explains=True, **kw)
                found.append((T, c.peak, after))
            (t0, p0, a0), (t1, p1, a1) = found
            slope = (p1 - p0) / (t1 - t0)
            print(name, kw, f"{slope:.0f} B/token const {(p1 - slope * t1)/1e9:.2f} GB, after forward {(a1-a0)/(t1-t0):.0f}", flush=True)
            if os.environ.get("SHOW"):
                for n, origin in c.at_peak()[:int(os.environ["SHOW"])]:
                    print("    ", f"{n / t1:.0f}", *origin)
