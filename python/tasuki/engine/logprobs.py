"""Log-probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasuki.engine.api import TokenLogprob


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], wants: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """What the model gave to each row's token, and to its most likely ones.

    Args:
        logits: [n, V] float32, as the model made them.
        tokens: One for each row.
        wants: How many alternatives each row is to list; None: no entry.
    """
    rows = [index for index, want in enumerate(wants) if want is not None]
    if len(rows) < len(wants):
        logits = logits[torch.tensor(rows, device=logits.device)]
    chosen = torch.tensor([tokens[row] for row in rows], device=logits.device)[:, None]
    values = logits.gather(1, chosen)
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    ranks = ((logits > values).sum(dim=-1) + 1).tolist()
    own = (values - normalizers)[:, 0].tolist()
    widest = min(max(wants[row] or 0 for row in rows), logits.shape[1])
    top_ids: list[list[int]] = [[] for _ in rows]
    top_values: list[list[float]] = [[] for _ in rows]
    if widest:
        top = logits.topk(widest, dim=-1)
        top_ids = top.indices.tolist()
        top_values = (top.values - normalizers).tolist()
    entries: list[TokenLogprob | None] = [None] * len(wants)
    for index, row in enumerate(rows):
        count = wants[row] or 0
        pairs = zip(top_ids[index][:count], top_values[index][:count], strict=True)
        entries[row] = TokenLogprob(tokens[row], own[index], ranks[index], tuple(pairs))
    return entries
