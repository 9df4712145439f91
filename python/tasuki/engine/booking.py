"""What a collected step computed, booked: tokens, announced blocks, cached prefixes, timings.

    StepOutcome ─▶ rows that are not void ─▶ blocks final ─▶ draws ─▶ Output, Prefilled, LegEnd

All of it is told in `Legs.pending`. Keeps no state of its own. Engine thread only. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.api import (
    Announced,
    FinishReason,
    FirstToken,
    GroupBlocks,
    Leg,
    LegEndReason,
    Output,
    Prefilled,
    SamplingParams,
    TokenLogprob,
)
from tasuki.engine.config import EngineConfig
from tasuki.engine.drafts import note, taken
from tasuki.engine.errors import FailureKind, GrammarError, kind_of
from tasuki.engine.legs import Legs
from tasuki.engine.plan import Draw, Row, StepOutcome
from tasuki.engine.queues import Queues
from tasuki.engine.request import Phase, Request, SequenceState, Stage
from tasuki.engine.stats import EngineCounters


class Booking:
    """Writes what steps computed into the legs and into the pending result.

    Args:
        config: Block size and the longest sequence.
        legs: Whose requests the rows are.
        queues: Moves the sequences on.
        counters: Those of the engine; output tokens are counted here.
    """

    def __init__(
        self, config: EngineConfig, legs: Legs, queues: Queues, counters: EngineCounters
    ) -> None:
        self._config = config
        self._legs = legs
        self._queues = queues
        self._counters = counters

    def commit(self, rows: Sequence[Row], outcome: StepOutcome, now_s: float) -> None:
        """Book what a step computed, but for rows that are void."""
        stale = {row.sequence for row in rows if row.epoch != row.sequence.epoch}
        void = stale.union(outcome.failed, outcome.raised)
        drafted = {row.sequence: row for row in rows if row.draft} if rows[-1].draft else {}
        not_settled = void.union(drafted) if drafted else void
        for row in rows:
            sequence = row.sequence
            if sequence not in not_settled:
                self._queues.settle(sequence, row.start + row.tokens)
                if sequence.request.leg is Leg.PREFILL:
                    self._announce(sequence, row.end)
        failures = {
            s.request: (FailureKind.MODEL, _not_finite(s)) for s in outcome.failed if s not in stale
        }
        for sequence, error in outcome.raised.items():
            if sequence not in stale:
                message = f"a step of this request raised {error!r}"
                if isinstance(error, GrammarError):
                    message = str(error)
                failures[sequence.request] = (kind_of(error), message)
        for sequence, scores in outcome.prompt_logprobs:
            if sequence not in void and sequence.request.prompt_logprobs is not None:
                sequence.request.prompt_logprobs += scores
        draws, tokens, logprobs = outcome.draws, outcome.tokens, outcome.logprobs
        index, count = 0, len(draws)
        while index < count:
            sequence = draws[index].sequence
            upto = index + 1
            while upto < count and draws[upto].sequence is sequence:
                upto += 1
            entries = None if logprobs is None else logprobs[index:upto]
            own = tokens[index:upto]
            if sequence in void:
                pass
            elif drafted and sequence in drafted:
                self._drafted(drafted[sequence], own, entries, now_s)
            elif sequence.stage is Stage.DECODE:
                self._decoded(sequence, own, entries, now_s)
            else:
                self._prefilled(sequence, draws[index:upto], own, entries, now_s)
            index = upto
        for request, (failure, message) in failures.items():
            self._legs.fail(request, failure, message)

    def _announce(self, sequence: SequenceState, computed: int) -> None:
        """Name the blocks of a PREFILL leg that became final."""
        request, size, total = sequence.request, self._config.block_size, len(sequence.tokens)
        final = computed if computed == total else computed // size * size
        if final <= request.announced:
            return
        parts = []
        for group, first in enumerate(self._config.first_blocks(total)):
            begin, end = max(first, request.announced // size), self._config.blocks_for(final)
            if begin < end:
                blocks = tuple(sequence.tables[group].part(begin, end))
                parts.append(GroupBlocks(group, begin * size, blocks))
                request.leased += len(blocks)
        self._legs.pending.announced.append(
            Announced(request.request_id, request.announced, final, parts)
        )
        request.announced = final

    def _drafted(
        self,
        row: Row,
        tokens: list[int],
        logprobs: list[TokenLogprob | None] | None,
        now_s: float,
    ) -> None:
        """A row has its first token and those that its draft guessed."""
        sequence, count = row.sequence, taken(row.draft, tokens)
        self._counters.draft_tokens += len(row.draft)
        if min(tokens) < 0:
            self._legs.undraft(row)
            return
        note(sequence, len(row.draft), count - 1)
        self._counters.accepted_draft_tokens += count - 1
        own = None if logprobs is None else logprobs[:count]
        self._decoded(sequence, tokens[:count], own, now_s, row.start)

    def _decoded(
        self,
        sequence: SequenceState,
        tokens: list[int],
        logprobs: Sequence[TokenLogprob | None] | None,
        now_s: float,
        start: int | None = None,
    ) -> None:
        """A sequence of one choice has its next tokens; it may end before the last of them.

        Args:
            sequence: Whose.
            tokens: One at least.
            logprobs: Of the tokens.
            now_s: The time.
            start: Of the row, whose KV is not settled yet; None: it is.
        """
        request = sequence.request
        position = len(sequence.tokens) - request.num_prompt_tokens
        for token in tokens:
            finish = self._finish(sequence, token)
            if finish is not None:
                tokens = tokens[: sequence.num_outputs - position + 1]
                break
            sequence.tokens.append(token)
        self._counters.output_tokens += len(tokens)
        self._report(sequence, sequence.choices[0], position, tokens, finish, logprobs)
        if now_s != request.last_token_s:
            _note_time(request, now_s)
        if start is not None:
            sequence.computed = start + len(tokens)
            self._queues.settle(sequence, sequence.computed)
        if finish is not None:
            self._legs.finished(sequence)

    def _prefilled(
        self,
        sequence: SequenceState,
        draws: Sequence[Draw],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None] | None,
        now_s: float,
    ) -> None:
        """A prompt is computed: there is a first token for each choice, but for aborted ones."""
        firsts = [
            FirstToken(
                draw.choice,
                token,
                self._finish(sequence, token) is not None,
                None if logprobs is None else logprobs[index],
            )
            for index, (draw, token) in enumerate(zip(draws, tokens, strict=True))
            if draw.choice in sequence.choices
        ]
        self._counters.output_tokens += len(firsts)
        request = sequence.request
        if now_s != request.last_token_s:
            _note_time(request, now_s)
        if request.leg is not Leg.PREFILL:
            self.begin(sequence, firsts)
            return
        # Its blocks stay, unless nothing needs to move.
        going = self._tell(sequence, firsts)
        pending = self._legs.pending
        for output in pending.outputs[len(pending.outputs) - len(firsts) :]:
            output.timings = request.timings
        pending.prefilled.append(Prefilled(request.request_id, len(sequence.tokens), tuple(firsts)))
        self._queues.stop(sequence)
        request.phase = Phase.PREFILLED
        if not going:
            self._legs.end(request, LegEndReason.FINISHED)

    def _finish(self, sequence: SequenceState, token: int) -> FinishReason | None:
        request, params = sequence.request, sequence.request.spec.sampling
        grammar = request.grammar
        if grammar is not None and (token in params.stop_token_ids or token in grammar.eos_tokens):
            return FinishReason.STOP  # it is allowed nowhere but at the end
        length = len(sequence.tokens) + 1
        return finish_reason(
            params,
            token,
            outputs=length - request.num_prompt_tokens,
            length=length,
            max_model_len=self._config.max_model_len,
        )

    def _report(
        self,
        sequence: SequenceState,
        choice: int,
        position: int,
        tokens: list[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprob | None] | None,
    ) -> None:
        """One Output: the next tokens of a choice of a sequence, at `position` and after it."""
        request = sequence.request
        given = None
        if logprobs is not None and logprobs[0] is not None:
            given = [entry for entry in logprobs[: len(tokens)] if entry is not None]
        self._legs.pending.outputs.append(
            Output(
                request.spec.request_id,
                choice,
                position,
                tokens,
                given,
                finish,
                request.prompt_logprobs,
                request.cached_tokens or 0 if position == 0 else 0,
            )
        )
        request.prompt_logprobs = None

    def _tell(self, sequence: SequenceState, firsts: Sequence[FirstToken]) -> list[FirstToken]:
        """Report the first tokens of a sequence's choices; returns those of choices that go on."""
        going = []
        for first in firsts:
            finish = self._finish(sequence, first.token)
            if finish is None and first.finished:
                stops = sequence.request.spec.sampling.stop_token_ids
                finish = FinishReason.STOP if first.token in stops else FinishReason.LENGTH
            logprobs = None if first.logprob is None else [first.logprob]
            position = sequence.num_outputs
            self._report(sequence, first.choice, position, [first.token], finish, logprobs)
            if finish is None:
                going.append(first)
        return going

    def begin(self, sequence: SequenceState, firsts: Sequence[FirstToken]) -> None:
        """Report first tokens, and let choices go on, each in its own sequence.

        They may come from a prefill worker: what no model draws fails the request.
        """
        if flaw := first_tokens_flaw(firsts, self._config.vocab_size):
            self._legs.fail(sequence.request, FailureKind.TRANSPORT, flaw)
            return
        going = self._tell(sequence, firsts)
        if not going:
            self._legs.finished(sequence)
            return
        for first in going[1:]:
            child = self._queues.fork(sequence, first.choice)
            child.tokens.append(first.token)
            self._queues.start_decode(child)
        sequence.tokens.append(going[0].token)
        sequence.choices = [going[0].choice]
        if sequence.stage is Stage.PREFILL:
            self._queues.promote(sequence)
        else:
            self._queues.start_decode(sequence)


def _not_finite(sequence: SequenceState) -> str:
    return (
        f"the model's logits at output position {sequence.num_outputs} are not finite: the request"
        " was stopped; in bfloat16 try --dtype float32"
    )


def _note_time(request: Request, now_s: float) -> None:
    """The request has a token at `now_s`: its first, its second or a later one."""
    timings = request.timings
    if request.first_token_s is None:
        scheduled_s = request.submitted_s if request.scheduled_s is None else request.scheduled_s
        timings.queue_s = scheduled_s - request.submitted_s
        timings.prefill_s = now_s - scheduled_s
        request.first_token_s = now_s
    elif request.second_token_s is None:
        timings.first_decode_s = now_s - request.first_token_s
        request.second_token_s = now_s
    else:
        timings.decode_s = now_s - request.second_token_s
    request.last_token_s = now_s


def first_tokens_flaw(first_tokens: Sequence[FirstToken], vocab_size: int) -> str:
    """Why first tokens cannot be a model's; empty: they can."""
    choices = [first.choice for first in first_tokens]
    if len(set(choices)) != len(choices):
        return f"the prefill worker sent first tokens of choices {choices}: none may come twice"
    for first in first_tokens:
        if first.token >= vocab_size:
            return (
                f"the prefill worker sent token id {first.token}: the vocabulary has"
                f" {vocab_size} tokens"
            )
    return ""


def finish_reason(
    params: SamplingParams, token: int, *, outputs: int, length: int, max_model_len: int
) -> FinishReason | None:
    """Whether a choice ends with this token.

    Args:
        params: Of the request.
        token: Its newest one.
        outputs: Output tokens including it, and resumed ones.
        length: Tokens of the sequence including it.
        max_model_len: Tokens that a sequence may have.
    """
    if token in params.stop_token_ids and outputs > params.min_tokens:
        return FinishReason.STOP
    if outputs >= params.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None
