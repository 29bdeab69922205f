"""A loop that writes a checkpoint after its last step, and continues from one: `--steps`, `--save DIR`, `--resume DIR`."""

import argparse

import torch

import ds_mla_ulysses as dmu
from ds_mla_ulysses.small_models import small_model, text_windows
from ds_mla_ulysses.verify import run

ACCUMULATION = 2


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    args = parser.parse_args()
    path = small_model("deepseek_v3")
    model = AutoModelForCausalLM.from_pretrained(path).train()
    windows = text_windows(path, 63)
    handle = dmu.parallelize(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    first = 0
    if args.resume:
        folder, state = engine.load_checkpoint(args.resume)
        assert folder is not None
        first = state["step"]
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(windows), (ACCUMULATION, 2), generator=generator)
        shards = [handle.shard({"input_ids": windows[row], "labels": windows[row]}) for row in rows]
        num_items = handle.num_items(shards)
        for shard in shards:
            engine.backward(handle.loss(engine(**shard.inputs).logits, shard, num_items=num_items))
            engine.step()
    if args.save:
        engine.save_checkpoint(args.save, client_state={"step": args.steps})


if __name__ == "__main__":
    run(main)
