"""The architectures of the fast path, one entry each: in what they differ.

All else about them is the same: see `llama.py`. `spec_reader.py` reads a folder's config.json by
an entry, and `llama_tensors.py` its tensors. Data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tasuki.models.rope import KINDS


@dataclass(frozen=True, slots=True)
class Names:
    """What a layer's weights are called in a folder, without `.weight`.

    A tuple of one name is a tensor that has the rows of all, one after another.

    Attributes:
        qkv: Of queries, keys and values, in `self_attn`.
        mlp: Where the MLP is, or the experts and their router.
        gate_up: Of gate and up, of the MLP or of an expert.
        down: Of down.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        absent: What an absent key of config.json means.
            Source: defaults of the configuration classes in transformers.
        windows: Which layers `sliding_window` is for: none, all, those that `layer_types` says
            (without it all), or, where `use_sliding_window` is set, those that `layer_types` or
            `max_window_layers` say.
        ropes: Kinds of rotation that mean in its config.json what they mean in `rope.py`.
        qk_norm: Queries and keys are normalised per head before the rotation.
        qkv_bias: q, k and v GEMMs have a bias, whatever `attention_bias` says.
        output_bias: Where `attention_bias` is set, the output GEMM has a bias too.
        experts: Its MLPs are of experts, but for those that config.json excepts.
        names: Of its tensors.
    """

    absent: Mapping[str, Any]
    windows: Literal["none", "all", "typed", "some"] = "none"
    ropes: tuple[str, ...] = KINDS
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    experts: bool = False
    names: Names = field(default_factory=Names)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family({"max_position_embeddings": 2048}, output_bias=True),
    "MistralForCausalLM": Family(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windows="typed",
    ),
    "Phi3ForCausalLM": Family(
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows="all",
        ropes=("default",),  # transformers reads "yarn" and "su" as "longrope"
        names=Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    "Qwen2ForCausalLM": Family(
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        windows="some",
        qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "head_dim": 128,
        },
        windows="some",
        qk_norm=True,
        output_bias=True,
    ),
    "MixtralForCausalLM": Family(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        windows="all",
        experts=True,
        names=Names(mlp="block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        windows="some",
        qk_norm=True,
        output_bias=True,
        experts=True,
    ),
}
