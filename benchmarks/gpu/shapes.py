"""Model folders without weights, in the shapes of well-known models.

The tokenizer has as many words as the model has tokens: a prompt of N words is
N tokens, and every token that the model draws is a word again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2_560,
    "intermediate_size": 9_728,
    "max_position_embeddings": 40_960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
}
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": 128_001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 8_192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}
LLAMA_3_2_1B = LLAMA_3_8B | {  # heads of 64
    "head_dim": 64,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_4B | {  # 61 GB; a token passes 8 experts of 128
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SHAPES = {
    "qwen3-4b": QWEN3_4B,
    "llama-3-8b": LLAMA_3_8B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
DEFAULT = "qwen3-4b"
_TINY_SIZES: dict[str, Any] = {
    "eos_token_id": 1_023,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1_024,
}
TINY = QWEN3_4B | _TINY_SIZES
_RESULTS = Path(__file__).resolve().parents[1] / "results"


def add_shape_option(parser: argparse.ArgumentParser) -> None:
    """`--shape`, of the model."""
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT, help="of the model")


def config_of(shape: str, tiny: bool) -> dict[str, Any]:
    """A shape's config; `tiny`: with small sizes, to try a script on any machine."""
    return SHAPES[shape] | (_TINY_SIZES if tiny else {})


def result_file(kind: str, shape: str) -> Path:
    """Where results of this kind go: `kind`.json, or with the name of another shape in it."""
    name = kind if shape == DEFAULT else f"{kind}_{shape}"
    return _RESULTS / f"{name}.json"


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write config and tokenizer; gives `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": f"w{config['eos_token_id']}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    return folder
