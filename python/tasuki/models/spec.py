"""What a model is, read from the config.json of its Hugging Face folder.

The fast path (models/llama.py) covers the Llama family; every other
architecture is described by models/fallback.py, or refused by name. This file
owns no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.rope import RopeSpec, context_tokens, read_rope

# What an absent key of config.json means, by architecture.
# Source: defaults of the configuration classes in transformers.
_FAMILY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only model and what its layers do.

    Attributes:
        architecture: class name in config.json.
        max_position: context, in tokens.
        sliding_windows: per layer, tokens that a query sees; None: all.
        rope: rotation; None when the model itself deals with positions.
        qk_norm: queries and keys are normalised per head before the rotation.
        attention_bias: q, k and v products have a bias.
        output_bias: so has the attention's output product.
        tied_head: the head's weight is the embedding table.
        norm_eps: added to the mean square under the root.
        eos_token_ids: tokens that end a generation, in the folder's order.
        native: runs on the fast path; otherwise through transformers.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    sliding_windows: tuple[int | None, ...]
    rope: RopeSpec | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    tied_head: bool = False
    norm_eps: float = 1e-6
    eos_token_ids: tuple[int, ...] = ()
    native: bool = True


def read_spec(path: Path | str, *, trust_remote_code: bool = False) -> ModelSpec:
    """Describe the model in a Hugging Face folder.

    Args:
        path: Folder with config.json.
        trust_remote_code: Whether code that comes with the folder may run, for
            architectures that transformers itself does not know.

    Raises:
        ModelError: No such folder, or no readable config.json in it.
        UnsupportedModelError: The architecture or one of its features is not
            supported; named.
    """
    folder = Path(path)
    config = read_config(folder)
    architecture = architecture_of(config, folder)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"{folder}: quantized weights ({method}) are not supported: give an unquantized model"
        )
    if architecture in _FAMILY and why_not_native(config) is None:
        return _family_spec(folder, architecture, {**_FAMILY[architecture], **config})
    from tasuki.models.fallback import fallback_spec  # imports transformers: seconds

    return fallback_spec(folder, trust_remote_code=trust_remote_code)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: There is none, or it is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, must be an object")
    return value


def architecture_of(config: Mapping[str, Any], folder: Path) -> str:
    """The class name of the model in a folder.

    Raises:
        ModelError: config.json names none, or several.
    """
    names = config.get("architectures") or []
    if len(names) != 1:
        raise ModelError(f"{folder}/config.json names {len(names)} architectures, must be 1")
    return str(names[0])


def why_not_native(config: Mapping[str, Any]) -> str | None:
    """Why a model of the Llama family cannot take the fast path; None when it can."""
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        return f"hidden_act {act}"
    if config.get("mlp_bias"):
        return "mlp_bias"
    try:
        read_rope(config, int(config.get("max_position_embeddings") or 2048))
    except UnsupportedModelError as error:
        return str(error)
    return None


def read_eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a generation: generation_config.json first, else config.json.

    Raises:
        ModelError: The file is not a JSON object, or its `eos_token_id` no token id or list
            of them.
    """
    file = folder / "generation_config.json"
    eos = _read_object(file).get("eos_token_id") if file.is_file() else None
    if eos is None:
        file, eos = folder / "config.json", config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{file}: eos_token_id is {eos!r}, must be a token id, a list of them or null"
        )
    return tuple(ids)


def _family_spec(folder: Path, architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
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
        sliding_windows=_windows(architecture, config, layers),
        rope=rope,
        qk_norm=architecture == "Qwen3ForCausalLM",
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        eos_token_ids=read_eos(folder, config),
    )


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * layers
    if not config.get("use_sliding_window"):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "" for i in range(layers)]
    return tuple(int(window) if t == "sliding_attention" else None for t in types)
