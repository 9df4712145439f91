"""The engine: legs of requests in, one `StepResult` a step out.

    submit ─▶ waiting ─▶ prefill chunks ─▶ decode ─▶ LegEnd        (colocated)
    submit ─▶ waiting ─▶ prefill chunks ─▶ kept ─end─▶ LegEnd       (PREFILL leg)
    submit ─▶ parked ─assign─▶ pulling ─start─▶ decode ─▶ LegEnd    (DECODE leg)

Owns the step in flight and its timing. `legs.py` has the legs and how they end,
`booking.py` what a step's result does to them; `queues.py` owns the sequences
and their blocks, the runner the tensors. One thread calls all of it.

With `EngineConfig.overlap` a step is planned and launched before the one before
it is collected, so that the device goes from one to the next without a gap:

    step()   plan n + 1 ▶ launch n + 1 ▶ wait for n ▶ book n ▶ result of n

Where rows have grammars the device samples n + 1 only when it has their masks, which need
the tokens of n. They are made, and n + 1 is sampled, while its forward pass runs:

    step()   plan n + 1 ▶ launch n + 1 ▶ wait for n ▶ book n ▶ masks, sample n + 1 ▶ result of n

`step(wait=False)` comes back instead of waiting, and goes on where it was when it is
called again: requests, aborts and handoffs may come in between.

What a result names is final either way: tokens, announced blocks and cached
prefixes are booked at collection only. A row of step n + 1 whose sequence ended
in step n, or between the steps, is void: nothing of it is booked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tasuki.engine.api import (
    Assignment,
    FirstToken,
    Leg,
    LegEndReason,
    LegTimings,
    RequestSpec,
    StepResult,
)
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.booking import Booking
from tasuki.engine.budget import Budget, Inbound
from tasuki.engine.cache_groups import pages_per_block
from tasuki.engine.config import EngineConfig
from tasuki.engine.isolation import Flight, IsolatingRunner
from tasuki.engine.legs import Legs
from tasuki.engine.plan import StepPlan
from tasuki.engine.prefix_cache import PrefixCache
from tasuki.engine.queues import Queues
from tasuki.engine.request import Phase, Stage
from tasuki.engine.scheduler import Scheduler
from tasuki.engine.stats import EngineCounters, EngineLoad, StepRates, StepSample
from tasuki.engine.step_calls import Runner

_LOOK_S = 0.1e-3  # between looks at a step that should be over


class Engine:
    """Schedules and runs requests on one model and one pool; also a `KvHost`.

    Args:
        config: Sizes and limits.
        runner: Computes the steps.
        clock: Seconds, monotonic; for timings only.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._runner = IsolatingRunner(runner)
        self._clock = clock
        self._counters = EngineCounters()
        self._rates = StepRates()
        self.cache = PrefixCache(config.prefix_caching)
        """For what routers are told of it; its content is the engine's alone."""
        self._pool = BlockPool(config.num_blocks, self.cache)
        self.flush_cache = self._pool.flush_cache  # of every prefix; what runs keeps its KV
        self._budget = Budget(config, self._pool)
        self._queues = Queues(config, self._pool)
        self._scheduler = Scheduler(config, self._pool, self._budget, self._queues, self._counters)
        self._inbound = Inbound(config, self._pool, self._budget, self._queues)
        self._legs = Legs(config, self._pool, self._budget, self._queues, self._runner)
        self._booking = Booking(config, self._legs, self._queues, self._counters)
        self._stalled = False
        self.on_started: Callable[[Sequence[str]], None] = lambda _: None
        """Told of PREFILL legs whose first chunk is about to be computed, within `step`:
        its result, where the host computes, comes after the chunk. Must not call the engine."""
        self._flight: Flight | None = None
        self._landing: Flight | None = None  # launched before it, and not collected
        self._collected_s = 0.0
        self._flight_limit_s = 0.0
        self.step_limit_s = config.step_timeout_s
        """After how long without progress the engine counts as hung; any thread may read it."""

    # --- the worker's side

    def submit(self, spec: RequestSpec, arrived_s: float | None = None) -> None:
        """Take a leg. A DECODE leg is parked until `assign`.

        A PREFILL leg is computed before `admit` only where there is ample room.

        It came at `arrived_s` by the engine's clock; None: now. One that can
        never run here ends REJECTED with the next step's result. A second leg
        under an id in use is dropped: ids are unique.
        """
        if self._legs.submit(spec, self._clock() if arrived_s is None else arrived_s):
            self._stalled = False

    def abort(self, request_id: str, choices: Sequence[int] = ()) -> bool:
        """Stop the whole request, or some of its choices; no-op for an unknown id.

        A leg whose blocks a peer or a transfer may touch only stops computing:
        `end_prefill_leg` or `end_decode_leg` ends it.

        Returns:
            Whether nothing of it goes on: `choices` was empty or named all that were left.
        """
        request = self._legs.requests.get(request_id)
        if request is None:
            return False
        self._stalled = False
        return self._legs.abort(request, set(choices))

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is not collected."""
        return self._flight is not None or self._landing is not None

    def has_work(self) -> bool:
        """Whether `step` would bring anything now."""
        pending = self._legs.pending
        if self.in_flight:
            return True
        if pending.ended or pending.outputs:
            return True
        return not self._stalled and bool(self._queues.running or self._queues.waiting)

    def due_in_s(self) -> float:
        """How long the next `step` may wait: whoever comes until then is part of it.

        A step in flight keeps the device busy. What follows is planned as late
        as it can be without letting the device wait. Once it is launched, the
        step before it is due when it is over.
        """
        flight = self._flight if self._landing is None else self._landing
        if flight is None or self._runner.landed(flight):
            return 0.0
        plan = flight.plan
        began_s = max(flight.began_s, self._collected_s)
        left_s = began_s - self._clock()
        left_s += self._rates.expected_s(plan.prefill_tokens, plan.num_decodes)
        if self._landing is not None:
            return max(left_s, _LOOK_S)
        prompts = self._queues.has_prompts
        return max(0.0, left_s - self._rates.launch_s(prompts) - self._rates.lead_s)

    def step(self, *, wait: bool = True) -> StepResult:
        """Run one step and tell all that happened since the last one.

        With overlap: launch the next step, then collect the one in flight.

        Args:
            wait: For the device, if it is not done; else it is collected by a later call.
        """
        if self._landing is None:
            self._landing, self._flight = self._flight, None
            if self._landing is None or self._landing.error is None:
                self._flight = self._launch(ahead=self._landing is not None)
            if not self.config.overlap:
                self._landing, self._flight = self._flight, None
                if self._landing is not None:
                    self._runner.sample(self._landing)
        landing = self._landing
        if landing is not None and (wait or self._runner.landed(landing)):
            self._landing = None
            self._collect(landing)
        if self._flight is not None and self._landing is None:
            self._runner.sample(self._flight)
        return self._legs.take_pending()

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        sequences, decode = self._queues.running, Stage.DECODE
        running = {id(sequence.request) for sequence in sequences}
        decoding = [sequence.computed for sequence in sequences if sequence.stage is decode]
        prompts = self._queues.waiting.copy()  # of these nothing is computed
        if len(decoding) < len(sequences):
            prompts += [sequence for sequence in sequences if sequence.stage is not decode]
        will_decode = [prompt for prompt in prompts if prompt.request.leg is not Leg.PREFILL]
        inbound = [request.sequences[0] for request in self._budget.inbound.values()]
        will_decode += inbound
        kept = sum(request.phase is Phase.PREFILLED for request in self._legs.requests.values())
        return EngineLoad(
            waiting_requests=max(0, len(self._legs.requests) - len(running) - kept),
            running_requests=len(running),
            waiting_prefill_tokens=sum(len(s.tokens) - s.computed for s in prompts),
            free_blocks=self._pool.available,
            total_blocks=self.config.num_blocks,
            leased_blocks=sum(r.leased for r in self._budget.outbound.values()),
            quarantined_blocks=self._pool.num_quarantined,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            running_sequences=len(decoding),
            running_kv_tokens=sum(decoding),
            waiting_sequences=sum(len(s.choices) for s in will_decode),
            waiting_kv_tokens=sum(len(s.choices) * len(s.tokens) for s in will_decode),
            awaited_sequences=sum(len(s.choices) for s in inbound),
            planned_ahead_s=self._rates.planned_ahead_s,
            last_decode=self._rates.last_decode,
            last_prefill=self._rates.last_prefill,
            pages_per_block=pages_per_block(self.config.groups),
        )

    def counters(self) -> EngineCounters:
        """Counts since the start; the live object, to be read only."""
        return self._counters

    @property
    def referenced_blocks(self) -> int:
        """Blocks that some leg holds; 0 when no leg is here."""
        return self._pool.num_referenced

    def check(self) -> None:
        """Compare the block accounts with what the legs hold.

        Raises:
            PoolImbalanceError: They differ: a defect.
        """
        held = [s.pages for request in self._legs.requests.values() for s in request.sequences]
        self._pool.check([*held, *self._queues.retired()])

    # --- the handoff's side: KvHost

    def admit(self, request_id: str) -> None:
        """Credit for a PREFILL leg is there: it may take blocks as own work does."""
        request = self._legs.requests.get(request_id)
        if request is not None and request.leg is Leg.PREFILL:
            request.credited = True
            self._stalled = False

    def end_prefill_leg(self, request_id: str, reason: LegEndReason, message: str = "") -> None:
        """Stop a PREFILL leg, drop its blocks, report LegEnd. No-op if it is not here."""
        request = self._legs.requests.get(request_id)
        if request is not None and request.leg is Leg.PREFILL:
            self._legs.end(request, reason, message)
            self._stalled = False

    def may_credit(self, request_id: str) -> bool:
        """Reserve room for a parked DECODE leg; False while there is none."""
        request = self._legs.requests.get(request_id)
        if request is None or not self._inbound.may_credit(request):
            return False
        self._stalled = False  # what was kept free for it beyond its credit is free again
        return True

    def assign(self, request_id: str) -> Assignment | None:
        """Blocks for a parked DECODE leg's context; None when there is no room.

        Raises:
            UnknownRequestError: No parked DECODE leg has this id.
        """
        return self._inbound.assign(self._legs.decode_leg(request_id, Phase.PARKED))

    def start_decode(
        self,
        request_id: str,
        first_tokens: Sequence[FirstToken],
        timings: LegTimings,
        hollow: Sequence[int] = (),
    ) -> None:
        """The KV of the whole context is in the assigned blocks: decode (see `KvHost`).

        Raises:
            UnknownRequestError: No assigned DECODE leg has this id.
        """
        request = self._legs.decode_leg(request_id, Phase.ASSIGNED)
        root = request.sequences[0]
        self._budget.drop(request)
        request.phase, request.timings = Phase.ACTIVE, timings
        request.first_token_s = request.last_token_s = self._clock()
        root.arrived(request.num_context_tokens, hollow)
        self._queues.settle(root, root.computed)
        wanted = [first for first in first_tokens if first.choice in root.choices]
        if request.cancelled or not wanted:
            self._legs.end(request, LegEndReason.ABORTED)
        else:
            self._booking.begin(root, wanted)
        self._stalled = False

    def end_decode_leg(
        self,
        request_id: str,
        reason: LegEndReason,
        message: str = "",
        quarantine: Sequence[int] = (),
        timings: LegTimings | None = None,
    ) -> None:
        """End a DECODE leg that has not started; no-op if it is not here."""
        request = self._legs.requests.get(request_id)
        if request is None or request.leg is not Leg.DECODE:
            return
        if timings is not None:
            request.timings = timings
        if request.phase is Phase.ASSIGNED:
            self._inbound.quarantine(request, quarantine)
            self._runner.scrub(self._inbound.unaccepted(request))
        self._legs.end(request, reason, message)
        self._stalled = False

    def free_quarantined(self, blocks: Sequence[int]) -> None:
        """No transfer writes to these any more: back to the pool."""
        self._runner.scrub(list(blocks))
        self._pool.free_quarantined(blocks)
        self._stalled = False

    # --- a step

    def _launch(self, ahead: bool) -> Flight | None:
        """Plan a step and send it on its way, if there is anything to do."""
        started_s = self._clock()
        preemptions = self._counters.preemptions
        plan = self._scheduler.plan(started_s, self._rates, ahead=ahead)
        if plan is None:
            return None
        for request in plan.returned:
            blocks = f"all {self.config.num_blocks} blocks of the KV pool are taken"
            why = f"preempted: {blocks}; a larger --kv-memory or more workers help"
            self._legs.end(request, LegEndReason.RETURNED, why)
        if not plan.rows:
            self._stalled = not ahead and self._counters.preemptions == preemptions
            return None
        self._stalled = False
        if plan.started:
            self.on_started(plan.started)
        landing_limit_s = self._flight_limit_s if ahead else 0.0
        self.step_limit_s = max(landing_limit_s, self._limit_s(plan, compiled=False))
        flight = self._runner.launch(plan, started_s)
        self._queues.launched(plan)
        masks_s = self._runner.longest_masks_s if flight.needs_masks else 0.0
        self._flight_limit_s = self._limit_s(plan, compiled=True) + masks_s
        self.step_limit_s = max(landing_limit_s, self._flight_limit_s)
        launched_s = self._clock()
        self._rates.record_launch(launched_s - started_s, bool(plan.prefill_tokens))
        if self.config.overlap:
            flight.began_s = launched_s
        if self._landing is not None:
            self._rates.record_lead(late=self._runner.landed(self._landing))
        return flight

    def _limit_s(self, plan: StepPlan, compiled: bool) -> float:
        decodes = len(plan.rows) if plan.draft_tokens else plan.num_decodes
        timeout_s = self.config.step_timeout_s
        return self._rates.limit_s(plan.prefill_tokens, decodes, timeout_s, compiled)

    def _collect(self, flight: Flight) -> None:
        """Wait for a step and book it."""
        plan, outcome = flight.plan, self._runner.collect(flight)
        now_s = self._clock()
        self._queues.landed(plan)
        self._booking.commit(plan.rows, outcome, now_s)
        if outcome.in_parts:
            why = f"preempted: a step of {len(plan.rows)} sequences ran out of the device's memory"
            for request in self._scheduler.relieve(plan):
                self._legs.end(request, LegEndReason.RETURNED, why)
        self._stalled = False
        self._counters.prompt_tokens_computed += plan.prefill_tokens
        self._counters.steps += 1
        duration_s = now_s - max(flight.began_s, self._collected_s)
        self._collected_s = now_s
        if self._flight is not None and not plan.prefill_tokens:
            self._rates.record_plan(now_s - self._flight.planned_s)
        if plan.draft_tokens:
            base_s = self._rates.decode_s(len(plan.rows), plan.kv_tokens)
            self._scheduler.drafter.learn(plan, duration_s, base_s)
            return  # such steps say nothing about others
        self._rates.record(
            StepSample(
                number=self._counters.steps,
                duration_s=duration_s,
                sequences=plan.num_decodes,
                kv_tokens=plan.kv_tokens,
                prefill_tokens=plan.prefill_tokens,
                prefill_squares=plan.prefill_squares,
            )
        )
