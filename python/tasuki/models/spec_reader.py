"""Describes the model in a Hugging Face folder.

The fast path (models/llama.py) covers the Llama family, whose architectures are the entries of
models/families.py. Every other architecture is described by models/fallback_spec.py, or refused
by name. This file owns no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasuki.models.config_file import architecture_of, positive, read_config, read_eos
from tasuki.models.errors import ModelError, UnsupportedModelError, first_line
from tasuki.models.families import FAMILIES, Family
from tasuki.models.rope import context_tokens, read_rope
from tasuki.models.spec import ExpertsSpec, ModelSpec

BLOCK = 128  # of fp8 weights
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_spec(path: Path | str, *, trust_remote_code: bool = False) -> ModelSpec:
    """Describe the model in a Hugging Face folder.

    Args:
        path: Folder with config.json.
        trust_remote_code: Whether code that comes with the folder may run, for
            architectures that transformers itself does not know.

    Raises:
        ModelError: No such folder, or no readable config.json in it, or one with a value that
            cannot be.
        UnsupportedModelError: The architecture or one of its features is not
            supported; named.
    """
    folder = Path(path)
    config = read_config(folder)
    try:
        spec = _native_spec(folder, config)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(
            f"{folder}/config.json cannot be used, {first_line(error)}: fetch the model again"
        ) from error
    if spec is not None:
        return spec
    from tasuki.models.fallback_spec import fallback_spec  # imports transformers: seconds

    return fallback_spec(folder, trust_remote_code=trust_remote_code)


def _native_spec(folder: Path, config: dict[str, Any]) -> ModelSpec | None:
    """The description of a model that our own layers serve; None: transformers' have to."""
    architecture = architecture_of(config, folder)
    family = FAMILIES.get(architecture)
    native = family is not None and _why_not_native(family, config) is None
    if quantization := config.get("quantization_config"):
        _require_fp8_blocks(folder, architecture, quantization, native=native)
    if family is not None and native:
        return _family_spec(folder, architecture, family, {**family.absent, **config})
    return None


def _require_fp8_blocks(
    folder: Path, architecture: str, quantization: Any, *, native: bool
) -> None:
    """Refuse all quantized folders but those of the fast path with fp8 blocks of 128 x 128."""
    given = quantization if isinstance(quantization, dict) else {}
    method, block = given.get("quant_method", "unknown"), given.get("weight_block_size")
    activations = given.get("activation_scheme", "dynamic")
    if method == "fp8" and block == [BLOCK, BLOCK] and activations == "dynamic" and native:
        return
    what = f"weight_block_size {block}, activation_scheme {activations}, {architecture}"
    raise UnsupportedModelError(
        f"{folder}: quantized weights ({method}, {what}) are not supported: give a folder in"
        f" fp8 with weight_block_size [{BLOCK}, {BLOCK}] and dynamic activations, of"
        f" {', '.join(FAMILIES)}, or an unquantized model (--quantization fp8 rounds it)"
    )


def _why_not_native(family: Family, config: Mapping[str, Any]) -> str | None:
    """Why a model of the Llama family cannot take the fast path; None when it can."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"hidden_act {act}"
    if config.get("mlp_bias"):
        return "mlp_bias"
    if family.experts and config.get("use_sliding_window"):
        return "use_sliding_window"
    try:
        rope = read_rope(config, config.get("max_position_embeddings") or 2048)
    except UnsupportedModelError as error:
        return str(error)
    return None if rope.kind in family.ropes else f"rope type {rope.kind}"


def _family_spec(
    folder: Path, architecture: str, family: Family, config: Mapping[str, Any]
) -> ModelSpec:
    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            raise ModelError(f"{folder}/config.json: {name} is {value}, must be a positive integer")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    kv_heads, layers = size("num_key_value_heads", heads), size("num_hidden_layers")
    max_position = size("max_position_embeddings")
    head_dim = size("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{folder}/config.json: {heads} heads over {kv_heads} KV heads of dimension {head_dim}:"
            f" must divide, and the dimension be even"
        )
    bias = bool(config.get("attention_bias", False))
    rope = read_rope(config, max_position)
    return ModelSpec(
        architecture=architecture,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        max_position=context_tokens(rope, max_position),
        sliding_windows=_windows(family, config, layers, size),
        rope=rope,
        qk_norm=family.qk_norm,
        attention_bias=bias or family.qkv_bias,
        output_bias=bias and family.output_bias,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        eos_token_ids=read_eos(folder, config),
        experts=_experts(config, layers, size) if family.experts else None,
        fp8_blocks=bool(config.get("quantization_config")),
    )


def _experts(config: Mapping[str, Any], layers: int, size: Callable[..., int]) -> ExpertsSpec:
    count = size("num_experts", config.get("num_local_experts"))  # as either name has it
    per_token = size("num_experts_per_tok")
    if per_token > count:
        raise ModelError(
            f"num_experts_per_tok is {per_token}, the model has {count} experts: lower it"
        )
    every = size("decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise ValueError(f"mlp_only_layers is {named!r}, must be a list")
    dense = {i for i in range(layers) if (i + 1) % every} | set(named)
    return ExpertsSpec(
        count=count,
        per_token=per_token,
        inner_size=size("moe_intermediate_size", config.get("intermediate_size")),
        renormalise=bool(config.get("norm_topk_prob")),
        dense_layers=frozenset(dense),
    )


def _windows(
    family: Family, config: Mapping[str, Any], layers: int, size: Callable[..., int]
) -> tuple[int | None, ...]:
    kind, types = family.windows, config.get("layer_types")
    unused = kind == "some" and not config.get("use_sliding_window")
    if kind == "none" or unused or config.get("sliding_window") is None:
        return (None,) * layers
    window = size("sliding_window")
    if kind == "all" or (kind == "typed" and types is None):
        return (window,) * layers
    if types is None:
        first = config.get("max_window_layers", 28)
        types = [_LAYER_TYPES[i >= first] for i in range(layers)]
    known = isinstance(types, list) and all(each in _LAYER_TYPES for each in types)
    if not known or len(types) != layers:
        names = " or ".join(_LAYER_TYPES)
        raise ValueError(f"layer_types is {types!r}, must be a list of {layers}, each {names}")
    return tuple(window if each == "sliding_attention" else None for each in types)
