"""Logits that the ranks have parts of: gathered on the first one, or only their best compared.

Each rank computes the logits of a stretch of the vocabulary, [R, w]:

    part ─┬─▶ best     the likeliest token of each row: two numbers of each rank's for a row
          └─▶ whole    [R, vocab] on the first rank: all numbers, where a row needs more
"""

from __future__ import annotations

import torch

from tasuki.execution.collective import Collective
from tasuki.execution.sampler import NOT_FINITE, greedy


class JointLogits:
    """What the ranks' parts come to; called by all of them alike.

    Args:
        collective: Joins the ranks.
        vocab_size: Columns of all parts together; what is beyond is padding of the last ranks.
    """

    def __init__(self, collective: Collective, vocab_size: int) -> None:
        self._collective = collective
        self._vocab_size = vocab_size

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The logits [R, vocab] on the first rank; anything of R rows on the others."""
        return self._collective.gather(part, self._vocab_size)

    def best(self, part: torch.Tensor) -> torch.Tensor:
        """What `greedy` would say of `whole`, on every rank: [R] int64.

        Nothing but the ranks' winners is sent. As over the whole the first of several
        winners is taken, and a NaN or an infinity makes a row `NOT_FINITE`.
        """
        if self._collective.size == 1:
            return greedy(part)
        begin = self._collective.rank * part.shape[1]
        own = part[:, : max(0, self._vocab_size - begin)]
        # Values and tokens, both float32: exact up to 2^24 tokens.
        winners = part.new_full((2, part.shape[0]), -torch.inf)
        if own.shape[1]:
            most, token = own.max(dim=-1)
            winners[0] = most
            torch.add(token, begin, out=winners[1])
        values, tokens = self._collective.all_gather(winners).unbind(1)
        most, rank = values.max(dim=0)
        token = tokens.gather(0, rank[None])[0].long()
        return token.masked_fill(~most.isfinite(), NOT_FINITE)
