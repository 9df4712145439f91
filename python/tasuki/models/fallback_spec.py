"""What a model is that transformers will run, as its configuration class has it.

It also says no, before any weights are read, to what cannot run on one pool of
equal blocks. This module imports transformers, which takes seconds: it is imported
only when needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from tasuki.models.config_file import architecture_of, read_config, read_eos
from tasuki.models.errors import UnsupportedModelError, failures_of, first_line
from tasuki.models.mixers import find_states
from tasuki.models.spec import ModelSpec, StateTensor

_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_STATE_TYPES = {"conv", "linear_attention", "mamba"}  # keep a state, and no KV
_BOTH_TYPES = {"hybrid"}  # keep both
_MASKED_WINDOWS = {"phimoe"}  # the window is in the mask alone, layers do not name it


def fallback_spec(folder: Path, *, trust_remote_code: bool) -> ModelSpec:
    """Describe a model that transformers will run.

    Raises:
        ModelError: Its configuration cannot be read.
        UnsupportedModelError: It cannot run on one pool of equal blocks; says why.
    """
    raw = read_config(folder)
    architecture = architecture_of(raw, folder)
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of the configuration's class, whatever it is
        said = first_line(error)
        if isinstance(error, StrictDataclassError):  # the last line has the value
            said = str(error).splitlines()[-1].strip()
        raise UnsupportedModelError(f"{architecture} is not supported: {said}") from error
    if reason := _why_not(config, architecture, raw, trust_remote_code):
        raise UnsupportedModelError(f"{architecture} is not supported: {reason}")
    states = _states(config, architecture, trust_remote_code)
    heads = int(config.num_attention_heads)
    layers = int(config.num_hidden_layers)
    latent_rank = getattr(config, "kv_lora_rank", None)
    if latent_rank:
        kv_heads, head_dim = 1, int(latent_rank) + int(config.qk_rope_head_dim)
    else:
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelSpec(
        architecture=architecture,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=int(config.hidden_size),
        intermediate_size=_widest(getattr(config, "intermediate_size", None))
        or 4 * int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        max_position=_context(config),
        sliding_windows=_windows(config, layers),
        tied_head=bool(config.tie_word_embeddings),
        eos_token_ids=read_eos(folder, raw),
        native=False,
        latent_rank=int(latent_rank) if latent_rank else None,
        states=states,
        no_kv=frozenset(
            layer
            for layer, kind in enumerate(getattr(config, "layer_types", None) or ())
            if kind in _STATE_TYPES
        ),
    )


def _widest(size: int | list[int] | None) -> int:
    """Columns of an inner layer, of the largest where layers differ; 0: it is not said."""
    return max(size, default=0) if isinstance(size, list) else int(size or 0)


def _states(
    config: Any, architecture: str, trust_remote_code: bool
) -> Mapping[int, tuple[StateTensor, ...]]:
    if not set(getattr(config, "layer_types", None) or ()) & (_STATE_TYPES | _BOTH_TYPES):
        return {}
    with failures_of(architecture):
        return find_states(config, trust_remote_code=trust_remote_code)


def _why_not(
    config: Any, architecture: str, raw: dict[str, Any], trust_remote_code: bool
) -> str | None:
    """What the configuration alone says against a model; None: nothing."""
    remote = trust_remote_code and "AutoModelForCausalLM" in raw.get("auto_map", {})
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = {c.__name__ for c in (known if isinstance(known, tuple) else (known,)) if c}
    if not remote and architecture not in names:
        have = " or ".join(sorted(names)) or "no causal model"
        return f"transformers {transformers.__version__} has {have} for {config.model_type}"
    if not remote and not getattr(transformers, architecture)._supports_attention_backend:
        return "its class does not declare _supports_attention_backend"
    if getattr(config, "is_heterogeneous", False):
        return f"its layers differ in {', '.join(sorted(config.per_layer_attributes))}"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "index_topk", None):
        return f"attention to {config.index_topk} chosen tokens (index_topk) is not in ours"
    if getattr(config, "kv_lora_rank", None) and not getattr(config, "qk_rope_head_dim", None):
        return "latent attention (kv_lora_rank) without qk_rope_head_dim needs another cache layout"
    types = set(getattr(config, "layer_types", None) or ())
    if types and types <= _STATE_TYPES:
        return "none of its layers attends: a model of states alone has no KV to hand over"
    if odd := sorted(types - _LAYER_TYPES - _STATE_TYPES - _BOTH_TYPES):
        return f"layers of type {', '.join(odd)} need another cache layout"
    if softcap := getattr(config, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping {softcap} is not in our attention"
    needed = ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")
    absent = [name for name in needed if (getattr(config, name, None) or 0) < 1]
    return f"its configuration has no {', '.join(absent)} above 0" if absent else None


def _context(config: Any) -> int:
    """Tokens up to which a token's rotation does not depend on the batch around it.

    With "longrope" transformers rotates a whole batch by its longest sequence:
    one beyond the original context would change all the others. With "dynamic" it
    does so beyond `max_position_embeddings`, which no sequence here exceeds.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    originals = (
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    )
    return int(min([config.max_position_embeddings, *originals]))


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """What layer types say; classes without them pass the window to the attention themselves."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if config.model_type in _MASKED_WINDOWS:
        types = ["sliding_attention"] * layers
    if not window or not types:
        return (None,) * layers
    return tuple(int(window) if t == "sliding_attention" else None for t in types)
