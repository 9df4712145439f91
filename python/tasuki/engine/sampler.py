"""From logits to tokens: one batch, each row by its own parameters.

Order: penalties, logit bias, min_tokens mask; then greedy, or temperature,
top-k, top-p, min-p and the inverse of the cumulative distribution in
vocabulary order. Log-probabilities are those of the model's own logits. A
row's token depends on its logits, parameters and position alone, never on the
batch around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tasuki.engine.api import SamplingParams, TokenLogprob
from tasuki.engine.logprobs import token_logprobs
from tasuki.engine.penalties import adjust, needs_adjusting
from tasuki.engine.plan import Draw
from tasuki.engine.randomness import uniform

# Most nuclei end within the first of these many tokens; few need the whole vocabulary.
_WIDTHS = (128, 2048)


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows of `[R, V]` hold finite numbers only."""
    sums = logits.sum(dim=-1).tolist()
    if all(map(math.isfinite, sums)):
        return [True] * len(sums)
    finite: list[bool] = torch.isfinite(logits).all(dim=-1).tolist()
    return finite


def sample(
    logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]
) -> tuple[list[int], list[TokenLogprob | None] | None]:
    """Draw one token for each of `draws`.

    Args:
        logits: [R, V] float32, any device; not changed.
        rows: Row of `logits` for each draw; several draws may share one.
        draws: What to draw, with sequence and choice.

    Returns:
        The tokens, and their log-probabilities where a request wants them
        (None when none does).
    """
    in_order = list(rows) == list(range(logits.shape[0]))
    if all(draw.sequence.request.plain for draw in draws):
        best: list[int] = logits.argmax(dim=-1).tolist()
        return (best if in_order else [best[row] for row in rows]), None

    params = [draw.sequence.request.spec.sampling for draw in draws]
    work = logits if in_order else logits[torch.tensor(rows, device=logits.device)]
    raw = work
    if any(needs_adjusting(draw) for draw in draws):
        work = work.clone()
        for index, draw in enumerate(draws):
            adjust(work[index], draw)
    tokens = [0] * len(draws)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0.0]
    drawn = [i for i, p in enumerate(params) if p.temperature != 0.0]
    if greedy:
        for index, token in zip(greedy, _take(work, greedy).argmax(dim=-1).tolist(), strict=True):
            tokens[index] = token
    if drawn:
        uniforms = [
            uniform(params[i].seed, draws[i].choice, draws[i].sequence.num_outputs) for i in drawn
        ]
        found = _draw(_take(work, drawn), [params[i] for i in drawn], uniforms)
        for index, token in zip(drawn, found, strict=True):
            tokens[index] = token
    wants = [p.logprobs for p in params]
    if all(want is None for want in wants):
        return tokens, None
    return tokens, token_logprobs(raw, tokens, wants)


def _take(work: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if len(indices) == work.shape[0]:
        return work
    return work[torch.tensor(indices, device=work.device)]


def _draw(
    work: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """Inverse CDF of the filtered distributions, in vocabulary order.

    Args:
        work: [n, V] float32 adjusted logits.
        params: Of each row; no temperature is 0.
        uniforms: In [0, 1), one for each row.
    """
    device = work.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    # Subtracting first keeps tiny temperatures finite: the maximum is 0.
    scaled = (work - work.amax(dim=-1, keepdim=True)) / temperature[:, None]
    floors = _floors(scaled, params)
    weights = scaled.exp().double()
    if floors is not None:
        weights.masked_fill_(scaled < floors[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * total
    # Below the total even when the product was rounded up: the token found has weight.
    target = torch.minimum(target, total * (1.0 - 2.0**-53))
    found: list[int] = torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()
    return found


def _floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The least scaled logit that each row's filters let through; None when nothing filters.

    A floor and not a set of tokens: ties at the border stay in, whatever order
    a sort would have given them.
    """
    if all(p.top_k == 0 and p.top_p >= 1.0 and p.min_p <= 0.0 for p in params):
        return None
    floors = torch.tensor(
        [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params],
        dtype=scaled.dtype,
        device=scaled.device,
    )
    # The maximum stays whatever min_p's rounding says.
    floors.clamp_(max=0.0)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if cut:
        nucleus = _nucleus_floors(_take(scaled, cut), [params[i] for i in cut])
        index = torch.tensor(cut, device=scaled.device)
        floors[index] = torch.maximum(floors[index], nucleus)
    return floors


def _nucleus_floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Floors of top-k, then top-p over what top-k leaves: [n], from scaled logits [n, V].

    Looks at the largest few first; a row whose nucleus reaches further tries again.
    """
    vocab = scaled.shape[1]
    floors, reached = _floors_within(scaled, params, min(_WIDTHS[0], vocab))
    for width in (*_WIDTHS[1:], vocab):
        again = [i for i, fine in enumerate(reached) if not fine]
        if not again:
            break
        found, fine = _floors_within(scaled[again], [params[i] for i in again], min(width, vocab))
        floors[again] = found
        for i, now_fine in zip(again, fine, strict=True):
            reached[i] = now_fine
    return floors


def _floors_within(
    scaled: torch.Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[torch.Tensor, list[bool]]:
    """As `_nucleus_floors`, from the `width` largest logits where top-k sets no other limit.

    Returns:
        The floors, and which of them hold: the nucleus ended within the limit.
    """
    device, vocab = scaled.device, scaled.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else width for p in params]
    values = scaled.topk(max(limits), dim=-1).values
    last = torch.tensor(limits, device=device)[:, None] - 1
    weights = values.double().exp_()
    weights.masked_fill_(torch.arange(values.shape[1], device=device) > last, 0.0)
    cumulative = weights.cumsum(dim=-1)
    seen = cumulative.gather(1, last)
    total = seen.clone()
    unlimited = [i for i, p in enumerate(params) if p.top_k == 0]
    if unlimited and width < vocab:
        total[unlimited] = scaled[unlimited].exp().double().cumsum(dim=-1)[:, -1:]
    wanted = total * torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    inside = ((cumulative - weights) < wanted) & (weights > 0.0)
    floors = values.gather(1, inside.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)[:, 0]
    reached = (seen >= wanted)[:, 0].tolist()
    return floors, [p.top_k > 0 or fine for p, fine in zip(params, reached, strict=True)]
