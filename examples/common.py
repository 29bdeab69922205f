"""What the examples share: a text and a small model that need no download, and the comparison with one process."""

from __future__ import annotations

import argparse
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore", category=FutureWarning)
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
    if "OMP_NUM_THREADS" not in os.environ:  # the processes share the cores; Accelerate would give all to each
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())

TOLERANCE = 1e-4
Worst = tuple[float, str]  # a difference, and the parameter that has it


def documentation() -> list[str]:
    """The Python documentation that the standard library carries, one text a topic."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


#: Of small models, what is their own; of DeepSeek-V3 the widths of a head to each other: 128, 64 and 128.
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 96,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
    },
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
SMALL = tuple(OWN_SETTINGS)


def small_config(vocab_size: int, longest: int, model_type: str = "deepseek_v3", **changes: Any) -> Any:
    """Of a small model, one of SMALL."""
    from transformers import AutoConfig

    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "max_position_embeddings": max(4096, longest),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.1,  # about hidden_size ** -0.5: at 0.02 attention is nearly uniform, and errors hardly show
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(model_type, **(settings | OWN_SETTINGS[model_type] | changes))


def attention_width(config: Any) -> int:
    """Elements per token and layer of Q, K, V, each with all its heads, and of the output."""
    H = config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        return 2 * H * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * (H + config.num_key_value_heads) * config.head_dim


def save_small_model(folder: Path, seed: int, longest: int) -> None:
    """Writes a new small model and a tokenizer of its own, for `from_pretrained`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    bytes_to_tokens = Tokenizer(models.BPE())
    bytes_to_tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_to_tokens.decoder = decoders.ByteLevel()
    bytes_to_tokens.train_from_iterator(
        documentation(),
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_to_tokens, pad_token="<pad>", eos_token="<eos>")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(seed)
    # Not from_config, which under ZeRO-3 waits for the other ranks.
    DeepseekV3ForCausalLM(small_config(len(tokenizer), longest, **special)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """What `parallelize` and `install` take alike."""
    add = parser.add_argument
    add("--strategy", default="packed", help="what travels between processes, or auto (default packed)")
    add("--split", default="contiguous", help="which tokens a process holds; head_tail is for gather_kv")
    add("--head-chunks", type=int, default=1, help="parts of a process's heads that attend one after the other")


def strategy_of(args: argparse.Namespace) -> dict[str, Any]:
    """Those options by the names of the arguments."""
    return {"strategy": args.strategy, "split": args.split, "head_chunks": args.head_chunks}


def add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """Those of `parallel_arguments`."""
    add = parser.add_argument
    add("--local_rank", type=int, help="given by the deepspeed launcher")
    add("--sp-size", type=int, help="processes that share each sequence; default: all")
    add("--zero-stage", type=int, choices=range(4), help="default 2")


def parallel_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What of TrainingArguments is about several processes."""
    by_accelerate = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # from its config file
    if by_accelerate or "WORLD_SIZE" not in os.environ:
        if args.sp_size or args.zero_stage is not None:
            raise SystemExit(
                "--sp-size and --zero-stage are for the deepspeed launcher and torchrun: leave them out, or write "
                "them into the config file of accelerate launch."
            )
        return {}
    from accelerate.utils import ParallelismConfig

    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    deepspeed = dict.fromkeys(auto, "auto") | {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 2 if args.zero_stage is None else args.zero_stage,
            "stage3_param_persistence_threshold": "auto",
        },
    }
    sp_size = args.sp_size or int(os.environ["WORLD_SIZE"])
    return {
        "deepspeed": deepspeed,
        "parallelism_config": ParallelismConfig(sp_backend="deepspeed", sp_size=sp_size),
    }


def relative(distance: float, to: float) -> float:
    if not math.isfinite(distance) or (distance and not to):
        return math.inf
    return distance / to if distance else 0.0


def largest_differences(
    model: torch.nn.Module,
    start: dict[str, torch.Tensor] | None,
    trained: dict[str, torch.Tensor] | None,
) -> tuple[Worst, Worst]:
    """The largest relative differences of a parameter: to its norm, and to how much it changed.

    Args:
        model: what the processes trained; under ZeRO-3 all of them call this.
        start, trained: by name, the parameters before and after the training in one process; None on other ranks.
    """
    from deepspeed.runtime.zero import GatheredParameters

    to_norm, to_change = (0.0, ""), (0.0, "")
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]), torch.no_grad():  # under ZeRO-3 every rank has a part
            if trained is None or start is None:
                continue
            wanted = trained[name].to(parameter.device)
            distance, norm = (parameter - wanted).norm().item(), wanted.norm().item()
            changed = (wanted - start[name].to(parameter.device)).norm().item()
            to_norm = max(to_norm, (relative(distance, norm), name))
            # What is stored is rounded, also where it hardly changed.
            rounding = min(distance, torch.finfo(parameter.dtype).eps * norm)
            to_change = max(to_change, (relative(distance - rounding, changed), name))
    return to_norm, to_change


def report_curve(what: str, one: list[float], ours: list[float], processes: int) -> float:
    """Prints two curves side by side; returns their largest relative difference."""
    print(f"\n{what:>10}{'one process':>16}{f'{processes} processes':>16}{'difference':>14}")
    for step, (a, b) in enumerate(zip(one, ours, strict=True)):
        print(f"{step:>10}{a:>16.7f}{b:>16.7f}{abs(a - b):>14.1e}")
    worst = max(relative(abs(a - b), abs(a)) for a, b in zip(one, ours, strict=True))
    print(f"largest relative difference of a {what}: {worst:.1e}")
    return worst


def report_parameters(to_norm: Worst, to_change: Worst) -> None:
    print(f"largest relative difference of a parameter, to its norm: {to_norm[0]:.1e} ({to_norm[1]})")
    beyond = f"{to_change[0]:.1e} ({to_change[1]})" if to_change[0] else "none"
    print(f"  to how much it changed, beyond the rounding of what is stored: {beyond}")


def report_verdict(worst: dict[str, float]) -> bool:
    """Prints and returns whether none of the differences is larger than the tolerance."""
    equal = all(value <= TOLERANCE for value in worst.values())
    says = f"equal: nothing differs by more than {TOLERANCE}" if equal else f"DIFFERENT by more than {TOLERANCE}"
    print("\n" + says)
    return equal


def environment_of_one() -> dict[str, str]:
    """The environment without what launchers add to it, and with one GPU at most."""
    of_launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "CROSS_", "GROUP_", "ROLE_", "MASTER_")
    of_launchers += ("ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "DEEPSPEED_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_launchers)}
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return environment
