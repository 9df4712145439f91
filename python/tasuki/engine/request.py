"""A leg of a request and its sequences: state only, changed by scheduler and engine.

A request starts as one sequence (prompt plus resumed tokens) that serves all
its choices. When the first tokens are sampled it forks: every choice that goes
on has its own sequence, sharing the full blocks and copying the last, partly
filled one when it first writes to it. A preempted sequence keeps its tokens
and is prefilled again as it stands.

At most one step is in flight while the next is planned: a decoding sequence may
then be one token longer than is known here.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasuki.engine.api import Leg, LegTimings, RequestSpec, TokenLogprob
from tasuki.engine.block_hash import token_array
from tasuki.engine.cache_groups import BlockTable, pages_of
from tasuki.engine.errors import GrammarError

if TYPE_CHECKING:
    from tasuki.engine.grammar import Grammar, GrammarState


ACCEPTANCE = 0.7
"""What the acceptance of drafts is taken to be before there were any."""


class Phase(enum.Enum):
    """Where a leg stands.

    PREFILL legs: ACTIVE, PREFILLED until released.
    DECODE legs: PARKED without blocks, ASSIGNED while pulling, ACTIVE.
    COLOCATED legs: ACTIVE.
    """

    PARKED = "parked"
    ASSIGNED = "assigned"
    ACTIVE = "active"
    PREFILLED = "prefilled"


class Stage(enum.Enum):
    """Where a sequence stands."""

    IDLE = "idle"  # its request is not ACTIVE, or it is gone
    WAITING = "waiting"  # wants blocks and a prefill
    PREFILL = "prefill"  # has all its blocks, computes chunks
    DECODE = "decode"  # one token a step


@dataclass(slots=True, eq=False)
class SequenceState:
    """One row of work: tokens, and the pages that hold their KV.

    Attributes:
        choices: Choices that its next sample is for; one, once it has forked.
        tokens: Prompt, resumed and generated tokens.
        computed: How many tokens have KV here, or will when what is
            launched has ended: with a token on its way, one more than is known.
        tables: Its pages, for each cache group; none before it gets any.
        hashes: Of the full blocks, as far as computed.
        registered: Leading blocks that were offered to the prefix cache.
        unshared: By group, a block that is never offered: not all of its tokens have KV here.
        epoch: Counts up when what is launched of it becomes void.
        flying: Launched steps that have a row of it and are not collected.
        drawn: The runner's own: where its sampled token is on the device.
        ticket: The sampler's own: names what it holds of this sequence on the device.
        acceptance: `drafts.py`'s own: how likely a draft's next token is accepted.
        grammar: `grammar_masks.py`'s own: where the answer stands in the request's grammar.
    """

    request: Request
    choices: list[int]
    tokens: array[int]
    computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    unshared: dict[int, int] = field(default_factory=dict)
    stage: Stage = Stage.IDLE
    epoch: int = 0
    flying: int = 0
    drawn: int = -1
    ticket: int = -1
    acceptance: float = ACCEPTANCE
    grammar: GrammarState | None = None

    @property
    def pages(self) -> array[int]:
        """All its pages, a new list."""
        return array("i", pages_of(self.tables))

    @property
    def num_pages(self) -> int:
        """How many these are."""
        return sum(len(table.held) for table in self.tables)

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, resumed ones included: the next token's position."""
        return len(self.tokens) - self.request.num_prompt_tokens

    def fork(self, choice: int) -> SequenceState:
        """A sequence of one choice with the same tokens and pages; the caller retains them."""
        return SequenceState(
            request=self.request,
            choices=[choice],
            tokens=self.tokens[:],
            computed=self.computed,
            tables=[table.copy() for table in self.tables],
            hashes=self.hashes[:],
            registered=self.registered,
            unshared=self.unshared,
        )

    def arrived(self, tokens: int, hollow: Iterable[int]) -> None:
        """The KV of its first tokens is here, but for the first block of the groups `hollow`."""
        self.computed = tokens
        self.unshared = {group: self.tables[group].first for group in hollow}


class Request:
    """One leg while the engine knows it.

    Attributes:
        arrival: Its place in line: when a worker first got a leg of the request, by our clock, and
            the order of coming; smaller is older.
        root: Block hash chain's start.
        sequences: Those that are alive.
        reserved_blocks: What a DECODE leg's credit still holds back.
        credited: A DECODE leg was promised room, here; a PREFILL leg, by its peer.
            Always so for what needs no credit.
        denied: A DECODE leg asked for credit and must wait.
        announced: Leading tokens whose KV a PREFILL leg has announced.
        leased: Pages that it announced them with.
        bias: Tokens, 64 bits each, and values, 32 bits each, of the logit bias.
        grammar: What every choice must match.
        cancelled: A router abort came while the handoff holds the leg.
        cached_tokens: Prompt tokens found in the prefix cache, once known.
        max_length: Tokens of a sequence, prompt included, that `max_tokens` allows.
    """

    __slots__ = (
        "announced",
        "arrival",
        "bias",
        "cached_tokens",
        "cancelled",
        "credited",
        "denied",
        "first_token_s",
        "grammar",
        "last_token_s",
        "leased",
        "max_length",
        "num_prompt_tokens",
        "phase",
        "plain",
        "prompt_logprobs",
        "reserved_blocks",
        "root",
        "scheduled_s",
        "second_token_s",
        "sequences",
        "spec",
        "submitted_s",
        "timings",
    )

    def __init__(self, spec: RequestSpec, arrival: int, root: bytes, now_s: float) -> None:
        self.spec = spec
        self.arrival = (now_s - spec.waited_s, arrival)
        self.root = root
        self.num_prompt_tokens = len(spec.prompt_tokens)
        self.max_length = self.num_prompt_tokens + spec.sampling.max_tokens
        tokens = token_array(spec.prompt_tokens)
        tokens.extend(spec.resumed_tokens)
        self.sequences = [SequenceState(self, list(spec.choices), tokens)]
        self.phase = {
            Leg.COLOCATED: Phase.ACTIVE,
            Leg.PREFILL: Phase.ACTIVE,
            Leg.DECODE: Phase.PARKED,
        }[spec.leg]
        self.plain = _is_plain_greedy(spec)
        assert not isinstance(spec.grammar, GrammarError), "such a leg is rejected"
        self.grammar: Grammar | None = spec.grammar
        bias = spec.sampling.logit_bias
        self.bias = array("q", bias), array("f", bias.values())
        self.reserved_blocks = 0
        self.credited = spec.leg is Leg.COLOCATED
        self.denied = False
        self.announced = 0
        self.leased = 0
        self.cancelled = False
        self.cached_tokens: int | None = None
        wants = spec.sampling.prompt_logprobs is not None and spec.leg is not Leg.DECODE
        self.prompt_logprobs: list[TokenLogprob] | None = (
            [] if wants and not spec.resumed_tokens else None
        )
        self.timings = LegTimings()
        self.submitted_s = now_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.second_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def leg(self) -> Leg:
        return self.spec.leg

    @property
    def num_context_tokens(self) -> int:
        """Prompt and resumed tokens: what a handoff moves."""
        return self.num_prompt_tokens + len(self.spec.resumed_tokens)

    @property
    def num_choices(self) -> int:
        """Choices that are alive."""
        return sum(len(sequence.choices) for sequence in self.sequences)


def _is_plain_greedy(spec: RequestSpec) -> bool:
    """Whether sampling is argmax of the model's own logits and nothing else."""
    params = spec.sampling
    return (
        params.temperature == 0.0
        and spec.grammar is None
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
        and not params.logit_bias
        and not params.delays_stops
        and params.logprobs is None
        and params.prompt_logprobs is None
    )
