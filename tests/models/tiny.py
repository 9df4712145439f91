"""Tiny random-weight models saved by transformers, one for each feature of the family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Larger than usual: attention then depends on what is in the cache.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

NATIVE = (
    "llama",
    "llama-linear",
    "llama-yarn-bias",
    "mistral-window",
    "phi3-window",
    "qwen2",
    "qwen2-some-windows",
    "qwen3",
)
EXPERTS = ("mixtral", "qwen3-moe")
FALLBACK = (
    "olmo2",
    "gpt-neox",
    "phi",
    "gemma",
    "gemma3n",
    "llama-gelu",
    "starcoder2-window",
    "phimoe-window",
    "deepseek-v2",
    "deepseek-v3",
    "minicpm3",
)


def config(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Configuration of one of NATIVE, EXPERTS or FALLBACK; `changes` of its sizes."""
    import transformers as t

    shape: dict[str, Any] = {**_SHAPE, **(changes or {})}
    match name:
        case "llama":
            return t.LlamaConfig(**shape, rope_parameters=_LLAMA3)
        case "llama-linear":
            return t.LlamaConfig(**shape, rope_parameters=_LINEAR, tie_word_embeddings=True)
        case "llama-yarn-bias":
            return t.LlamaConfig(**shape, rope_parameters=_YARN, attention_bias=True, head_dim=12)
        case "mistral-window":
            return t.MistralConfig(**shape, head_dim=8, sliding_window=13)
        case "phi3-window":
            return t.Phi3Config(**shape, sliding_window=13)
        case "qwen2":
            return t.Qwen2Config(**shape)
        case "qwen2-some-windows":
            return t.Qwen2Config(
                **shape, use_sliding_window=True, sliding_window=13, max_window_layers=1
            )
        case "qwen3":
            return t.Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)
        case "olmo2":
            return t.Olmo2Config(**shape)
        case "gpt-neox":
            del shape["num_key_value_heads"]
            return t.GPTNeoXConfig(**shape)
        case "phi":
            return t.PhiConfig(**shape)
        case "gemma":
            return t.GemmaConfig(**shape, head_dim=8)
        case "gemma3n":
            return t.Gemma3nTextConfig(
                **shape,
                head_dim=8,
                sliding_window=13,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                num_kv_shared_layers=1,
                vocab_size_per_layer_input=256,
                hidden_size_per_layer_input=8,
                activation_sparsity_pattern=[0.5, 0.0, 0.0],
                laurel_rank=8,
            )
        case "llama-gelu":
            return t.LlamaConfig(**shape, hidden_act="gelu")
        case "starcoder2-window":
            return t.Starcoder2Config(**shape, sliding_window=13)
        case "phimoe-window":
            return t.PhimoeConfig(**shape, sliding_window=13, num_local_experts=4)
        case "mixtral":
            return t.MixtralConfig(**shape, num_local_experts=4)
        case "qwen3-moe":
            return t.Qwen3MoeConfig(
                **shape,
                head_dim=16,
                attention_bias=True,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                norm_topk_prob=True,
                mlp_only_layers=[1],
            )
        case "deepseek-v2":
            return t.DeepseekV2Config(**shape | _LATENT | _EXPERTS, q_lora_rank=None)
        case "deepseek-v3":
            return t.DeepseekV3Config(
                **shape | _LATENT | _EXPERTS, q_lora_rank=16, n_group=2, topk_group=1
            )
        case "minicpm3":
            return t.MiniCPM3Config(**shape | _LATENT, q_lora_rank=16)
    raise ValueError(name)


def save(
    name: str, folder: Path, *, changes: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """Save a model with random weights; biases and norms too.

    Args:
        name: one of NATIVE, EXPERTS or FALLBACK.
        folder: created.
        changes: of its sizes.
        options: for `save_pretrained`.

    Returns:
        The transformers model, float32, attending with "eager".
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(name, changes), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **options)
    return model
