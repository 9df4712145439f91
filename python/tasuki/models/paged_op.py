"""Attention over the paged cache as an operator, for models under torch.compile.

A compiler that looked into the backend would break its graph at every layer. As
an operator it is opaque, and the whole model is one graph. Which backend it
means is looked up when it runs, by a handle: a constant of the graph. What it
writes to the cache is not declared; its order is kept by what layers pass on.

Owns the table of handles, by which backends of running steps are found.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.models.errors import ModelError

_handles = itertools.count()
_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()


class Slot:
    """Where a model puts the backend of its current step; alive as long as the model."""

    def __init__(self) -> None:
        """Take a handle."""
        self.attention: AttentionBackend | None = None
        self.handle = next(_handles)
        _slots[self.handle] = self


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """`AttentionBackend.forward` of the backend in a slot; a window of 0 is none.

    Raises:
        ModelError: The slot is empty.
    """
    result: torch.Tensor = torch.ops.tasuki.paged_attention(
        query, key, value, handle, layer, scale, window
    )
    return result


@torch.library.custom_op("tasuki::paged_attention", mutates_args=())
def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    slot = _slots.get(handle)
    if slot is None or slot.attention is None:
        raise ModelError(f"no step is under way for the model of handle {handle}")
    attended = slot.attention.forward(
        layer, query, key, value, scale=scale, sliding_window=window or None
    )
    return attended.contiguous()


@_run.register_fake
def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: int,
    layer: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    return query.new_empty(query.shape)
