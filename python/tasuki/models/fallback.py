"""Causal models of transformers that the fast path does not cover, on the same paged cache.

transformers lets the attention of a class that declares
`_supports_attention_backend` be replaced. Ours hands queries, keys and values
to the step's `AttentionBackend`, which it finds among the keyword arguments
that such classes pass down. Tokens of all sequences come in one row, told apart
by the backend and by their positions.

`fallback_spec` refuses what its configuration alone speaks against. What a class
declares is not taken on trust either: `fallback_check` runs every model once at
start and refuses it by name if it differs from what transformers itself computes.
`fallback_compile` makes it fast. This module imports transformers, which takes
seconds: it is imported only when needed. Runs on the engine thread.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.models.errors import ModelError, UnsupportedModelError, first_line
from tasuki.models.fallback_check import Trial
from tasuki.models.latent import absorbed, keep_latents, unabsorbed
from tasuki.models.mixers import run_on_states
from tasuki.models.packing import pack
from tasuki.models.paged_op import Slot, paged_attention
from tasuki.models.spec import ModelSpec

_IMPLEMENTATION = "tasuki_paged"
# Keyword tensors that say nothing about the attention itself.
_HARMLESS = {"position_ids", "cache_position", "position_embeddings"}


@dataclass(frozen=True, slots=True)
class _Step:
    """What reaches the attention function of every layer; the same object every step."""

    slot: Slot
    spec: ModelSpec


class FallbackModel:
    """`CausalModel` around a transformers model; see models/base.py."""

    def __init__(self, spec: ModelSpec, module: torch.nn.Module, trial: Trial) -> None:
        """Run `module`, which was loaded with our attention implementation."""
        self.spec = spec
        self.module = module
        self.trial = trial
        self._selects_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._step = _Step(Slot(spec.sliding_windows), spec)
        run_on_states(module, self._step.slot, spec.states)

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run one step; see `CausalModel.forward`."""
        self._step.slot.begin(attention)
        options: dict[str, Any] = {"tasuki_step": self._step}
        if self._selects_rows:
            options["logits_to_keep"] = batch.logits_rows
        logits: torch.Tensor = self.module(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            return_dict=True,
            **options,
        ).logits[0]
        return (logits if self._selects_rows else logits[batch.logits_rows]).float()


def load_fallback(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool,
    dummy: bool = False,
) -> FallbackModel:
    """Load a model through transformers and check that it runs right on the paged cache.

    With `dummy` its weights are as its class initialises them.

    Raises:
        ModelError: The folder's weights are not complete, or its model's class does not run.
        UnsupportedModelError: The model does something that the cache cannot hold
            or the attention cannot do.
    """
    AttentionInterface.register(_IMPLEMENTATION, _attend)
    try:
        module = (_make if dummy else _read)(folder, dtype, device, trust_remote_code)
    except ModelError:
        raise
    except Exception as error:  # of the model's class, whatever it is
        raise ModelError(f"{folder} cannot be loaded: {first_line(error)}") from error
    module = module.to(device).eval()
    if spec.latent_rank is not None:
        keep_latents(module)
    trial = Trial(spec, module, _IMPLEMENTATION, dtype, device)
    model = FallbackModel(spec, module, trial)
    unpack = pack(module)
    try:
        trial.check(model)
    except UnsupportedModelError:  # it may be for the packing
        unpack()
        trial.check(model)
    return model


def _read(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """The model with the folder's weights."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=_IMPLEMENTATION,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    module, report = loaded
    if missing := sorted(report.get("missing_keys", ())):
        raise ModelError(
            f"{folder}: tensors {len(missing)} missing ({', '.join(missing[:4])}): the weights do"
            f" not belong to this config.json"
        )
    return module


def _make(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """The model with random weights, made on the device."""
    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    auto: Any = AutoModelForCausalLM
    with device, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return auto.from_config(
            config,
            dtype=dtype,
            attn_implementation=_IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    tasuki_step: _Step | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.

    Raises:
        UnsupportedModelError: The layer wants what the backend cannot do.
    """
    if tasuki_step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments down to its attention"
        )
    if reason := _why_not_attend(module, attention_mask, others):
        raise UnsupportedModelError(
            f"{tasuki_step.spec.architecture} is not supported: its attention {reason}"
        )
    rank = tasuki_step.spec.latent_rank
    # [T, heads, head_dim]
    parts = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if rank is not None:
        parts = absorbed(module, *parts[:2], rank)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    slot = tasuki_step.slot
    if torch.compiler.is_compiling():
        attended = paged_attention(*parts, slot.handle, scale, sliding_window or 0)
    else:
        layer: int = module.layer_idx  # type: ignore[assignment]
        attended = slot.attend(*parts, scale, sliding_window, layer)
    if rank is not None:
        attended = unabsorbed(module, attended, value.shape[-1], rank)
    return attended[None], None


def _why_not_attend(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]
) -> str | None:
    """What a layer asks of its attention that the backend cannot do; None: nothing."""
    if attention_mask is not None:
        return "brings a mask of its own"
    for option, given in others.items():
        wanted = isinstance(given, torch.Tensor) and option not in _HARMLESS
        if wanted or (option in ("softcap", "position_bias") and given is not None):
            return f"needs {option}, which ours does not have"
    if others.get("is_causal", getattr(module, "is_causal", True)) is False:
        return "is not causal"
    return None
