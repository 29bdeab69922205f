"""Checks an installed wheel on two processes. `make wheel` runs a copy of this file outside the clone:

    python -m torch.distributed.run --standalone --nproc-per-node 2 wheel_check.py

The package has to come from the environment of this Python, and a sharded step of a tiny Llama and a tiny DeepSeek-V3
has to give the loss and the gradients of one process.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ds_mla_ulysses as dmu

# The models are in fp64, but transformers computes the loss of the plain one in fp32.
TOLERANCE = 1e-6
MODELS = {
    "llama": {"num_key_value_heads": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
    },
}


def tiny_model(family: str) -> torch.nn.Module:
    """A model of two layers, the same on every rank."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        **MODELS[family],
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()


def check_origin() -> None:
    """Asserts that the package was imported from this environment and that no other copy can be imported."""
    site = Path(sysconfig.get_path("purelib")).resolve()
    assert Path(dmu.__file__).resolve() == site / "ds_mla_ulysses/__init__.py", dmu.__file__
    copies = [path for path in sys.path if (Path(path) / "ds_mla_ulysses").exists()]
    assert [Path(path).resolve() for path in copies] == [site], copies
    finders = [finder for finder in sys.meta_path if "ds_mla_ulysses" in str(getattr(finder, "__module__", ""))]
    assert not finders, f"an editable installation is active: {finders}"
    installed = distribution("ds-mla-ulysses")
    assert installed.version == dmu.__version__
    assert Path(str(installed.locate_file("ds_mla_ulysses/py.typed"))).exists(), "the wheel has no py.typed"


def check_step(family: str) -> float:
    """Compares a sharded step with a plain one; returns the largest relative difference."""
    model = tiny_model(family)
    input_ids = torch.randint(0, 64, (2, 37), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    want = model(**batch, use_cache=False).loss
    want.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    handle = dmu.parallelize(model, sp_size=dist.get_world_size())
    shard = handle.shard(batch)
    loss = handle.loss(model(**shard.inputs, use_cache=False).logits, shard)
    loss.backward()
    handle.sum_gradients()
    differences = {"the loss": float((loss.detach() - want.detach()).abs() / want.detach().abs())}
    for name, p in model.named_parameters():
        differences[name] = float((p.grad - gradients[name]).norm() / gradients[name].norm())
    handle.restore()
    worst = max(differences, key=lambda name: differences[name])
    assert all(difference <= TOLERANCE for difference in differences.values()), (
        f"{family}, rank {dist.get_rank()}: {worst} differs by {differences[worst]:.1e}, allowed is {TOLERANCE:.0e}"
    )
    return differences[worst]


def main() -> None:
    check_origin()
    dist.init_process_group("gloo")
    try:
        assert dist.get_world_size() > 1, "start this file with torchrun on at least two processes"
        for family in MODELS:
            difference = check_step(family)
            if dist.get_rank() == 0:
                print(f"{family}: equal to one process (largest relative difference {difference:.1e})")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
