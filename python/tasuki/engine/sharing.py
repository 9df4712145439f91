"""How a step's prompt tokens are divided among prompts. Pure.

Oldest first, but a long prompt must not keep short ones waiting: while a prompt waits that
has at most half as many tokens left, the long ones get half of the budget together. What
the short ones do not need is given out afterwards (`lift`). Prompts of about
the same length are computed one after the other: to alternate would delay the first one
and speed up none. No torch.

The simulator has a copy of the rule, `crates/sim/src/worker/chunks.rs`. Both are tested with
`tests/golden/prompt_shares.json`.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """The prompt tokens of one step.

    Args:
        budget: Tokens to divide; at least 1.
        lengths: Tokens that each prompt has left, in any order; positive.

    Attributes:
        left: Tokens not given out yet.
    """

    def __init__(self, budget: int, lengths: Iterable[int]) -> None:
        self.left = budget
        self._half = self._long_left = max(1, budget // 2)
        self._shortest = min(lengths, default=0)

    def offer(self, length: int) -> int:
        """Tokens that a prompt with `length` tokens left may take now."""
        most = min(self.left, self._long_left) if self._is_long(length) else self.left
        return min(length, most)

    def take(self, length: int, tokens: int) -> None:
        """A prompt with `length` tokens left takes so many of those it was offered."""
        self.left -= tokens
        if self._is_long(length):
            self._long_left -= tokens

    def lift(self) -> None:
        """Every prompt has had its offer: what is left is for any of them."""
        self._long_left = self.left

    def _is_long(self, length: int) -> bool:
        return length > self._half and length >= 2 * self._shortest
