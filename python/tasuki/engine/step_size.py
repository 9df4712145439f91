"""How large a step is: its tokens, by the time that it may take, and which prompts get them.

    only prompts     longest step x prefill rate
    beside decodes   (target step time - decode step) x rate of chunks beside decodes

Prompts get four fifths of the time of the decodes beside them, also where that exceeds the
target; and up to a quarter more than the decodes' time in steps of at most 512 tokens, beyond
which a GPU takes longer for each. With less, prompts that wait would keep a batch of long
contexts from filling up. Where many prompts wait, the
target is stretched: the queue should not last longer than a hundred steps. `max_batched_tokens`
bounds both.

A chunk may add to a step what does not depend on its size: a few prompt tokens beside a few
decodes read nearly all experts of a model. Prompts get at least as many tokens as take half of
that overhead, also where the step then exceeds the target. Smaller chunks would make steps hardly
shorter and prompts many times slower; and no smaller chunk makes the gap between two tokens less
than two thirds of it.

Prompts are computed oldest first, but a long prompt must not keep short ones waiting (`Shares`):
while a prompt waits that has at most half as many tokens left, the long ones get half of the
budget together. What the short ones do not need is given out afterwards (`lift`). Prompts of
about the same length are computed one after the other: to alternate would delay the first one
and speed up none.

Prompts whose log-probabilities are wanted need logits of every token. They share what a step's
memory is measured with and its decodes leave (`scored_tokens`).

After a step that ran out of memory the next ones are smaller (`Relief`).

Rates come in, nothing is measured here. No torch. The simulator has a copy of the first two rules,
`crates/sim/src/worker/chunks.rs`. Both are tested with `tests/golden/step_sizes.json` and
`tests/golden/prompt_shares.json`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tasuki.engine.config import EngineConfig
from tasuki.engine.stats import StepRates

_DRAIN_STEPS = 96  # in which all prompts that wait should be computed
_STRETCH = 4.0  # times the target: the longest step that a queue of prompts may cause
_LEAST_SHARE = 0.8  # of a decode step: the time that prompts get however long decodes take
_KNEE_TOKENS = 512  # of a step, with which a GPU computes most in a second
_KNEE_SHARE = 1.25  # of a decode step: the time that prompts get up to the knee
_UNMEASURED_TOKENS = 256  # of the first chunk
_OVERHEAD_SHARE = 0.5  # of a chunk's overhead: the time that its tokens get at least
_BUCKET_TOKENS = 64  # steps of a multiple fill the buckets of CUDA graphs
_LEAST_LOGITS = 128  # rows of a step that there is memory for
_RELIEF_STEPS = 100  # that are smaller; then a full one is tried again


def step_tokens(
    config: EngineConfig, rates: StepRates, decodes: int, kv_tokens: int, backlog: int
) -> int:
    """Tokens to aim for in the next step.

    Args:
        config: The bounds in tokens and in time.
        rates: What steps took so far.
        decodes: Tokens of sequences that generate; part of the result.
        kv_tokens: That these attend to.
        backlog: Tokens of prompts that are not computed yet.

    Returns:
        Tokens, decodes included; at most `max_batched_tokens`, but never fewer than `decodes`.
    """
    most = config.max_batched_tokens
    target_s = config.itl_target_s
    if target_s is None:
        return max(most, decodes)
    longest_s = config.longest_step_s
    if decodes:
        rate = rates.mixed_tokens_per_s
        decode_s = rates.decode_s(decodes, kv_tokens)
        free_s = max(target_s - decode_s, _LEAST_SHARE * decode_s)
        to_knee = min(_KNEE_TOKENS - decodes, _KNEE_SHARE * decode_s * rate)
        stretched_s = max(_STRETCH * target_s - decode_s, free_s)
        drain = min(backlog / _DRAIN_STEPS, stretched_s * rate)
        prompts = max(free_s * rate, to_knee, drain, _OVERHEAD_SHARE * rates.overhead_tokens)
    else:
        rate = rates.prefill_tokens_per_s
        prompts = longest_s * rate
    if rate == 0.0:
        return min(decodes + _UNMEASURED_TOKENS, max(most, decodes))
    tokens = min(decodes + int(min(prompts, longest_s * rate)), most)
    if tokens - decodes >= _BUCKET_TOKENS and tokens < most:
        up = _BUCKET_TOKENS // 2 if decodes else 0  # a limit in time, not a target, stays one
        tokens = (tokens + up) // _BUCKET_TOKENS * _BUCKET_TOKENS
    return max(min(tokens, most), decodes)


def most_logits(max_running_requests: int) -> int:
    """Rows of logits that a step's memory is measured with: own sequences' and pulled ones'."""
    return max(2 * max_running_requests, _LEAST_LOGITS)


def scored_tokens(config: EngineConfig, decodes: int) -> int:
    """Tokens of scored prompts that a step may compute beside its decodes: at least a block."""
    return max(most_logits(config.max_running_requests) - decodes, config.block_size)


class Shares:
    """The prompt tokens of one step.

    Args:
        budget: Tokens to divide; at least 1.
        lengths: Tokens that each prompt has left, in any order; positive.
        scored: Tokens that prompts may have whose log-probabilities are wanted.

    Attributes:
        left: Tokens not given out yet.
    """

    def __init__(self, budget: int, lengths: Iterable[int], scored: int = 0) -> None:
        self.left = budget
        self._scored_left = scored
        self._half = self._long_left = max(1, budget // 2)
        self._shortest = min(lengths, default=0)

    def offer(self, length: int, *, scored: bool = False) -> int:
        """Tokens that a prompt with `length` tokens left may take now."""
        most = min(self.left, self._long_left) if self._is_long(length) else self.left
        return min(length, most, self._scored_left) if scored else min(length, most)

    def take(self, length: int, tokens: int, *, scored: bool = False) -> None:
        """A prompt with `length` tokens left takes so many of those it was offered."""
        self.left -= tokens
        if scored:
            self._scored_left -= tokens
        if self._is_long(length):
            self._long_left -= tokens

    def lift(self) -> None:
        """Every prompt has had its offer: what is left is for any of them."""
        self._long_left = self.left

    def _is_long(self, length: int) -> bool:
        return length > self._half and length >= 2 * self._shortest


class Relief:
    """Bounds of the next hundred steps."""

    def __init__(self) -> None:
        self._until = 0
        self._tokens: int | None = None
        self._rows: int | None = None

    def begin(self, step: int, *, tokens: int | None = None, rows: int | None = None) -> None:
        """From step number `step` on, at most so many prompt tokens, or generating sequences."""
        self._until = step + _RELIEF_STEPS
        self._tokens, self._rows = tokens, rows

    def prompt_tokens(self, step: int, wanted: int) -> int:
        """Prompt tokens that step number `step` may have, at most `wanted`."""
        return wanted if step >= self._until or self._tokens is None else min(wanted, self._tokens)

    def rows(self, step: int, wanted: int) -> int:
        """Sequences that may generate in step number `step`, at most `wanted`."""
        return wanted if step >= self._until or self._rows is None else min(wanted, self._rows)
