"""One token for each row of logits, by PyTorch's operators: what samples on the CPU.

Temperature, top-k, top-p, min-p and the inverse of the cumulative distribution
in vocabulary order. draw_kernel.py does the same on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tasuki.engine.api import SamplingParams

# Most nuclei end within the first of these many tokens; few need the whole vocabulary.
_WIDTHS = (128, 2048)


def draw(
    work: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Inverse CDF of the filtered distributions, in vocabulary order.

    Args:
        work: [n, V] float32 adjusted logits on the CPU.
        params: Of each row; no temperature is 0.
        uniforms: In [0, 1), one for each row.

    Returns:
        [n] int64, in the vocabulary whatever the logits hold.
    """
    temperature = torch.tensor([p.temperature for p in params])
    # Subtracting first keeps tiny temperatures finite: the maximum is 0.
    scaled = (work - work.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    floors = _floors(scaled, params)
    weights = scaled.exp().double()
    if floors is not None:
        weights.masked_fill_(scaled < floors[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64)[:, None] * total
    # Below the total even when the product was rounded up: the token found has weight.
    target = torch.minimum(target, total * (1.0 - 2.0**-53))
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_(max=work.shape[1] - 1)


def _floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The least scaled logit that each row's filters let through; None when nothing filters.

    A floor and not a set of tokens: ties at the border stay in, whatever order
    a sort would have given them.
    """
    if all(p.top_k == 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return None
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    floors = torch.tensor([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params])
    # The maximum stays whatever min_p's rounding says.
    floors.clamp_(max=0.0)
    if cut:
        rows = scaled if len(cut) == len(params) else scaled[cut]
        floors[cut] = floors[cut].maximum(_nucleus_floors(rows, [params[i] for i in cut]))
    return floors


def _nucleus_floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Floors of top-k, then top-p over what top-k leaves: [n], from scaled logits [n, V].

    It looks at the largest few first; a row whose nucleus reaches further tries again.
    """
    vocab = scaled.shape[1]
    floors, reached = _floors_within(scaled, params, min(_WIDTHS[0], vocab))
    for width in (*_WIDTHS[1:], vocab):
        again = (~reached).nonzero()[:, 0].tolist()
        if not again:
            break
        found, fine = _floors_within(scaled[again], [params[i] for i in again], min(width, vocab))
        floors[again] = found
        reached[again] = fine
    return floors


def _floors_within(
    scaled: torch.Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_nucleus_floors`, from the `width` largest logits where top-k sets no other limit.

    Returns:
        The floors, and which of them hold: the nucleus ended within the limit.
    """
    vocab = scaled.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else width for p in params]
    values = scaled.topk(max(limits), dim=-1).values
    last = torch.tensor(limits)[:, None] - 1
    weights = values.double().exp_()
    weights.masked_fill_(torch.arange(values.shape[1]) > last, 0.0)
    cumulative = weights.cumsum(dim=-1)
    seen = cumulative.gather(1, last)
    total = seen
    unlimited = torch.tensor([p.top_k == 0 for p in params])
    if width < vocab and any(p.top_k == 0 for p in params):
        total = torch.where(unlimited[:, None], scaled.exp().double().cumsum(dim=-1)[:, -1:], seen)
    wanted = total * torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    inside = ((cumulative - weights) < wanted) & (weights > 0.0)
    floors = values.gather(1, inside.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)[:, 0]
    return floors, (seen >= wanted)[:, 0] | ~unlimited
