"""Attention over the paged cache as an operator, for models under torch.compile.

A compiler that looked into the backend would break its graph at every layer. As
an operator it is opaque, and a layer is one graph. Which backend it means is
looked up when it runs, by a handle. So is the layer, by counting: a graph that
knew its layer would be another one for each. What the operator writes to the
cache is not declared; its order is kept by what layers pass on.

Owns the table of handles, by which slots of running models are found.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.states import StepStates, states_of
from tasuki.models.errors import ModelError

_handles = itertools.count()
_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()


class Slot:
    """Where a model puts the backend of its current step; alive as long as the model.

    Args:
        windows: Sliding windows of its layers; None: none, or the layer tells its own.

    Attributes:
        states: Of the step; None: its layers keep none.
    """

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows
        self._attention: AttentionBackend | None = None
        self._next_layer = 0
        self.states: StepStates | None = None
        self.handle = next(_handles)
        _slots[self.handle] = self

    def begin(self, attention: AttentionBackend) -> None:
        """A step begins; `attention` is planned for it."""
        self._attention, self._next_layer = attention, 0
        self.states = states_of(attention)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        layer: int | None = None,
    ) -> torch.Tensor:
        """`AttentionBackend.forward` of a layer; None: the one after the last.

        Raises:
            ModelError: No step is under way, or it has been through all layers.
        """
        if layer is None:
            layer, self._next_layer = self._next_layer, self._next_layer + 1
        if self._attention is None or layer >= len(self._windows):
            raise ModelError(f"layer {layer} of {len(self._windows)} attends outside of a step")
        return self._attention.forward(
            layer, query, key, value, scale=scale, sliding_window=window or self._windows[layer]
        )


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """The next layer's attention, by the slot of `handle`; a window of 0 is none.

    Raises:
        ModelError: There is no such slot, or no step is under way.
    """
    result: torch.Tensor = torch.ops.tasuki.paged_attention(
        query, key, value, handle, scale, window
    )
    return result


@torch.library.custom_op("tasuki::paged_attention", mutates_args=())
def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    slot = _slots.get(handle)
    if slot is None:
        raise ModelError(f"the model of handle {handle} is gone")
    return slot.attend(query, key, value, scale, window or None).contiguous()


@_run.register_fake
def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    return query.new_empty(query.shape)
