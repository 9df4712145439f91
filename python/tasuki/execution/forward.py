"""What runs between a batch's arrays and its logits, the same with and without a CUDA graph."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch


class Vocabulary(Protocol):
    """What the engine needs of a model's shape (models/spec.py)."""

    @property
    def vocab_size(self) -> int:
        """Logits of a row, over all ranks."""


class ForwardModel(Protocol):
    """What the engine needs of a `CausalModel` (models/base.py)."""

    @property
    def spec(self) -> Vocabulary:
        """Its shape."""

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """This rank's part of the logits of `batch.logits_rows`, [R, w] float32.

        `attention` is planned for the batch.
        """


Body = tuple[torch.Tensor, torch.Tensor]
"""Residual [T, hidden] before, and output [T, heads x head_dim] of, the last layer's attention."""


@runtime_checkable
class DivisibleModel(ForwardModel, Protocol):
    """A model whose forward is `finish(body(batch, attention), rows)`.

    Graphs hold the body of a step of any kind: but for `attention.forward`, which is
    planned before, its work depends on the number of tokens alone, not on the batch's lists.
    """

    def body(self, batch: Batch, attention: AttentionBackend) -> Body:
        """All up to the last layer's attention."""

    def finish(self, body: Body, rows: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of the logits of `rows`, [R] int64 (None: all rows): [R, w] float32.

        `rows` None overwrites the body's residual.
        """


def input_tokens(
    tokens: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
) -> torch.Tensor:
    """The tokens to compute, of which the host may not know some yet.

    Args:
        tokens: [T] int64, what the host knows.
        sources: [T] int64, index into `sampled`; -1: the host knows it.
        sampled: Tokens of the step before, on the device; negative ones stand
            for failures, whose sequences are void by now.
    """
    return torch.where(sources < 0, tokens, sampled[sources.clamp(min=0)].clamp(min=0))
