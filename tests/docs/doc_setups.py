"""What the Python blocks of the documentation find when they run on the ranks of a pool, and what is checked afterwards.

A setup is a context manager of a folder. It yields the names that a block uses, small models and batches among them; the
block runs in these names; behind the `yield`, the setup checks what the block left in them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import (
    assert_gradients,
    gradients,
    packed_batch,
    per_document_step,
    random_batch,
    reference_step,
    tiny_model,
)
from trainer_runs import Collate, fresh_state, samples

Names = dict[str, Any]
Setup = Callable[[Path], AbstractContextManager[Names]]
ROOT = Path(__file__).parents[2]

#: The documentation is written for eight GPUs; the tests have two processes on a CPU.
ON_TWO_CPUS = (
    ("sp_size=8", "sp_size=2"),
    ("SP_SIZE=8", "SP_SIZE=2"),
    ('config="configs/zero3.json"', 'config=["configs/zero3.json", "configs/cpu.json"]'),
)
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def for_two_cpus(code: str) -> str:
    """The code with the sizes and files of the tests."""
    for written, run in ON_TWO_CPUS:
        code = code.replace(written, run)
    return code


def run_block(name: str, code: str, setup: str, folder: str) -> None:
    """Runs a Python block on this rank."""
    with _in_folder(folder, setup), SETUPS[setup](Path.cwd()) as names:
        exec(compile(for_two_cpus(code), name, "exec"), names)


def run_module_with_environment(exports: dict[str, str], module_arguments: list[str], folder: str) -> None:
    """Runs `ds_mla_ulysses.run` on this rank, with variables in the environment."""
    import ds_mla_ulysses.run

    with _in_folder(folder, "environment"):
        Path("train.py").write_text(_TRAIN)
        before = list(sys.path)
        try:
            with mock.patch.dict(os.environ, exports), mock.patch.object(sys, "argv", ["run"]):
                ds_mla_ulysses.run.main(module_arguments)
        finally:
            sys.path[:] = before
            ds_mla_ulysses.uninstall()
        assert json.loads(Path("said.json").read_text())["sp_size"] == int(exports["PARALLELISM_CONFIG_SP_SIZE"])


@contextlib.contextmanager
def _in_folder(folder: str, setup: str) -> Iterator[None]:
    """A folder of this rank with the repository's configs, in a process as good as new."""
    from torch import distributed as dist
    from transformers import AttentionInterface, AttentionMaskInterface

    # One folder for both ranks, which write checkpoints together.
    here, before = Path(folder) / setup, Path.cwd()
    if dist.get_rank() == 0:
        here.mkdir()
        (here / "configs").symlink_to(ROOT / "configs")
        (here / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    dist.barrier()
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_state())
        stack.callback(os.chdir, before)
        os.chdir(here)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for interface in (AttentionInterface, AttentionMaskInterface):
            stack.enter_context(mock.patch.dict(interface._global_mapping))
            interface._global_mapping.pop("moba", None)
        yield


# A script for the Trainer that does not know of this package, nor of sequence parallelism.
_TRAIN = """
import json, torch
from models import tiny_model
from trainer_runs import Collate, samples
from transformers import Trainer, TrainingArguments

args = TrainingArguments(output_dir="out", deepspeed="ds_config.json", per_device_train_batch_size=1, max_steps=2,
                         use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = Trainer(model=tiny_model("llama", torch.float32), args=args, train_dataset=samples(8), data_collator=Collate())
trainer.train()
assert trainer.state.global_step == 2
json.dump({"sp_size": trainer.get_sp_size()}, open("said.json", "w")) if trainer.is_world_process_zero() else None
torch.distributed.barrier()
"""


def _same_on_both_ranks(value: torch.Tensor) -> None:
    from torch import distributed as dist

    values = [torch.empty_like(value.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach().contiguous())
    assert torch.isfinite(value).all() and all(torch.equal(x, values[0]) for x in values), values


def _names(**more: Any) -> Names:
    import ds_mla_ulysses as dmu

    return {"torch": torch, "dmu": dmu, **more}


@contextlib.contextmanager
def loop(_: Path) -> Iterator[Names]:
    """A loader of optimizer steps, each a list of micro-batches."""
    loader = [[random_batch(1, 17, seed=10 * step + micro) for micro in range(4)] for step in range(2)]
    names = {"model": tiny_model("deepseek_v3", torch.float32), "loader": loader}
    start = [p.detach().clone() for p in names["model"].parameters()]
    yield names
    assert names["engine"].global_steps == 2 and names["handle"].group.size == 2
    _same_on_both_ranks(names["loss"])
    # ZeRO-3 has partitioned the parameters, so their shards are compared with themselves only: the engine has stepped.
    assert names["handle"].num_items(names["shards"]) == names["num_items"] > 0 and start
    names["engine"].destroy()
    names["handle"].restore()


@contextlib.contextmanager
def _parallel(model: torch.nn.Module | None = None, **more: Any) -> Iterator[Names]:
    """A parallelized model and its handle."""
    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3") if model is None else model
    handle = dmu.parallelize(model, sp_size=2)
    names = _names(model=model, handle=handle, **more)
    yield names
    names["handle"].restore()


@contextlib.contextmanager
def packed(_: Path) -> Iterator[Names]:
    batch = packed_batch([[5, 7]])
    with _parallel(input_ids=batch["input_ids"]) as names:
        yield names
        want, _, _ = per_document_step(tiny_model("deepseek_v3"), {**batch, "labels": batch["input_ids"]})
        assert abs(names["loss"].item() - want) < 1e-6 * want


@contextlib.contextmanager
def plain(_: Path) -> Iterator[Names]:
    with _parallel(input_ids=random_batch(1, 7)["input_ids"]) as names:
        yield names
        with torch.no_grad():
            assert torch.equal(names["logits"], tiny_model("deepseek_v3")(names["input_ids"]).logits)


@contextlib.contextmanager
def _engine(stage: int = 2, **more: Any) -> Iterator[Names]:
    """The same with an engine."""
    import ds_mla_ulysses as dmu

    with _parallel(tiny_model("deepseek_v3", torch.float32), **more) as names:
        config = {
            **DS_CONFIG,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        }
        names["engine"], *_ = dmu.initialize(model=names["model"], config=config, handle=names["handle"])
        yield names
        names["engine"].destroy()


@contextlib.contextmanager
def plain_training(_: Path) -> Iterator[Names]:
    from torch import distributed as dist

    input_ids = random_batch(1, 9, seed=dist.get_rank())["input_ids"]  # each rank has a sequence of its own
    with _engine(input_ids=input_ids) as names:
        yield names
        assert names["engine"].global_steps == 1 and torch.isfinite(names["loss"])


@contextlib.contextmanager
def with_batch(_: Path) -> Iterator[Names]:
    with _parallel(batch=random_batch(2, 17)) as names:
        yield names
        if "loss" in names:
            _same_on_both_ranks(names["loss"])
        if "meter" in names:
            assert names["meter"].bytes["all_to_all", "forward"] > 0 < names["meter"].bytes["all_to_all", "backward"]


@contextlib.contextmanager
def tiled_loss(_: Path) -> Iterator[Names]:
    """Labels of odd numbers count half."""
    batch = random_batch(2, 17)
    names = _names(model=tiny_model("deepseek_v3"), batch=batch)
    yield names
    handle = names["handle"]
    names["loss"].backward()
    logits = tiny_model("deepseek_v3")(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none", label_smoothing=0.1)
    want = (losses * torch.where(labels % 2 == 0, 1.0, 0.5)).sum() / (labels != -100).sum()
    assert abs(names["loss"].item() - want) < 1e-6 * want
    assert names["predicted"].shape == names["shard"].shift_labels.shape
    handle.restore()


@contextlib.contextmanager
def mlp_tile(_: Path) -> Iterator[Names]:
    names = _names(model=tiny_model("deepseek_v3"), batch=random_batch(2, 17))
    yield names
    want = reference_step(tiny_model("deepseek_v3"), names["batch"])
    names["handle"].sum_gradients()
    assert_gradients(gradients(names["model"]), want[1], 1e-6)
    names["handle"].restore()


@contextlib.contextmanager
def keep_attention(_: Path) -> Iterator[Names]:
    batch = random_batch(2, 16)
    names = _names(model=tiny_model("deepseek_v3"), batch=batch)
    with names["dmu"].TrafficMeter() as meter:
        yield names
    assert meter.calls["all_to_all", "forward"] == 2 * len(names["model"].model.layers)
    names["handle"].sum_gradients()
    plain = tiny_model("deepseek_v3")
    assert_gradients(gradients(names["model"]), reference_step(plain, batch)[1], 1e-6)
    names["handle"].restore()


@contextlib.contextmanager
def long_sequences(_: Path) -> Iterator[Names]:
    batch = random_batch(2, 17)
    names = _names(model=tiny_model("llama"))
    yield names
    handle, model = names["handle"], names["model"]
    shard = handle.shard(batch)
    handle.loss(model(**shard.inputs).logits, shard).backward()
    handle.sum_gradients()
    assert_gradients(gradients(model), reference_step(tiny_model("llama"), batch)[1], 1e-6)
    handle.restore()


@contextlib.contextmanager
def aux_loss(_: Path) -> Iterator[Names]:
    batch = random_batch(2, 17)
    with _parallel(tiny_model("qwen3_moe"), batch=batch) as names:
        yield names
        plain = tiny_model("qwen3_moe")
        want = plain(**batch, output_router_logits=True).loss.item()
        assert abs(names["loss"].item() - want) < 1e-6 * want


@contextlib.contextmanager
def without_engine(_: Path) -> Iterator[Names]:
    names = _names(model=tiny_model("llama"), batches=[random_batch(1, 17, seed) for seed in range(2)])
    yield names
    for parameter in names["model"].parameters():
        _same_on_both_ranks(parameter)
    names["handle"].restore()


@contextlib.contextmanager
def parallelizes(_: Path) -> Iterator[Names]:
    """The block parallelizes the model itself."""
    names = _names(model=tiny_model("deepseek_v3"), batch=random_batch(2, 17))
    yield names
    handle = names["handle"]
    shard = handle.shard(names["batch"])
    handle.loss(names["model"](**shard.inputs).logits, shard).backward()
    assert shard.layout.kind == handle.split
    handle.restore()


@contextlib.contextmanager
def attention(_: Path) -> Iterator[Names]:
    from torch import distributed as dist

    sdpa = torch.nn.functional.scaled_dot_product_attention
    B, T, H, G, N, R, V, L = 2, 3, 4, 2, 128, 64, 128, 32
    generator = torch.Generator().manual_seed(dist.get_rank())
    weight = torch.randn(H * (N + V), L, generator=torch.Generator().manual_seed(7))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(B, T, *shape, generator=generator).requires_grad_()

    def local_attention(q: Any, k: Any, v: Any) -> Any:
        grouped = dict(is_causal=True, enable_gqa=True)
        return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **grouped).transpose(1, 2)

    def attention_of_shard(q: Any, k: Any, v: Any, first_query: int) -> Any:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(first_query)
        found = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True)
        return found.transpose(1, 2)

    def expand(latent: torch.Tensor, heads: slice) -> torch.Tensor:
        rows = weight.unflatten(0, (H, N + V))[heads].flatten(0, 1)
        return (latent @ rows.T).unflatten(-1, (-1, N + V))

    latent_BTL = random(L)
    names = _names(
        group=dist.group.WORLD,
        local_attention=local_attention,
        attention_of_shard=attention_of_shard,
        expand=expand,
        q_BTHK=random(H, N + R),
        latent_BTL=latent_BTL,
        kv_BTHP=expand(latent_BTL, slice(0, H)),
        k_shared_BTR=random(R),
        k_BTGK=random(G, N + R),
        v_BTGV=random(G, V),
    )
    yield names
    # The last two classes of the block, and those for MLA, give the same result each.
    out = names["out_BTHV"]
    dmu, widths, group = names["dmu"], names["widths"], names["group"]
    again = dmu.UlyssesAttention(local_attention, group)(names["q_BTHK"], names["k_BTGK"], names["v_BTGV"])
    torch.testing.assert_close(out, again)
    packed = dmu.UlyssesMLAAttention(local_attention, group, **widths)
    latent = dmu.LatentKVMLAAttention(local_attention, group, **widths)
    gather = dmu.GatherKVMLAAttention(attention_of_shard, group, **widths)
    given = names["q_BTHK"], names["latent_BTL"], names["k_shared_BTR"]
    want = packed(names["q_BTHK"], names["kv_BTHP"], names["k_shared_BTR"])
    torch.testing.assert_close(latent(*given, expand=expand), want)
    torch.testing.assert_close(gather(*given, expand=expand), want)


@contextlib.contextmanager
def moba(folder: Path) -> Iterator[Names]:
    from torch import distributed as dist
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0:
        tiny_model("llama", layers=4).save_pretrained(folder / "llama")
    dist.barrier()
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "path": folder / "llama"}
    yield names
    shard = names["handle"].shard(random_batch(1, 17))
    names["handle"].loss(names["model"].train()(**shard.inputs).logits, shard).backward()
    assert names["model"].config.moba["block_size"] == 4096
    names["handle"].restore()


@contextlib.contextmanager
def moba_attention(_: Path) -> Iterator[Names]:
    from torch import distributed as dist

    q, k, v = (torch.randn(1200, heads, 16) for heads in (4, 2, 2))
    names = _names(q=q, k=k, v=v, cu_seqlens=torch.tensor([0, 1200]), max_seqlen=1200, group=dist.group.WORLD)
    names |= {"q_BTHK": q[None, :600], "k_BTGK": k[None, :600], "v_BTGV": v[None, :600]}
    yield names
    assert names["out_BTHV"].shape == (1, 600, 4, 16) and names["out"].shape == (1200, 4, 16)
    assert names["blocks"].shape == (1200, 4, 2)


def _trainer_names(family: str = "llama", **model: Any) -> Names:
    from accelerate.utils import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    few = dict(per_device_train_batch_size=1, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True)
    return {
        "Trainer": Trainer,
        "TrainingArguments": functools.partial(TrainingArguments, use_cpu=True, **few),
        "ParallelismConfig": ParallelismConfig,
        "model": tiny_model(family, torch.float32, **model),
        # Of one length, so that the default collator takes them.
        "dataset": [{name: x[0].tolist() for name, x in random_batch(1, 17, seed).items()} for seed in range(8)],
    }


@contextlib.contextmanager
def trainer(_: Path) -> Iterator[Names]:
    import ds_mla_ulysses

    names, built = _trainer_names(), []
    original = names["Trainer"]
    names["Trainer"] = lambda **given: built.append(original(**given)) or built[0]
    try:
        yield names
        assert built[0].state.global_step == 2
        assert ds_mla_ulysses.handle_of(built[0].model).group.size == 2
    finally:
        ds_mla_ulysses.uninstall()


@contextlib.contextmanager
def _installed(names: Names) -> Iterator[Names]:
    import ds_mla_ulysses

    ds_mla_ulysses.install()
    parallelism = names["ParallelismConfig"](sp_backend="deepspeed", sp_size=2)
    names["args"] = names["TrainingArguments"](
        output_dir="out", deepspeed="ds_config.json", parallelism_config=parallelism
    )
    try:
        yield names
    finally:
        ds_mla_ulysses.uninstall()


@contextlib.contextmanager
def compute_loss(_: Path) -> Iterator[Names]:
    with _installed(_trainer_names()) as names:
        yield names
        trainer = names["MyTrainer"](model=names["model"], args=names["args"], train_dataset=names["dataset"])
        trainer.train()
        assert trainer.state.global_step == 2


@contextlib.contextmanager
def moba_trainer(_: Path) -> Iterator[Names]:
    import ds_mla_ulysses as dmu

    dmu.register_moba(dmu.MoBAConfig(block_size=4, top_k=2))
    with _installed(_trainer_names(attn_implementation="moba") | {"dmu": dmu}) as names:
        yield names
        assert names["trainer"].state.global_step == 2


@contextlib.contextmanager
def accelerate(_: Path) -> Iterator[Names]:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import ParallelismConfig

    import ds_mla_ulysses

    ds_mla_ulysses.install()  # the block may call it again, with the same settings
    PartialState(cpu=True)
    model = tiny_model("llama", torch.float32)
    loader = torch.utils.data.DataLoader(samples(4), batch_size=1, collate_fn=Collate())
    names = {"Accelerator": Accelerator, "DeepSpeedPlugin": DeepSpeedPlugin, "ParallelismConfig": ParallelismConfig}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "loader": loader}
    try:
        yield names
        assert len(names["loader"]) == 4
        _same_on_both_ranks(names["loss"])
    finally:
        ds_mla_ulysses.uninstall()


@contextlib.contextmanager
def accelerate_documented(folder: Path) -> Iterator[Names]:
    import deepspeed
    import torch.distributed.nn.functional as _functional  # noqa: F401  (the block uses it)

    with accelerate(folder) as names:
        plugin = names["DeepSpeedPlugin"](hf_ds_config="ds_config.json")
        parallelism = names["ParallelismConfig"](sp_backend="deepspeed", sp_size=2)
        accelerator = names["Accelerator"](deepspeed_plugin=plugin, parallelism_config=parallelism)
        model, optimizer, loader = accelerator.prepare(names["model"], names["optimizer"], names["loader"])
        names |= {"accelerator": accelerator, "model": model, "optimizer": optimizer, "loader": loader}
        names |= {"torch": torch, "deepspeed": deepspeed}
        yield names


@contextlib.contextmanager
def initialize(_: Path) -> Iterator[Names]:
    with _parallel(tiny_model("deepseek_v3", torch.float32)) as names:
        yield names
        assert names["engine"].zero_optimization_stage() == 3
        names["engine"].destroy()


@contextlib.contextmanager
def check_tag(folder: Path) -> Iterator[Names]:
    """Two checkpoints, of which the newer one was cut off on one rank."""
    from torch import distributed as dist

    with _engine() as names:
        for tag in ("older", "newer"):
            names["engine"].save_checkpoint("checkpoints", tag=tag)
        if dist.get_rank() == 0:
            file = next((folder / "checkpoints" / "newer").glob("*zero_pp_rank_1_*_optim_states.pt"))
            file.write_bytes(file.read_bytes()[:-100])
        dist.barrier()
        names["newest_first"] = ["newer", "older"]
        yield names
        assert names["tag"] == "older"
        if dist.get_rank() == 0:
            # For the shell block about plain weights.
            shutil.copytree(folder / "checkpoints", folder.parent / "checkpoints")
            (folder.parent / "checkpoints" / "latest").write_text("older")


@contextlib.contextmanager
def save_pretrained(folder: Path) -> Iterator[Names]:
    from torch import distributed as dist

    with _engine(stage=3) as names:
        yield names
        dist.barrier()
        assert (folder / "out" / "model.safetensors").exists()


SETUPS: dict[str, Setup] = {
    "accelerate": accelerate,
    "accelerate_documented": accelerate_documented,
    "attention": attention,
    "auto": parallelizes,
    "aux_loss": aux_loss,
    "check_tag": check_tag,
    "compute_loss": compute_loss,
    "head_tail": parallelizes,
    "initialize": initialize,
    "initialize_cpu": initialize,
    "keep_attention": keep_attention,
    "long_evaluation": with_batch,
    "long_sequences": long_sequences,
    "loop": loop,
    "meter": with_batch,
    "mlp_tile": mlp_tile,
    "moba": moba,
    "moba_attention": moba_attention,
    "moba_trainer": moba_trainer,
    "packed": packed,
    "plain": plain,
    "plain_training": plain_training,
    "save_pretrained": save_pretrained,
    "trainer": trainer,
    "tiled_loss": tiled_loss,
    "without_engine": without_engine,
}
