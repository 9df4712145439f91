"""The engines of the world of `handoff_model.py`: memory known block by block, and a `KvHost`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from handoff_world_parts import RUBBISH, PrefillLeg, Request, Violation

from tasuki.engine.api import (
    Announced,
    Assignment,
    FirstToken,
    GroupBlocks,
    LegEndReason,
    LegTimings,
    Prefilled,
)
from tasuki.kv.config import HandoffCounters
from tasuki.kv.effects import PullDone

if TYPE_CHECKING:
    from handoff_world import WorldState


class Node:
    """One engine process: one incarnation, by the name of `engine_id`."""

    def __init__(self, world: WorldState, engine_id: str, offset_s: float, rate: float) -> None:
        self.world = world
        self.engine_id = engine_id
        self.offset_s = offset_s
        self.rate = rate
        self.alive = True
        self.paused = False

    def clock_s(self) -> float:
        return self.offset_s + self.rate * self.world.now_s

    def world_s(self, clock_s: float) -> float:
        return (clock_s - self.offset_s) / self.rate

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused


class PrefillNode(Node):
    """A prefill engine: a `KvHost` with memory."""

    def __init__(
        self, world: WorldState, engine_id: str, offset_s: float, rate: float, num_blocks: int
    ) -> None:
        super().__init__(world, engine_id, offset_s, rate)
        self.side = world.sides.prefill(self, world.config, HandoffCounters())  # type: ignore[arg-type]
        self.num_blocks = num_blocks
        self.size = world.sizes[0]
        self.memory = [RUBBISH] * (num_blocks * self.size)  # by slot
        self.free = list(range(num_blocks))
        self.legs: dict[str, PrefillLeg] = {}

    # The engine.

    def submit(self, request: Request) -> None:
        blocks = -(-request.tokens // self.size)
        leg = PrefillLeg(request.tokens, blocks, request.finished_at_once)
        self.legs[request.request_id] = leg
        self.side.submit(request.request_id, request.decode, self.clock_s())
        self.world.flush_prefill(self)

    def abort(self, request_id: str) -> None:
        leg = self.legs.get(request_id)
        if leg is not None:
            if leg.computed:
                leg.stopped = True
            else:
                self._end(request_id, LegEndReason.ABORTED, self_ended=True)
        self.side.abort(request_id, self.clock_s())
        self.world.flush_prefill(self)

    def retarget(self, request_id: str, decode: str) -> None:
        self.side.retarget(request_id, decode, self.clock_s())
        self.world.flush_prefill(self)

    def runnable(self) -> list[str]:
        return [
            name
            for name, leg in self.legs.items()
            if not leg.stopped and leg.computed < leg.tokens and (leg.blocks or self._has_room(leg))
        ]

    def _has_room(self, leg: PrefillLeg) -> bool:
        """Blocks are free; without credit some must be left (engine/budget.py)."""
        if not leg.admitted:
            ahead = sum(len(other.blocks) for other in self.legs.values() if not other.admitted)
            if ahead + leg.total_blocks > self.world.most_ahead:
                return False
        return len(self.free) >= leg.total_blocks

    def step(self, request_id: str) -> None:
        """Compute one block of one request, and tell."""
        leg = self.legs[request_id]
        prefilled: list[Prefilled] = []
        if not leg.admitted:
            self.world.computed_ahead += 1
        if not leg.blocks:
            leg.blocks = [self.free.pop(0) for _ in range(leg.total_blocks)]
            self.side.on_started([request_id])
        begin = leg.computed
        leg.computed = min(begin + self.size, leg.tokens)
        block = leg.blocks[begin // self.size]
        for index in range(begin, leg.computed):
            self.memory[block * self.size + index - begin] = (request_id, index)
        part = GroupBlocks(0, begin, (block,))
        announced = [Announced(request_id, begin, leg.computed, (part,))]
        if leg.computed == leg.tokens:
            first = FirstToken(0, 7, leg.finished_at_once)
            prefilled = [Prefilled(request_id, leg.tokens, (first,))]
        if prefilled and leg.finished_at_once:
            self._end(request_id, LegEndReason.FINISHED, self_ended=True)
        self.side.on_step(announced, prefilled, self.clock_s())
        if prefilled and leg.finished_at_once:
            self.side.on_leg_ended(request_id, self.clock_s())
        self.world.flush_prefill(self)

    def _end(self, request_id: str, reason: LegEndReason, *, self_ended: bool) -> None:
        leg = self.legs.pop(request_id)
        if not self_ended:
            self.world.check_unread(self, request_id)
        for block in leg.blocks:
            self.memory[block * self.size : (block + 1) * self.size] = [RUBBISH] * self.size
            self.free.append(block)
        self.world.prefill_ended(request_id, self.engine_id, reason)

    # KvHost.

    def admit(self, request_id: str) -> None:
        if request_id in self.legs:
            self.legs[request_id].admitted = True

    def end_prefill_leg(self, request_id: str, reason: LegEndReason, message: str = "") -> None:
        if request_id in self.legs:
            self._end(request_id, reason, self_ended=False)


class DecodeNode(Node):
    """A decode engine: a `KvHost` with memory, and its transfer thread."""

    def __init__(
        self, world: WorldState, engine_id: str, offset_s: float, rate: float, num_blocks: int
    ) -> None:
        super().__init__(world, engine_id, offset_s, rate)
        self.side = world.sides.decode(self, world.config, HandoffCounters())  # type: ignore[arg-type]
        self.num_blocks = num_blocks
        self.size = world.sizes[1]
        self.memory = [RUBBISH] * (num_blocks * self.size)  # by slot
        self.owner = [""] * num_blocks  # free, a request, or "quarantine"
        self.legs: dict[str, list[int]] = {}
        self.credits: dict[str, int] = {}
        self.decoding: dict[str, list[int]] = {}
        self.inbox: deque[PullDone] = deque()
        self.refuse_next = False

    # The engine.

    def submit(self, request: Request) -> None:
        self.legs[request.request_id] = []
        self.side.submit(request.request_id, request.prefill, self.clock_s())
        self.world.dialled(self.engine_id, request.prefill)
        self.world.flush_decode(self)

    def abort(self, request_id: str) -> None:
        self.side.abort(request_id, self.clock_s())
        self.world.flush_decode(self)

    def finish(self, request_id: str) -> None:
        for block in self.decoding.pop(request_id):
            self.owner[block] = ""
        self.world.decode_ended(request_id, self.engine_id, LegEndReason.FINISHED)

    @property
    def num_free(self) -> int:
        return sum(owner == "" for owner in self.owner)

    def blocks_of(self, request_id: str) -> int:
        return -(-self.world.requests[request_id].tokens // self.size)

    # KvHost.

    def may_credit(self, request_id: str) -> bool:
        if request_id in self.credits:
            return True
        total = self.blocks_of(request_id)
        if self.num_free - sum(self.credits.values()) < total:
            return False
        self.credits[request_id] = total
        return True

    def assign(self, request_id: str) -> Assignment | None:
        request = self.world.requests[request_id]
        self.credits.pop(request_id, None)
        if self.refuse_next:
            self.refuse_next = False
            return None
        blocks = [b for b, owner in enumerate(self.owner) if owner == ""]
        if len(blocks) < self.blocks_of(request_id):
            return None
        blocks = blocks[: self.blocks_of(request_id)]
        prefix = request.prefix_tokens // self.size * self.size
        for number, block in enumerate(blocks):
            self.owner[block] = request_id
            for slot in range(self.size):
                index = number * self.size + slot
                cached = index < prefix
                self.memory[block * self.size + slot] = (request_id, index) if cached else RUBBISH
        self.legs[request_id] = blocks
        parts = (GroupBlocks(0, 0, tuple(blocks)),)
        return Assignment(self.size, request.tokens, prefix, parts)

    def start_decode(
        self,
        request_id: str,
        first_tokens: Sequence[FirstToken],
        timings: LegTimings,
        hollow: Sequence[int] = (),
    ) -> None:
        if hollow:
            raise Violation(f"{request_id}: a block is hollow, and there is no window")
        if timings.transfer_exposed_s < 0.0 or timings.transfer_tail_s < 0.0:
            raise Violation(f"{request_id}: {timings}")
        blocks = self.legs.pop(request_id)
        for index in range(self.world.requests[request_id].tokens):
            held = self.memory[blocks[index // self.size] * self.size + index % self.size]
            if held != (request_id, index):
                raise Violation(
                    f"{self.engine_id} decodes {request_id} from wrong KV: slot {index} holds"
                    f" {held}"
                )
        if [token.token for token in first_tokens] != [7]:
            raise Violation(f"first tokens are {first_tokens}")
        self.decoding[request_id] = blocks
        self.world.requests[request_id].decoded = True

    def end_decode_leg(
        self,
        request_id: str,
        reason: LegEndReason,
        message: str = "",
        quarantine: Sequence[int] = (),
        timings: LegTimings | None = None,
    ) -> None:
        blocks = self.legs.pop(request_id)
        self.credits.pop(request_id, None)
        for block in blocks:
            self.owner[block] = "quarantine" if block in quarantine else ""
        self.world.decode_ended(request_id, self.engine_id, reason)

    def free_quarantined(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.owner[block] != "quarantine":
                raise Violation(f"block {block} was not quarantined but {self.owner[block]!r}")
            self.owner[block] = ""
