"""Layers of transformers' classes that keep a state, run on the states of a step.

Such a layer (Mamba, linear attention, short convolution) has a convolution of its own and
reads and updates its state through transformers' cache: a convolution state, perhaps a
recurrent one, perhaps several of each. What they are is found by running each such layer once
without memory or weights. A step's tokens come in one row; the layer is called once for each
run of the step (attention/states.py), with a cache that holds the run's states and nothing else.

Layers go on from a state over any number of tokens, and a sequence that begins has zeros:
for transformers' layers that is the same as no state. `fallback_check` proves all of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import (
    Cache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from tasuki.models.errors import UnsupportedModelError
from tasuki.models.paged_op import Slot
from tasuki.models.spec import StateTensor

_TRIAL_TOKENS = 5


def find_states(config: Any, *, trust_remote_code: bool) -> dict[int, tuple[StateTensor, ...]]:
    """The state of each layer that keeps one; empty: no layer does.

    Args:
        config: Of transformers.
        trust_remote_code: Whether code that comes with the folder may run.

    Raises:
        UnsupportedModelError: A layer keeps a state, and no module is found that has it.
    """
    cache = DynamicCache(config=config)
    wanted = {
        i for i, x in enumerate(cache.layers) if isinstance(x, LinearAttentionCacheLayerMixin)
    }
    if not wanted:
        return {}
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"), torch.inference_mode():
        module = auto.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        ).eval()
        for mixer in _mixers(module):
            tokens = torch.empty(1, _TRIAL_TOKENS, config.hidden_size, dtype=torch.bfloat16)
            mixer(hidden_states=tokens, **{_cache_name(mixer): cache})
    found = {layer: tuple(_tensors(cache.layers[layer])) for layer in sorted(wanted)}
    if unknown := [layer for layer, tensors in found.items() if not tensors]:
        raise UnsupportedModelError(
            f"{type(module).__name__} is not supported: no module is found that keeps the state of"
            f" its layers {unknown}"
        )
    return found


def run_on_states(
    module: nn.Module, slot: Slot, states: Mapping[int, Sequence[StateTensor]]
) -> None:
    """Let the layers that keep a state find it where `slot` says.

    While there is none they are as they were.

    Args:
        module: The model.
        slot: Has the states of the step that is under way.
        states: As `find_states` found them.
    """
    for mixer in _mixers(module):
        if tensors := states.get(int(mixer.layer_idx)):
            mixer.forward = _on_states(mixer, slot, tensors)


def _on_states(mixer: Any, slot: Slot, tensors: Sequence[StateTensor]) -> Any:
    plain, name, layer = mixer.forward, _cache_name(mixer), int(mixer.layer_idx)

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """As the layer's own: [1, T, hidden] in and out."""
        states = slot.states
        if states is None:
            result: torch.Tensor = plain(hidden_states, *args, **options)
            return result
        width, parts = hidden_states.shape[-1], []
        for run in states.runs:
            state = _filled(tensors, states.begin(layer, run))
            cache = Cache(layers=[*[LinearAttentionLayer()] * layer, state])
            tokens = hidden_states[0, run.tokens].view(run.rows, -1, width)
            parts.append(plain(hidden_states=tokens, **{name: cache}).reshape(1, -1, width))
            states.keep(layer, run, [_kept(state, each) for each in tensors])
        return torch.cat(parts, 1)

    return forward


def _mixers(module: nn.Module) -> Iterator[Any]:
    """The modules that have a state: they know their layer, and have a convolution of their own."""
    for child in module.modules():
        convolves = any(isinstance(each, nn.Conv1d) for each in child.children())
        if convolves and hasattr(child, "layer_idx") and _cache_name(child):
            yield child


def _cache_name(mixer: Any) -> str:
    """The argument of a layer that takes the cache; empty: there is none."""
    names = inspect.signature(mixer.forward).parameters
    return next((name for name in ("cache_params", "past_key_values") if name in names), "")


def _tensors(layer: Any) -> Iterator[StateTensor]:
    """What a layer's cache holds of one sequence."""
    for index in range(layer.number_of_states):
        for recurrent, held in ((False, layer.conv_states), (True, layer.recurrent_states)):
            if (tensor := held[index]) is not None:
                yield StateTensor(
                    recurrent, index, tuple(tensor.shape[1:]), tensor.dtype == torch.float32
                )


def _filled(tensors: Sequence[StateTensor], values: Sequence[torch.Tensor]) -> Any:
    """The cache of one layer that holds a state."""
    layer: Any = LinearAttentionLayer(1 + max(each.index for each in tensors))
    layer.dtype, layer.device = values[0].dtype, values[0].device
    for each, value in zip(tensors, values, strict=True):
        layer.has_previous_state[each.index] = True
        if each.recurrent:
            layer.recurrent_states[each.index] = value
            layer.is_recurrent_states_initialized[each.index] = True
        else:
            layer.conv_states[each.index] = value
            layer.conv_kernel_size[each.index] = value.shape[-1]
            layer.is_conv_states_initialized[each.index] = True
    return layer


def _kept(layer: Any, each: StateTensor) -> torch.Tensor:
    held = layer.recurrent_states if each.recurrent else layer.conv_states
    tensor: torch.Tensor = held[each.index]
    return tensor
