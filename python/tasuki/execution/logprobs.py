"""Log-probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasuki.engine.api import TokenLogprob
from tasuki.execution.step_arrays import to_host, upload


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on their way to the host: read them when the step is over.

    Attributes:
        wants: How many alternatives each row of the batch lists; None: no entry.
        own: [n] float32, n the rows that have an entry; of the row's token.
        ranks: [n] int64, of the row's token; 1 is the likeliest.
        top_ids, top_values: [n, most alternatives].
    """

    wants: Sequence[int | None]
    own: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def entries(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """One for each row of the batch, whose tokens these are."""
        own, ranks = self.own.tolist(), self.ranks.tolist()
        top_ids, top_values = self.top_ids.tolist(), self.top_values.tolist()
        entries: list[TokenLogprob | None] = [None] * len(self.wants)
        rows = (row for row, want in enumerate(self.wants) if want is not None)
        for index, row in enumerate(rows):
            count = self.wants[row] or 0
            pairs = zip(top_ids[index][:count], top_values[index][:count], strict=True)
            entries[row] = TokenLogprob(tokens[row], own[index], ranks[index], tuple(pairs))
        return entries


def score(logits: torch.Tensor, tokens: torch.Tensor, wants: Sequence[int | None]) -> Scores:
    """What the model gave to each row's token, and to its most likely ones.

    Args:
        logits: [R, V] float32, as the model made them.
        tokens: [R] int64, on the same device.
        wants: How many alternatives each row is to list; None: no entry. One
            row at least has one.
    """
    rows = [index for index, want in enumerate(wants) if want is not None]
    if len(rows) < len(wants):
        index = upload(rows, torch.int64, logits.device)
        logits, tokens = logits[index], tokens[index]
    values = logits.gather(1, tokens[:, None])
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    most = min(max(wants[row] or 0 for row in rows), logits.shape[1])
    top_values, top_ids = logits.topk(most, dim=-1)
    return Scores(
        wants,
        to_host((values - normalizers)[:, 0]),
        to_host((logits > values).sum(dim=-1) + 1),
        to_host(top_ids),
        to_host(top_values - normalizers),
    )
