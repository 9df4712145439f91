"""What the engine needs of a model, whatever runs it."""

from __future__ import annotations

from typing import Protocol

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.models.spec import ModelSpec


class CausalModel(Protocol):
    """A decoder-only language model over the paged cache."""

    spec: ModelSpec

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run one step; called on the engine thread only.

        Args:
            batch: Tokens of all sequences of the step.
            attention: Writes keys and values to the cache, and attends. The
                caller has planned it for this batch (`attention.plan`).

        On CUDA a batch with `bucket` set may be under graph capture: nothing
        here waits for the device, or depends on the lists of the batch.

        Returns:
            [R, w] float32: logits of `batch.logits_rows`, of this rank's part of the
            vocabulary (execution/sampler.py); of all of it where there is one rank.
        """
