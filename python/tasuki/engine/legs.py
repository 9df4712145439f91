"""The legs that are here: how they come, are aborted and end, and what is to be told of them.

Owns every leg from `submit` to its LegEnd, and the result of the step that is next
to answer. The queues own their blocks, the budget which side they count on.
Engine thread only. No torch.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from tasuki.engine.api import Leg, LegEnd, LegEndReason, RequestSpec, SamplingParams, StepResult
from tasuki.engine.block_hash import root_hash
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import FailureKind, GrammarError, UnknownRequestError
from tasuki.engine.isolation import IsolatingRunner
from tasuki.engine.plan import Row
from tasuki.engine.queues import Queues
from tasuki.engine.request import Phase, Request, SequenceState

log = logging.getLogger(__name__)

_MOST_LOGPROBS = 20  # alternatives of a token; as the router's limit
_ROUNDING = 2**-24  # of numbers with 32 bits, as the wire has them
_RANGES = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("repetition_penalty", 0.01, math.inf),
)


class Legs:
    """The table of legs.

    Attributes:
        requests: The legs, by request id.
        pending: What the next step's result will tell.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        budget: Budget,
        queues: Queues,
        runner: IsolatingRunner,
    ) -> None:
        self._config = config
        self._pool = pool
        self._budget = budget
        self._queues = queues
        self._runner = runner
        self._arrivals = 0
        self.requests: dict[str, Request] = {}
        self.pending = StepResult()

    def submit(self, spec: RequestSpec, arrived_s: float) -> bool:
        """Take a leg in; see `Engine.submit`. Returns whether it waits to be computed."""
        if self._in_use(spec.request_id):
            log.warning("request_id=%s is in use: the second leg is dropped", spec.request_id)
            return False
        if (reason := rejection(spec, self._config)) is not None:
            self.pending.ended.append(LegEnd(spec.request_id, LegEndReason.REJECTED, reason))
            return False
        self._arrivals += 1
        root = root_hash(self._config.identity, spec.tenant)
        request = Request(spec, self._arrivals, root, arrived_s)
        self.requests[spec.request_id] = request
        if request.leg is Leg.DECODE:
            self._budget.inbound[spec.request_id] = request
            return False
        self._queues.enqueue(request.sequences[0])
        return True

    def abort(self, request: Request, choices: set[int]) -> bool:
        """Stop a leg, or some of its choices; see `Engine.abort`."""
        if choices and self._drop_choices(request, choices):
            return False
        if request.phase is Phase.ASSIGNED:
            request.cancelled = True
        elif request.leg is Leg.PREFILL and request.announced:
            for sequence in request.sequences:
                self._queues.stop(sequence)
            request.phase = Phase.PREFILLED
        else:
            self.end(request, LegEndReason.ABORTED)
        return True

    def decode_leg(self, request_id: str, phase: Phase) -> Request:
        """The DECODE leg with this id.

        Raises:
            UnknownRequestError: There is none in this phase.
        """
        request = self.requests.get(request_id)
        if request is None or request.leg is not Leg.DECODE or request.phase is not phase:
            found = "not here" if request is None else request.phase.value
            raise UnknownRequestError(
                f"request {request_id}: a {phase.value} DECODE leg is wanted, it is {found}"
            )
        return request

    def take_pending(self) -> StepResult:
        """All there is to tell since the last call."""
        pending, self.pending = self.pending, StepResult()
        return pending

    def end(
        self,
        request: Request,
        reason: LegEndReason,
        message: str = "",
        failure: FailureKind | None = None,
    ) -> None:
        """Forget a leg: blocks back, LegEnd out."""
        for sequence in request.sequences:
            self._queues.remove(sequence)
        request.sequences.clear()
        self._budget.drop(request)
        del self.requests[request.request_id]
        self.pending.ended.append(
            LegEnd(request.request_id, reason, message, request.timings, failure)
        )

    def fail(self, request: Request, failure: FailureKind, message: str) -> None:
        """A request fails alone; what it wrote is read by nobody."""
        held = Counter(page for s in request.sequences for page in s.pages)
        for blocks in self._queues.retired():
            held.update(block for block in blocks if block in held)
        own = [b for b, count in held.items() if self._pool.references(b) == count]
        for block in own:
            self._pool.cache.forget(block)
        self._runner.scrub(own)
        log.error("request_id=%s failed (%s): %s", request.request_id, failure.value, message)
        self.end(request, LegEndReason.FAILED, message, failure)

    def undraft(self, row: Row) -> None:
        """A row with a draft has logits that are not finite: nothing of it counts.

        A step masks what it must not see, but masked KV that is not finite spoils it all the
        same. So none is left behind; the row's first token is computed again, alone.
        """
        sequence, (block, slot) = row.sequence, divmod(row.start, self._config.block_size)
        tables = [table.pages[block - table.first :] for table in sequence.tables]
        self._runner.scrub([pages[0] for pages in tables], slot)
        self._runner.scrub([page for pages in tables for page in pages[1:]])
        sequence.computed = row.start
        sequence.acceptance = 0.0

    def finished(self, sequence: SequenceState) -> None:
        """Every choice of a sequence has finished."""
        request = sequence.request
        self._queues.remove(sequence)
        request.sequences.remove(sequence)
        if not request.sequences:
            self.end(request, LegEndReason.FINISHED)

    def _in_use(self, request_id: str) -> bool:
        """Whether a leg has this id, or its end is yet to be told: it would end another one."""
        return request_id in self.requests or any(
            ended.request_id == request_id for ended in self.pending.ended
        )

    def _drop_choices(self, request: Request, choices: set[int]) -> bool:
        """Drop some choices of a request; False, and nothing done, when no other would be left."""
        left = {c for sequence in request.sequences for c in sequence.choices} - choices
        if not left:
            return False
        for sequence in request.sequences.copy():
            sequence.choices = [c for c in sequence.choices if c not in choices] or sequence.choices
            if sequence.choices[0] in choices:
                self._queues.remove(sequence)
                request.sequences.remove(sequence)
        return True


def rejection(spec: RequestSpec, config: EngineConfig) -> str | None:
    """Why a leg can never run on this engine, with value and limit; None if it can."""
    if isinstance(spec.grammar, GrammarError):
        return str(spec.grammar)
    prompt, resumed, params = spec.prompt_tokens, spec.resumed_tokens, spec.sampling
    length = len(prompt) + len(resumed)
    if not prompt:
        return "the prompt has 0 tokens: at least 1 is needed"
    if length >= config.max_model_len:
        return (
            f"prompt and resumed output have {length} tokens: with max_model_len "
            f"{config.max_model_len} at most {config.max_model_len - 1} leave room for output"
        )
    largest = max(max(prompt), max(resumed, default=0))
    if largest >= config.vocab_size or min(min(prompt), min(resumed, default=0)) < 0:
        return f"token id {largest} is out of range: the vocabulary has {config.vocab_size} tokens"
    if params.max_tokens <= len(resumed):
        return (
            f"max_tokens is {params.max_tokens}, and {len(resumed)} tokens are there already: "
            "it must be greater"
        )
    if not spec.choices or len(set(spec.choices)) != len(spec.choices):
        return f"choices are {list(spec.choices)}: at least one is needed, and none twice"
    if len(spec.choices) > config.max_running_requests:
        return (
            f"{len(spec.choices)} choices are asked for: this worker generates at most "
            f"{config.max_running_requests} sequences at once"
        )
    if resumed and len(spec.choices) > 1:
        return f"{len(spec.choices)} choices resume one output: submit each by itself"
    for token in params.logit_bias:
        if not 0 <= token < config.vocab_size:
            return (
                f"logit_bias names token id {token}: the vocabulary has {config.vocab_size} tokens"
            )
    return _sampling_flaw(params)


def _sampling_flaw(params: SamplingParams) -> str | None:
    """Which parameter is outside of its range; NaN is outside of all."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and low * (1 - _ROUNDING) <= value <= high):
            return f"{name} is {value}: it must be a number from {low} to {high}"
    for token, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}: it must be finite"
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > _MOST_LOGPROBS:
            return f"{name} is {getattr(params, name)}: it must be at most {_MOST_LOGPROBS}"
    return None
