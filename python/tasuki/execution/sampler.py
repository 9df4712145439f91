"""From logits to tokens: one batch, each row by its own parameters.

Order: penalties, logit bias, min_tokens mask, grammar; then greedy, or temperature,
top-k, top-p, min-p and the inverse of the cumulative distribution in
vocabulary order. Log-probabilities are those of the model's own logits. A
row's token depends on its logits, parameters and position alone, never on the
batch around it. Random numbers come without a generator (`uniforms`): a request that goes on
elsewhere, in another batch or after a preemption draws the same numbers again.

Nothing here waits for a device: random numbers and parameters are made on the
host and sent along, tokens stay where the logits are.

Where there are several ranks, each computes the logits of a stretch of the vocabulary, [R, w]
(`JointLogits`):

    part ─┬─▶ best     the likeliest token of each row: two numbers of each rank's for a row
          └─▶ whole    [R, vocab] on the first rank: all numbers, where a row needs more
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki import _native
from tasuki.engine.api import SamplingParams
from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import Draw
from tasuki.execution.collective import Collective
from tasuki.execution.draw_torch import draw
from tasuki.execution.logprobs import Scores, score
from tasuki.execution.penalties import SLOTS_AT_ONCE, Penalties, needs_adjusting
from tasuki.execution.step_arrays import upload
from tasuki.execution.token_masks import forbid

NOT_FINITE = -1
"""Stands for the token of a row whose logits are not finite."""

# As drawing: only the likeliest tokens are near enough; of them a uniform number 0 is the first.
_GREEDY = (1.0, 0.0, 1.0, 0.0)
_KEY = struct.Struct("<QII")
_DOMAIN = b"tasuki-sample-v1"
_U64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a batch, and what the model gave to them.

    Attributes:
        tokens: [n] int64, on the logits' device or on their way to the host; `NOT_FINITE`
            where there is none.
        scores: Log-probabilities where a request wants them; None when none does.
    """

    tokens: torch.Tensor
    scores: Scores | None = None


@dataclass(slots=True)
class Prepared:
    """A batch of draws of which only the masks are missing.

    Attributes:
        logits, rows, draws, best: See `Sampler.prepare`; `best` is known.
        adjusted: [n, V] float32, copies of the logits that penalties or masks change.
        changed: The draws of these, by index.
        plain: The tokens are `best`.
        table: What the GPU's kernel takes of each draw.
    """

    logits: torch.Tensor | None
    rows: Sequence[int]
    draws: Sequence[Draw]
    best: torch.Tensor
    adjusted: torch.Tensor | None = None
    changed: Sequence[int] = ()
    plain: bool = False
    table: torch.Tensor | None = None


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

    def prepare(
        self,
        logits: torch.Tensor | None,
        rows: Sequence[int],
        draws: Sequence[Draw],
        *,
        best: torch.Tensor | None = None,
        sampled: torch.Tensor | None = None,
        constrained: Sequence[int] = (),
    ) -> Prepared:
        """Do all but what masks decide; `draw` does the rest.

        Args:
            logits: [R, V] float32; not changed. None: all draws are of plain
                requests, for which `best` is enough.
            rows: Row of `logits` for each draw; several draws may share one.
            draws: What to draw, with sequence and choice.
            best: What `greedy` says of the logits, if that is known.
            sampled: The tokens of the step in flight.
            constrained: Draws that masks may change, by index.
        """
        if best is None:
            assert logits is not None
            best = greedy(logits)
        prepared = Prepared(logits, rows, draws, best)
        prepared.plain = all(each.sequence.request.plain for each in draws)
        if prepared.plain:
            return prepared
        assert logits is not None
        masked = set(constrained)
        changed = [i for i, each in enumerate(draws) if i in masked or needs_adjusting(each)]
        if changed:
            own_rows = [rows[index] for index in changed]
            own = [draws[index] for index in changed]
            prepared.adjusted = self._penalties.adjust(logits, own_rows, own, sampled)
            prepared.changed = changed
        if logits.is_cuda:
            prepared.table = upload(_table(prepared), torch.float64, logits.device)
        return prepared

    def draw(self, prepared: Prepared, masks: StepMasks | None = None) -> Sampled:
        """Draw one token for each of the prepared draws.

        Args:
            prepared: See `prepare`; of no use afterwards.
            masks: What grammars allow, if any draw has one.
        """
        logits, rows, draws = prepared.logits, prepared.rows, prepared.draws
        if prepared.plain:
            return Sampled(_take(prepared.best, rows))
        assert logits is not None
        if masks is not None and prepared.adjusted is not None:
            forbid(prepared.adjusted, prepared.changed, masks)
        tokens = _on_gpu(prepared) if logits.is_cuda else _on_cpu(prepared)
        wants = [each.sequence.request.spec.sampling.logprobs for each in draws]
        scores = None
        if any(want is not None for want in wants):
            scores = score(_take(logits, rows), tokens.clamp(min=0), wants)
        return Sampled(tokens, scores)

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
        """`prepare` and `draw` at once."""
        constrained = list(masks.rows) if masks is not None else ()
        return self.draw(
            self.prepare(logits, rows, draws, best=best, sampled=sampled, constrained=constrained),
            masks,
        )


def _take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """`x[rows]`, and `x` itself where these are all its rows in order."""
    if list(rows) == list(range(x.shape[0])):
        return x
    return x[upload(rows, torch.int64, x.device)]


def _on_cpu(prepared: Prepared) -> torch.Tensor:
    """Tokens [n] int64: one for each draw, those `changed` from the rows of `adjusted`."""
    draws, adjusted, changed = prepared.draws, prepared.adjusted, prepared.changed
    assert prepared.logits is not None
    best = _take(prepared.best, prepared.rows)
    work, tokens = _take(prepared.logits, prepared.rows), best.clamp(min=0)
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


def _on_gpu(prepared: Prepared) -> torch.Tensor:
    """As `_on_cpu`: one kernel, whose table `prepare` sent."""
    from tasuki.execution import draw_kernel

    assert prepared.logits is not None and prepared.table is not None
    return draw_kernel.draw(
        prepared.logits, prepared.adjusted, prepared.table, prepared.best, NOT_FINITE
    )


def _table(prepared: Prepared) -> NDArray[np.float64]:
    """What the kernel takes of each draw: [fields, n]."""
    from tasuki.execution import draw_kernel

    draws, changed = prepared.draws, prepared.changed
    table = np.empty((len(draw_kernel.FIELDS), len(draws)))
    table[0] = prepared.rows
    table[1] = -1
    table[1, changed] = range(len(changed))
    params = [each.sequence.request.spec.sampling for each in draws]
    table[2:6] = np.array([_filters(p) for p in params]).T
    table[6] = uniforms(
        (p.seed, each.choice, each.position) for p, each in zip(params, draws, strict=True)
    )
    table[6] *= [p.temperature != 0.0 for p in params]
    return table


def _filters(p: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p and the largest distance, as the kernel takes them."""
    if p.temperature == 0.0:
        return _GREEDY
    furthest = max(0.0, -math.log(p.min_p)) if p.min_p > 0.0 else math.inf
    return p.temperature, p.top_k, p.top_p, furthest


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


def uniforms(keys: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """`uniform` of each (seed, choice, position)."""
    digests = [
        blake2b(_KEY.pack(seed & _U64, choice, position), digest_size=8, person=_DOMAIN).digest()
        for seed, choice, position in keys
    ]
    bits = np.frombuffer(b"".join(digests), dtype="<u8") >> np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1) for the token at an output position of a choice.

    53 bits of BLAKE2b over the three, as u64le, u32le and u32le.
    """
    return float(uniforms([(seed, choice, position)])[0])
