"""From logits to tokens: one batch, each row by its own parameters.

Order: penalties, logit bias, min_tokens mask; then greedy, or temperature,
top-k, top-p, min-p and the inverse of the cumulative distribution in
vocabulary order. Log-probabilities are those of the model's own logits. A
row's token depends on its logits, parameters and position alone, never on the
batch around it.

Nothing here waits for a device: random numbers and parameters are made on the
host and sent along, tokens stay where the logits are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasuki import _native
from tasuki.engine.api import SamplingParams
from tasuki.engine.host_buffers import upload
from tasuki.engine.logprobs import Scores, score
from tasuki.engine.penalties import adjust, needs_adjusting
from tasuki.engine.plan import Draw
from tasuki.engine.randomness import uniform

# Most nuclei end within the first of these many tokens; few need the whole vocabulary.
_WIDTHS = (128, 2048)


NOT_FINITE = -1
"""Stands for the token of a row whose logits are not finite."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a batch of draws came to.

    Attributes:
        tokens: [n] int64, on the logits' device; `NOT_FINITE` where there is none.
        scores: Log-probabilities where a request wants them; None when none does.
    """

    tokens: torch.Tensor
    scores: Scores | None = None


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of `[R, V]`: [R] int64, `NOT_FINITE` where there is none.

    The largest of a row with a NaN is NaN, and that of one with an infinity is
    infinite: no pass of its own is needed to find them. On the CPU PyTorch's operator
    takes several times as long, and leaves its threads spinning.
    """
    if logits.is_cpu:
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        rows = logits.contiguous().numpy()
        _native.greedy(rows, logits.shape[1], tokens.numpy(), NOT_FINITE)
        return tokens
    most, best = logits.max(dim=-1)
    return best.masked_fill(~most.isfinite(), NOT_FINITE)


def sample(
    logits: torch.Tensor | None,
    rows: Sequence[int],
    draws: Sequence[Draw],
    *,
    best: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
) -> Sampled:
    """Draw one token for each of `draws`.

    Args:
        logits: [R, V] float32, any device; not changed. None: all draws are of plain
            requests, for which `best` is enough.
        rows: Row of `logits` for each draw; several draws may share one.
        draws: What to draw, with sequence and choice.
        best: What `greedy` says of the logits, if that is known.
        sampled: The tokens of the step in flight.
    """
    if best is None:
        assert logits is not None
        best = greedy(logits)
    device = best.device
    in_order = list(rows) == list(range(best.shape[0]))
    index = None if in_order else upload(rows, torch.int64, device)
    if index is not None:
        best = best[index]
    if all(draw.sequence.request.plain for draw in draws):
        return Sampled(best)
    assert logits is not None

    params = [draw.sequence.request.spec.sampling for draw in draws]
    raw = work = logits if index is None else logits[index]
    tokens = best.clamp(min=0)
    if any(needs_adjusting(draw) for draw in draws):
        work = work.clone()
        for row, draw in enumerate(draws):
            adjust(work[row], draw, sampled)
        tokens = work.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if p.temperature != 0.0]
    if drawn:
        uniforms = [uniform(params[i].seed, draws[i].choice, draws[i].position) for i in drawn]
        found = _draw(_take(work, drawn), [params[i] for i in drawn], uniforms)
        if len(drawn) == len(draws):
            tokens = found
        else:
            tokens[upload(drawn, torch.int64, device)] = found
    wants = [p.logprobs for p in params]
    scores = None if all(want is None for want in wants) else score(raw, tokens, wants)
    return Sampled(tokens.masked_fill(best == NOT_FINITE, NOT_FINITE), scores)


def _take(work: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if len(indices) == work.shape[0]:
        return work
    return work[upload(indices, torch.int64, work.device)]


def _draw(
    work: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Inverse CDF of the filtered distributions, in vocabulary order.

    Args:
        work: [n, V] float32 adjusted logits.
        params: Of each row; no temperature is 0.
        uniforms: In [0, 1), one for each row.

    Returns:
        [n] int64, in the vocabulary whatever the logits hold.
    """
    # One upload for both: each costs the host more than the kernels that use it.
    both = upload([[p.temperature for p in params], uniforms], torch.float64, work.device)
    temperature, shares = both.float()[0], both[1]
    # Subtracting first keeps tiny temperatures finite: the maximum is 0.
    scaled = (work - work.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    floors = _floors(scaled, params)
    weights = scaled.exp().double()
    if floors is not None:
        weights.masked_fill_(scaled < floors[:, None], 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = shares[:, None] * total
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
    device = scaled.device
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if len(cut) == len(params) and all(p.min_p <= 0.0 for p in params):
        return _nucleus_floors(scaled, params)
    floors = upload(
        [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params], scaled.dtype, device
    )
    # The maximum stays whatever min_p's rounding says.
    floors.clamp_(max=0.0)
    if cut:
        nucleus = _nucleus_floors(_take(scaled, cut), [params[i] for i in cut])
        index = upload(cut, torch.int64, device)
        floors[index] = torch.maximum(floors[index], nucleus)
    return floors


def _nucleus_floors(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Floors of top-k, then top-p over what top-k leaves: [n], from scaled logits [n, V].

    On the CPU it looks at the largest few first; a row whose nucleus reaches
    further tries again. On a GPU to look would be to wait for it.
    """
    if scaled.is_cuda:
        from tasuki.engine.nucleus import nucleus_floors

        cuts = [[p.top_k for p in params], [p.top_p for p in params]]
        top_k, top_p = upload(cuts, torch.float64, scaled.device)
        return nucleus_floors(scaled, top_k.int(), top_p)
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
    device, vocab = scaled.device, scaled.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else width for p in params]
    values = scaled.topk(max(limits), dim=-1).values
    last = upload(limits, torch.int64, device)[:, None] - 1
    weights = values.double().exp_()
    weights.masked_fill_(torch.arange(values.shape[1], device=device) > last, 0.0)
    cumulative = weights.cumsum(dim=-1)
    seen = cumulative.gather(1, last)
    total = seen
    unlimited = upload([p.top_k == 0 for p in params], torch.bool, device)
    if width < vocab and any(p.top_k == 0 for p in params):
        total = torch.where(unlimited[:, None], scaled.exp().double().cumsum(dim=-1)[:, -1:], seen)
    wanted = total * upload([p.top_p for p in params], torch.float64, device)[:, None]
    inside = ((cumulative - weights) < wanted) & (weights > 0.0)
    floors = values.gather(1, inside.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)[:, 0]
    return floors, (seen >= wanted)[:, 0] | ~unlimited
