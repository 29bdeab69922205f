"""Small random models and a text, for the examples and benchmarks: nothing is downloaded."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .errors import UlyssesValueError

#: The settings in which the small models differ. The head widths of DeepSeek-V3 (128, 64 and 128) keep their ratio.
SETTINGS: dict[str, dict[str, Any]] = {
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


def python_documentation() -> list[str]:
    """The documents of the Python documentation that the standard library contains, one for each topic."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def small_config(model_type: str, vocab_size: int, **changes: Any) -> Any:
    """The config of a small model with 4 layers.

    Args:
        model_type: a key of SETTINGS.
        vocab_size: the number of tokens in the vocabulary.
        changes: settings that replace those of the small model.
    """
    from transformers import AutoConfig

    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        # About hidden_size ** -0.5. At the usual 0.02, attention is nearly uniform and errors in it hardly show.
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(model_type, **(settings | SETTINGS[model_type] | changes))


def small_model(name: str, seed: int = 0) -> str:
    """The folder of a new small model and its tokenizer, for `from_pretrained`; any other name is returned as it is.

    Every call with the same seed writes the same weights, so each process can have its own folder. The tokens are bytes.
    The folder is temporary and goes when the process ends.

    Args:
        name: a key of SETTINGS, or the name or folder of any Hugging Face model.
        seed: of the random weights. The global random state is left as it was.
    """
    if name not in SETTINGS:
        return name
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    bytes_to_tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_to_tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_to_tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_to_tokens, pad_token="<pad>", eos_token="<eos>")
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = small_config(name, len(tokenizer), **special)
    # Not from_config: with ZeRO-3 it shards the new parameters and waits for the other ranks.
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    folder = Path(tempfile.mkdtemp(prefix=f"small_{name}_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Not model.save_pretrained: if processes are initialised, it writes on one of them only.
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return str(folder)


def text_windows(tokenizer: str, length: int) -> Any:
    """Every run of consecutive tokens of the Python documentation, as a view.

    Args:
        tokenizer: the name or folder of a Hugging Face tokenizer.
        length: tokens of a run.

    Returns:
        int64 [number of runs, length].
    """
    from transformers import AutoTokenizer

    text = "\n".join(python_documentation())
    tokens = AutoTokenizer.from_pretrained(tokenizer)(text, return_tensors="pt")["input_ids"][0]
    if len(tokens) < length:
        raise UlyssesValueError(
            f"the text has {len(tokens)} tokens: a sequence can be no longer than that, not {length}."
        )
    return tokens.unfold(0, length, 1)
