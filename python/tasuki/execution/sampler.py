"""From logits to tokens: one batch, each row by its own parameters.

Order: penalties, logit bias, min_tokens mask, grammar; then greedy, or temperature,
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

import numpy as np
import torch

from tasuki import _native
from tasuki.engine.api import SamplingParams
from tasuki.engine.plan import Draw
from tasuki.execution.draw_torch import draw
from tasuki.execution.grammar_masks import StepMasks
from tasuki.execution.host_buffers import upload
from tasuki.execution.logprobs import Scores, score
from tasuki.execution.penalties import SLOTS_AT_ONCE, Penalties, needs_adjusting
from tasuki.execution.randomness import uniforms

NOT_FINITE = -1
"""Stands for the token of a row whose logits are not finite."""

# As drawing: only the likeliest tokens are near enough; of them a uniform number 0 is the first.
_GREEDY = (1.0, 0.0, 1.0, 0.0)


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


def sampler_bytes(rows: int, vocab_size: int) -> int:
    """Memory that sampling takes on a GPU at most, beside the logits.

    Of each row: logits adjusted, copied between bounds, and counted as tokens seen (4 bytes
    each); where log-probabilities are wanted, the row's logits again (4), their exponentials
    (4) and comparisons (1 + 8 as they are summed).

    Args:
        rows: Draws of the largest step.
        vocab_size: Logits of a row.
    """
    slots = -(-rows // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
    return vocab_size * (4 * slots + (4 + 4 + 4 + 4 + 9) * rows)


class Sampler:
    """Draws tokens on one device.

    Args:
        device: Where the logits are.
    """

    def __init__(self, device: torch.device) -> None:
        self._penalties = Penalties(device)

    def sample(
        self,
        logits: torch.Tensor | None,
        rows: Sequence[int],
        draws: Sequence[Draw],
        *,
        best: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
        masks: StepMasks | None = None,
    ) -> Sampled:
        """Draw one token for each of `draws`.

        Args:
            logits: [R, V] float32; not changed. None: all draws are of plain
                requests, for which `best` is enough.
            rows: Row of `logits` for each draw; several draws may share one.
            draws: What to draw, with sequence and choice.
            best: What `greedy` says of the logits, if that is known.
            sampled: The tokens of the step in flight.
            masks: What grammars allow, if any draw has one.
        """
        if best is None:
            assert logits is not None
            best = greedy(logits)
        if all(each.sequence.request.plain for each in draws):
            return Sampled(_take(best, rows))
        assert logits is not None
        masked = {} if masks is None else masks.rows
        changed = [i for i, each in enumerate(draws) if i in masked or needs_adjusting(each)]
        adjusted = None
        if changed:
            own_rows = [rows[index] for index in changed]
            adjusted = self._penalties.adjust(
                logits, own_rows, [draws[index] for index in changed], sampled
            )
            if masks is not None:
                masks.apply(adjusted, changed)
        make = _on_gpu if logits.is_cuda else _on_cpu
        tokens = make(logits, rows, draws, adjusted, changed, best)
        wants = [each.sequence.request.spec.sampling.logprobs for each in draws]
        scores = None
        if any(want is not None for want in wants):
            scores = score(_take(logits, rows), tokens.clamp(min=0), wants)
        return Sampled(tokens, scores)


def _take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """`x[rows]`, and `x` itself where these are all its rows in order."""
    if list(rows) == list(range(x.shape[0])):
        return x
    return x[upload(rows, torch.int64, x.device)]


def _on_cpu(
    logits: torch.Tensor,
    rows: Sequence[int],
    draws: Sequence[Draw],
    adjusted: torch.Tensor | None,
    changed: Sequence[int],
    best: torch.Tensor,
) -> torch.Tensor:
    """Tokens [n] int64: one each of `draws`, those `changed` from the rows of `adjusted`."""
    best = _take(best, rows)
    work, tokens = _take(logits, rows), best.clamp(min=0)
    if adjusted is not None:
        if len(changed) == len(draws):
            work = adjusted
        else:
            work = work.clone()
            work[changed] = adjusted
        tokens[changed] = adjusted.argmax(dim=-1)
    params = [each.sequence.request.spec.sampling for each in draws]
    drawn = [index for index, p in enumerate(params) if p.temperature != 0.0]
    if drawn:
        numbers = uniforms((params[i].seed, draws[i].choice, draws[i].position) for i in drawn)
        chosen = work if len(drawn) == len(draws) else work[drawn]
        tokens[drawn] = draw(chosen, [params[i] for i in drawn], numbers.tolist())
    return tokens.masked_fill_(best == NOT_FINITE, NOT_FINITE)


def _on_gpu(
    logits: torch.Tensor,
    rows: Sequence[int],
    draws: Sequence[Draw],
    adjusted: torch.Tensor | None,
    changed: Sequence[int],
    best: torch.Tensor,
) -> torch.Tensor:
    """As `_on_cpu`: one upload, one kernel."""
    from tasuki.execution import draw_kernel

    table = np.empty((len(draw_kernel.FIELDS), len(draws)))
    table[0] = rows
    table[1] = -1
    table[1, changed] = range(len(changed))
    params = [each.sequence.request.spec.sampling for each in draws]
    table[2:6] = np.array([_filters(p) for p in params]).T
    table[6] = uniforms(
        (p.seed, each.choice, each.position) for p, each in zip(params, draws, strict=True)
    )
    table[6] *= [p.temperature != 0.0 for p in params]
    return draw_kernel.draw(
        logits, adjusted, upload(table, torch.float64, logits.device), best, NOT_FINITE
    )


def _filters(p: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p and the largest distance, as the kernel takes them."""
    if p.temperature == 0.0:
        return _GREEDY
    furthest = max(0.0, -math.log(p.min_p)) if p.min_p > 0.0 else math.inf
    return p.temperature, p.top_k, p.top_p, furthest
