"""What goes into the engine and what comes out of it: plain data, no torch.

The worker's engine thread is the only caller. Requests arrive as `RequestSpec`;
every `Engine.step` answers with one `StepResult`. `KvHost` is the engine as the
handoff sees it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tasuki.engine.errors import FailureKind

if TYPE_CHECKING:
    from tasuki.engine.errors import GrammarError
    from tasuki.engine.grammar import Grammar


class Leg(enum.Enum):
    """Which part of a request this worker does."""

    COLOCATED = "colocated"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class LegEndReason(enum.Enum):
    FINISHED = "finished"
    HANDED_OFF = "handed_off"
    ABORTED = "aborted"
    REFUSED = "refused"
    RETURNED = "returned"
    KV_LOST = "kv_lost"
    REJECTED = "rejected"
    FAILED = "failed"

    @property
    def failure(self) -> FailureKind | None:
        """What is at fault, unless the leg's end names another kind; None: no failure.

        FAILED is said by handoffs, and by the engine with a kind of its own.
        """
        return _FAILURES.get(self)


_FAILURES = {
    LegEndReason.REFUSED: FailureKind.OVERLOAD,
    LegEndReason.RETURNED: FailureKind.MEMORY,
    LegEndReason.KV_LOST: FailureKind.TRANSPORT,
    LegEndReason.REJECTED: FailureKind.CLIENT,
    LegEndReason.FAILED: FailureKind.TRANSPORT,
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Ranges as in worker.proto; checked by the router and `legs.py`."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def delays_stops(self) -> bool:
        """Whether there are stop tokens that must not come before `min_tokens`."""
        return self.min_tokens > 0 and bool(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One leg of one placement attempt of a request.

    Attributes:
        request_id: Unique per attempt; also names the handoff.
        resumed_tokens: Output of an earlier attempt, at most one choice then.
        choices: Indices of the choices that one prefill serves.
        tenant: Salts the prefix cache.
        waited_s: Since a worker first got a leg of the request; 0: this is the first.
        grammar: What the answer must match, or why that could not be compiled.
    """

    request_id: str
    leg: Leg
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    resumed_tokens: Sequence[int] = ()
    choices: Sequence[int] = (0,)
    tenant: str = ""
    waited_s: float = 0.0
    grammar: Grammar | GrammarError | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


@dataclass(slots=True)
class Output:
    """New tokens of one choice. `position` is the output index of tokens[0].

    A PREFILL leg's have `timings`: its end comes later, and tells no more of them.
    """

    request_id: str
    choice: int
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_prompt_tokens: int = 0
    timings: LegTimings | None = None


@dataclass(slots=True)
class LegTimings:
    """Durations by this worker's clock, in seconds; meanings in worker.proto.

    The engine fills queue, prefill, first_decode and decode; the handoff the rest.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    handshake_s: float = 0.0
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0
    transfer_tail_s: float = 0.0
    first_decode_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: int = 0
    transfer_blocks: int = 0
    prefix_blocks: int = 0
    transfer_post_s: float = 0.0
    transfer_descriptors: int = 0
    transport: str = ""


@dataclass(slots=True)
class LegEnd:
    """The engine holds nothing of the request any more.

    `failure` is what is at fault; left out, it follows from the reason.
    """

    request_id: str
    reason: LegEndReason
    message: str = ""
    timings: LegTimings = field(default_factory=LegTimings)
    failure: FailureKind | None = None

    def __post_init__(self) -> None:
        self.failure = self.failure or self.reason.failure


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one cache group that follow one another in a sequence.

    Attributes:
        group: Index of the group.
        first_token: Of the first block.
        blocks: Their numbers in the pool.
        first_needed: The first token that later ones see, where it is not the first block's.
    """

    group: int
    first_token: int
    blocks: Sequence[int]
    first_needed: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """Tokens of a PREFILL leg whose KV is final, `first_token` to `end_token` - 1.

    `parts` has the blocks that hold them, of each group that the tokens after the context
    need any of.
    """

    request_id: str
    first_token: int
    end_token: int
    parts: Sequence[GroupBlocks]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a PREFILL leg sampled for one choice; the DECODE leg repeats it."""

    choice: int
    token: int
    finished: bool
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A PREFILL leg sampled its first tokens; all of its `tokens` are announced by now."""

    request_id: str
    tokens: int
    first_tokens: Sequence[FirstToken]


@dataclass(slots=True)
class StepResult:
    """All that one step brought; `announced` and `prefilled` concern PREFILL legs only."""

    outputs: list[Output] = field(default_factory=list)
    ended: list[LegEnd] = field(default_factory=list)
    announced: list[Announced] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a DECODE leg's KV goes: for each group the blocks that it needs of the context.

    Blocks of the first `prefix_tokens` tokens hold valid KV already (shared, never written
    to); the rest are fresh and belong to the request alone.

    Attributes:
        block_size: Tokens of a block.
        tokens: Of the context.
        prefix_tokens: A multiple of `block_size`.
        parts: One for each group, in order.
    """

    block_size: int
    tokens: int
    prefix_tokens: int
    parts: Sequence[GroupBlocks]


class KvHost(Protocol):
    """The engine as the handoff sees it. Called on the engine thread only.

    Life of a PREFILL leg: `Engine.submit` lets it wait; it is computed when `admit`
    tells of its peer's credit, or before, where there is ample room; the step results
    name its chunks; its blocks stay until `end_prefill_leg`. Life of a DECODE leg:
    `Engine.submit` parks it without blocks; `assign` gives it blocks; then either
    `start_decode`, or `end_decode_leg`, after which still-quarantined blocks come back
    one by one through `free_quarantined`.
    """

    def admit(self, request_id: str) -> None:
        """Credit for a PREFILL leg is there: schedule it. No-op when repeated."""

    def end_prefill_leg(self, request_id: str, reason: LegEndReason, message: str = "") -> None:
        """Released, expired or failed: stop computing, drop its blocks, report LegEnd."""

    def may_credit(self, request_id: str) -> bool:
        """Whether the inbound budget has room to expect this DECODE leg now.

        True reserves the room (until assign or the leg's end).
        """

    def assign(self, request_id: str) -> Assignment | None:
        """Blocks for a DECODE leg's prompt; None when there is no room (nothing is held)."""

    def start_decode(
        self,
        request_id: str,
        first_tokens: Sequence[FirstToken],
        timings: LegTimings,
        hollow: Sequence[int] = (),
    ) -> None:
        """The KV of the whole prompt is in the assigned blocks and valid: decode.

        Full blocks enter the prefix cache now. The leg's outputs begin with the
        first tokens themselves (position 0 of the new ones). `timings` brings
        what the handoff measured; the first decode begins now in the account. Of the groups
        `hollow` the first block has no KV of tokens before the window: it is not shared.
        """

    def end_decode_leg(
        self,
        request_id: str,
        reason: LegEndReason,
        message: str = "",
        quarantine: Sequence[int] = (),
        timings: LegTimings | None = None,
    ) -> None:
        """A DECODE leg that has not started ends. Its blocks are freed, except `quarantine`:
        transfers may still write to those."""

    def free_quarantined(self, blocks: Sequence[int]) -> None:
        """No transfer writes to these any more: back to the pool."""
