"""Attention of a model whose layers keep different parts of a sequence: a backend for each group.

All groups share one pool; a page holds the layers of one group (engine/cache_groups.py). So a
layer's place in its page, and the block tables that its group has, are all that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.states import StepStates
from tasuki.engine.cache_groups import CacheGroup


class AttentionByGroup:
    """`AttentionBackend` over several cache groups; see attention/base.py.

    Args:
        groups: Of the model; those that keep states come last.
        backends: One for each of the others, all over one pool.
        states: Those of the last groups, if there are any; no graph may then hold a step.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        backends: Sequence[AttentionBackend],
        states: StepStates | None = None,
    ) -> None:
        self.pool, self.scales, self.states = backends[0].pool, backends[0].scales, states
        self.capturable = states is None and all(b.capturable for b in backends)
        self.captures_prompts = states is None and all(b.captures_prompts for b in backends)
        self._backends = backends
        self._places = {
            layer: (backend, place)
            for group, backend in zip(groups, backends, strict=False)
            for place, layer in enumerate(group.layers)
        }

    def plan(self, batch: Batch) -> None:
        """Plan each group's tables and slots."""
        for group, backend in enumerate(self._backends):
            backend.plan(batch.of_group(group))
        if self.states is not None:
            self.states.plan(batch)

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in the layer's group; `layer` counts those of the model."""
        backend, place = self._places[layer]
        return backend.forward(
            place,
            query,
            key,
            value,
            scale=scale,
            sliding_window=sliding_window,
            written=written,
            out=out,
        )
