"""A world in which two state machines hand KV over and everything may go wrong.

Several prefill and decode engines, each a real `PrefillSide` or `DecodeSide`
over a model of the engine whose memory is known block by block:

- A slot of a prefill engine's block holds (request, index) while it is owned and
  rubbish from the moment it is freed, so a late read brings rubbish. Blocks have one slot,
  or prefill and decode engines have blocks of different sizes.
- A transfer reads one unit at a time, whenever the explorer says, however long
  after it was posted, whether or not anybody still wants it.
- Every engine's clock has its own origin and rate. A paused engine computes (or its
  process sleeps) while time and transfers go on: its loop's thread may still send
  heartbeats, answer wants and renewals, and read announcements ahead, or may not.
- Messages wait in the stream until delivered; they may be dropped, repeated
  and overtaken, and announcements be read ahead. Streams break. Engines crash
  and come back as new ones.

What must hold is checked where it can be violated, by `Violation`:

- `start_decode` finds every pulled block as the prefill engine wrote it;
- a transfer writes only to blocks that its handoff, or its quarantine, owns;
- a block is freed only when no decode engine could accept a read of it now;
- after the faults stop and time passes, nothing is kept by anybody.

An `Action` is a named thing that may happen next; the explorer picks.

Long because it is one world: every part of it refers to every other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tasuki.engine.api import (
    Announced,
    Assignment,
    FirstToken,
    GroupBlocks,
    LegEndReason,
    LegTimings,
    Prefilled,
)
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import CancelPull, Pull, PullDone, Redial, ToDecode, ToPrefill
from tasuki.kv.prefill_side import PrefillSide
from tasuki.v1 import kv_pb2 as pb

LEASE_S = 10.0
RUBBISH = ("", -1)


class Violation(AssertionError):  # noqa: N818
    """The protocol did what it must never do."""


@dataclass(frozen=True)
class Action:
    """Something that may happen next."""

    name: str
    run: Callable[[], None]

    @property
    def kind(self) -> str:
        """The first word of the name."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Sides:
    """The state machines under test; broken ones are put in to see them caught."""

    prefill: type[PrefillSide] = PrefillSide
    decode: type[DecodeSide] = DecodeSide


@dataclass
class Request:
    """What the router knows of one."""

    request_id: str
    tokens: int
    prefix_tokens: int
    finished_at_once: bool
    prefill: str
    decode: str
    prefill_over: bool = False
    decode_over: bool = False
    decoded: bool = False
    retargets_left: int = 2  # the second one may lead back


@dataclass
class Stream:
    """Between one decode and one prefill engine; what is in it is not yet delivered."""

    up: bool = False
    to_prefill: list[pb.FromDecode] = field(default_factory=list)
    to_decode: list[pb.FromPrefill] = field(default_factory=list)

    def cut(self) -> None:
        self.up = False
        self.to_prefill.clear()
        self.to_decode.clear()


@dataclass
class Transfer:
    """A pull order under way."""

    order_id: int
    decode: str
    prefill: str
    tags: dict[int, str]  # local unit: who owned its block when the pull was ordered
    todo: list[tuple[int, int]]
    cancelled: bool = False
    error: str = ""


@dataclass
class PrefillLeg:
    tokens: int
    total_blocks: int
    finished_at_once: bool
    admitted: bool = False
    stopped: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Node:
    """One engine process: one incarnation, by the name of `engine_id`."""

    def __init__(self, world: World, engine_id: str, offset_s: float, rate: float) -> None:
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
        self, world: World, engine_id: str, offset_s: float, rate: float, num_blocks: int
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
        self, world: World, engine_id: str, offset_s: float, rate: float, num_blocks: int
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

    def prefix_hint(self, request_id: str) -> int:
        return self.world.requests[request_id].prefix_tokens // self.size * self.size

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
        prefix = self.prefix_hint(request_id)
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


class World:
    """Everything that there is, and what may happen next.

    Args:
        sides: the machines under test.
        clocks: (origin, rate) of engines, taken in turn.
        most_ahead: blocks that a prefill engine computes without credit.
        two_threads: whether the loop's thread acts while the engine's computes.
        sizes: tokens in a block of prefill engines, and of decode engines.
    """

    def __init__(
        self,
        sides: Sides,
        num_prefill: int,
        num_decode: int,
        blocks: int = 4,
        clocks: Sequence[tuple[float, float]] = ((0.0, 1.0),),
        two_threads: bool = True,
        most_ahead: int = 0,
        sizes: tuple[int, int] = (1, 1),
    ) -> None:
        self.sides = sides
        self.sizes = sizes
        self.unit = math.gcd(*sizes)
        self.config = HandoffConfig(lease_s=LEASE_S, pull_timeout_s=LEASE_S)
        self.now_s = 100.0
        self.two_threads = two_threads
        self.ordered_ahead = 0
        self.answered_ahead = 0
        self.most_ahead = most_ahead
        self.computed_ahead = 0
        self._ahead: dict[int, pb.FromPrefill] = {}  # once each
        self.frozen = ""
        self.blocks = blocks
        self._clocks = clocks
        self._born = 0
        self.prefills: list[PrefillNode] = []
        self.decodes: list[DecodeNode] = []
        self.streams: dict[tuple[str, str], Stream] = {}
        self.transfers: list[Transfer] = []
        self.requests: dict[str, Request] = {}
        self.router: list[tuple[str, Action]] = []  # commands on their way to an engine
        for _ in range(num_prefill):
            self.prefills.append(self._prefill_node())
        for _ in range(num_decode):
            self.decodes.append(self._decode_node())

    # Building.

    def _prefill_node(self) -> PrefillNode:
        offset_s, rate = self._clock()
        return PrefillNode(self, f"p{self._born}", offset_s, rate, self.blocks)

    def _decode_node(self) -> DecodeNode:
        offset_s, rate = self._clock()
        return DecodeNode(self, f"d{self._born}", offset_s, rate, self.blocks)

    def _clock(self) -> tuple[float, float]:
        self._born += 1
        return self._clocks[self._born % len(self._clocks)]

    def node(self, engine_id: str) -> PrefillNode | DecodeNode | None:
        for node in (*self.prefills, *self.decodes):
            if node.engine_id == engine_id:
                return node
        return None

    def prefill(self, engine_id: str) -> PrefillNode | None:
        return next((n for n in self.prefills if n.engine_id == engine_id), None)

    def decode(self, engine_id: str) -> DecodeNode | None:
        return next((n for n in self.decodes if n.engine_id == engine_id), None)

    # The router.

    def place(
        self,
        request_id: str,
        tokens: int,
        prefix_tokens: int,
        prefill: str,
        decode: str,
        finished_at_once: bool = False,
    ) -> None:
        """Send both legs on their way."""
        request = Request(request_id, tokens, prefix_tokens, finished_at_once, prefill, decode)
        self.requests[request_id] = request
        self.command(f"submit {request_id}", prefill, lambda n: n.submit(request))
        self.command(f"submit {request_id}", decode, lambda n: n.submit(request))

    def command(self, name: str, engine_id: str, run: Callable[[Node], None]) -> None:
        """A message of the router to an engine: arrives if the engine lives."""

        def deliver() -> None:
            node = self.node(engine_id)
            if node is not None:
                run(node)

        self.router.append((engine_id, Action(f"{engine_id} {name}", deliver)))

    def abort(self, request_id: str) -> None:
        """The client hung up: tell both."""
        request = self.requests[request_id]
        self.command(f"abort {request_id}", request.prefill, lambda n: n.abort(request_id))
        self.command(f"abort {request_id}", request.decode, lambda n: n.abort(request_id))

    def retarget(self, request_id: str) -> None:
        """Hand over to another decode engine, whatever the present one does."""
        request = self.requests[request_id]
        others = [n.engine_id for n in self.decodes if n.engine_id != request.decode]
        if not others or request.decoded or request.prefill_over:
            return
        request.retargets_left -= 1
        old, new = request.decode, others[0]
        request.decode = new
        request.decode_over = False
        self.command(
            f"retarget {request_id} {new}",
            request.prefill,
            lambda n: n.retarget(request_id, new),
        )
        self.command(f"submit {request_id}", new, lambda n: n.submit(request))
        self.command(f"abort {request_id}", old, lambda n: n.abort(request_id))

    def prefill_ended(self, request_id: str, engine_id: str, reason: LegEndReason) -> None:
        request = self.requests[request_id]
        request.prefill_over = True

    def decode_ended(self, request_id: str, engine_id: str, reason: LegEndReason) -> None:
        request = self.requests[request_id]
        if request.decode != engine_id:
            return
        if reason is LegEndReason.REFUSED and request.retargets_left > 0 and len(self.decodes) > 1:
            self.retarget(request_id)
            return
        request.decode_over = True
        if reason is not LegEndReason.FINISHED:
            self.command(f"abort {request_id}", request.prefill, lambda n: n.abort(request_id))

    # Effects.

    def stream(self, decode: str, prefill: str) -> Stream:
        return self.streams.setdefault((decode, prefill), Stream())

    def dialled(self, decode: str, prefill: str) -> None:
        self.stream(decode, prefill)

    def flush_prefill(self, node: PrefillNode) -> None:
        for effect in node.side.drain():
            assert isinstance(effect, ToDecode)
            stream = self.streams.get((effect.peer, node.engine_id))
            if stream is not None and stream.up:
                stream.to_decode.append(effect.message)

    def flush_decode(self, node: DecodeNode) -> None:
        for effect in node.side.drain():
            match effect:
                case ToPrefill(peer, message):
                    stream = self.stream(node.engine_id, peer)
                    if stream.up:
                        stream.to_prefill.append(message)
                case Pull(order_id, peer, pairs):
                    per_block = node.size // self.unit
                    tags = {ours: node.owner[ours // per_block] for _, ours in pairs}
                    transfer = Transfer(order_id, node.engine_id, peer, tags, list(pairs))
                    self.transfers.append(transfer)
                case CancelPull(order_id):
                    for transfer in self.transfers:
                        if (transfer.decode, transfer.order_id) == (node.engine_id, order_id):
                            transfer.cancelled = True
                case Redial(peer):
                    self.cut(node.engine_id, peer)

    # Checks.

    def check_unread(self, node: PrefillNode, request_id: str) -> None:
        """`node` is about to free the request's blocks: nobody may still accept a read."""
        for decode in self.decodes:
            handoff = decode.side._handoffs.get(request_id)
            if handoff is None or handoff.peer != node.engine_id or not handoff.remote:
                continue
            fence_s = decode.world_s(decode.side._peers.fence_s(handoff))
            if fence_s > self.now_s:
                raise Violation(
                    f"{node.engine_id} frees {request_id} while {decode.engine_id} accepts"
                    f" reads for {fence_s - self.now_s:.3f} s more"
                )

    def stranded(self) -> list[str]:
        """What is still kept; empty once all has drained."""
        left = [f"router: {a.name}" for engine_id, a in self.router if engine_id != self.frozen]
        for node in self.prefills:
            if node.engine_id == self.frozen:
                continue
            if not node.side.idle or node.legs or len(node.free) != node.num_blocks:
                left.append(f"{node.engine_id}: {sorted(node.legs)} {len(node.free)} free")
        for node in self.decodes:
            if node.engine_id == self.frozen:
                continue
            held = node.legs or node.credits or node.decoding
            if not node.side.idle or held or node.num_free != node.num_blocks:
                left.append(f"{node.engine_id}: {sorted(node.legs)} owners {node.owner}")
        return left

    # What may happen.

    def actions(self) -> Iterator[Action]:
        """Everything but time and faults, in an order that makes progress."""
        addressed: set[str] = set()
        for index, (engine_id, command) in enumerate(self.router):
            node = self.node(engine_id)
            if engine_id not in addressed and (node is None or node.runs):
                addressed.add(engine_id)  # one stream per worker keeps the order
                yield Action(command.name, lambda i=index: self.router.pop(i)[1].run())
        for decode in self.decodes:
            if decode.runs:
                yield from self._decode_actions(decode)
        for prefill in self.prefills:
            if prefill.runs:
                yield from self._prefill_actions(prefill)
        for transfer in self.transfers:
            if transfer.todo and not transfer.error:
                name = f"{transfer.decode} reads of {transfer.prefill}"
                yield Action(name, lambda t=transfer: self._read(t))
        for decode in self.decodes if self.two_threads else ():  # paused or not: another thread
            yield from self._reading_ahead(decode)
        for prefill in self.prefills if self.two_threads else ():
            yield from self._answering_ahead(prefill)

    def _decode_actions(self, node: DecodeNode) -> Iterator[Action]:
        name = node.engine_id
        for (decode, prefill), stream in self.streams.items():
            if decode != name:
                continue
            if stream.to_decode:
                yield Action(
                    f"{name} hears {prefill}",
                    lambda n=node, p=prefill, s=stream: self._hear(n, p, s.to_decode.pop(0)),
                )
            if not stream.up and self._can_connect(node, prefill):
                yield Action(f"{name} dials {prefill}", lambda n=node, p=prefill: self._dial(n, p))
        if node.inbox:
            yield Action(f"{name} takes a pull's end", lambda n=node: self._pull_done(n))
        for transfer in self.transfers:
            if transfer.decode == name and (not transfer.todo or transfer.error):
                yield Action(f"{name} notices", lambda n=node, t=transfer: self._notice(n, t))
        for request_id in list(node.decoding):
            yield Action(f"{name} ends {request_id}", lambda n=node, r=request_id: n.finish(r))
        if node.side._waiting and any(
            node.num_free - sum(node.credits.values()) >= node.blocks_of(h.request_id)
            for h in list(node.side._waiting)[:1]
        ):
            yield Action(f"{name} turns", lambda n=node: self._tick_decode(n))

    def _reading_ahead(self, node: DecodeNode) -> Iterator[Action]:
        """Announcements on their way may be read ahead, each once; most mean no more, then."""
        for (decode, prefill), stream in self.streams.items():
            for message in stream.to_decode if decode == node.engine_id else ():
                if message.HasField("announce") and id(message) not in self._ahead:
                    yield Action(
                        f"{decode} reads ahead of {prefill}",
                        lambda n=node, p=prefill, m=message, s=stream: self._read_ahead(n, p, m, s),
                    )

    def _answering_ahead(self, node: PrefillNode) -> Iterator[Action]:
        """Wants and renewals may be answered while the engine computes."""
        for (decode, prefill), stream in self.streams.items():
            if prefill == node.engine_id != self.frozen and not node.runs:
                for message in stream.to_prefill:
                    if not message.HasField("release"):
                        yield Action(
                            f"{prefill} answers {decode} ahead",
                            lambda n=node, d=decode, m=message, s=stream: self._answer_ahead(
                                n, d, m, s
                            ),
                        )

    def _prefill_actions(self, node: PrefillNode) -> Iterator[Action]:
        name = node.engine_id
        for (decode, prefill), stream in self.streams.items():
            if prefill == name and stream.to_prefill:
                yield Action(
                    f"{name} hears {decode}",
                    lambda n=node, d=decode, s=stream: self._hear_decode(n, d, s.to_prefill.pop(0)),
                )
        if node.side.tells_engine:
            yield Action(f"{name} turns", lambda n=node: self._tick_prefill(n))
        for request_id in node.runnable():
            yield Action(f"{name} steps {request_id}", lambda n=node, r=request_id: n.step(r))

    def _can_connect(self, node: DecodeNode, prefill: str) -> bool:
        if not node.side.needs(prefill):
            return False
        peer = self.prefill(prefill)
        return peer is None or peer.runs

    def faults(self) -> Iterator[Action]:
        """What may go wrong next."""
        for (decode, prefill), stream in self.streams.items():
            for queue, way in ((stream.to_prefill, "to p"), (stream.to_decode, "to d")):
                if queue:
                    yield Action(f"drop {way} {decode} {prefill}", lambda q=queue: q.pop(0))
                    yield Action(f"repeat {way} {decode} {prefill}", lambda q=queue: q.append(q[0]))
                if len(queue) > 1:
                    yield Action(
                        f"overtake {way} {decode} {prefill}",
                        lambda q=queue: q.append(q.pop(0)),
                    )
            if stream.up:
                yield Action(f"cut {decode} {prefill}", lambda d=decode, p=prefill: self.cut(d, p))
        for slot, prefill_node in enumerate(self.prefills):
            yield Action(f"crash {prefill_node.engine_id}", lambda s=slot: self.crash_prefill(s))
        for slot, decode_node in enumerate(self.decodes):
            yield Action(f"crash {decode_node.engine_id}", lambda s=slot: self.crash_decode(s))
            if not decode_node.refuse_next:
                yield Action(
                    f"refuse {decode_node.engine_id}",
                    lambda n=decode_node: setattr(n, "refuse_next", True),
                )
        for node in (*self.prefills, *self.decodes):
            turn = "resume" if node.paused else "pause"
            yield Action(
                f"{turn} {node.engine_id}",
                lambda n=node: setattr(n, "paused", not n.paused),
            )
        for transfer in self.transfers:
            if transfer.cancelled and transfer.todo:
                yield Action("unpost", lambda t=transfer: t.todo.clear())
        for request_id, request in self.requests.items():
            if not request.prefill_over or not request.decode_over:
                yield Action(f"abort {request_id}", lambda r=request_id: self.abort(r))
            if request.retargets_left > 0:
                yield Action(f"retarget {request_id}", lambda r=request_id: self.retarget(r))

    def delays(self) -> Iterator[Action]:
        """Time passes although something could be done."""
        for fraction in (0.05, 0.3, 0.6, 0.92, 1.01):
            yield Action(f"{fraction} leases pass", lambda f=fraction: self.pass_time(f * LEASE_S))

    def ticks(self) -> Iterator[Action]:
        """Timers of one engine run, due or not."""
        for prefill in self.prefills:
            if prefill.runs:
                yield Action(f"{prefill.engine_id} ticks", lambda n=prefill: self._tick_prefill(n))
        for decode in self.decodes:
            if decode.runs:
                yield Action(f"{decode.engine_id} ticks", lambda n=decode: self._tick_decode(n))
            if self.two_threads and decode.engine_id != self.frozen:  # paused or not
                yield Action(f"{decode.engine_id} beats", lambda n=decode: self._beat(n))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def next_deadline_s(self) -> float | None:
        """The first timer of all, in the world's time."""
        due = []
        for node in (*self.prefills, *self.decodes):
            if not node.runs:
                continue
            deadlines = [node.side.next_deadline()]
            if isinstance(node, DecodeNode):
                deadlines.append(node.side.next_beat())
            due += [node.world_s(deadline_s) for deadline_s in deadlines if deadline_s is not None]
        return min(due, default=None)

    # How it happens.

    def _hear(self, node: DecodeNode, prefill: str, message: pb.FromPrefill) -> None:
        node.side.on_message(prefill, message, node.clock_s())
        self.flush_decode(node)

    def _read_ahead(
        self, node: DecodeNode, prefill: str, message: pb.FromPrefill, stream: Stream
    ) -> None:
        self._ahead[id(message)] = message
        if node.side.read_ahead(prefill, message.announce, node.clock_s()):
            self.ordered_ahead += 1
            stream.to_decode[:] = [m for m in stream.to_decode if m is not message]
        self.flush_decode(node)

    def _hear_decode(self, node: PrefillNode, decode: str, message: pb.FromDecode) -> None:
        node.side.on_message(decode, message, node.clock_s())
        self.flush_prefill(node)

    def _answer_ahead(
        self, node: PrefillNode, decode: str, message: pb.FromDecode, stream: Stream
    ) -> None:
        self.answered_ahead += 1
        stream.to_prefill[:] = [m for m in stream.to_prefill if m is not message]
        node.side.read_ahead(decode, message, node.clock_s())
        self.flush_prefill(node)

    def _beat(self, node: DecodeNode) -> None:
        node.side.beat(node.clock_s())
        self.flush_decode(node)

    def _tick_prefill(self, node: PrefillNode) -> None:
        node.side.tick(node.clock_s())
        self.flush_prefill(node)

    def _tick_decode(self, node: DecodeNode) -> None:
        node.side.tick(node.clock_s())
        if not self.two_threads:
            node.side.beat(node.clock_s())
        self.flush_decode(node)

    def _dial(self, node: DecodeNode, prefill: str) -> None:
        if self.prefill(prefill) is None:
            node.side.on_peer_gone(prefill, "another engine answers", node.clock_s())
        else:
            self.stream(node.engine_id, prefill).up = True
            node.side.on_connected(prefill, LEASE_S, self.sizes[0], node.clock_s())
        self.flush_decode(node)

    def cut(self, decode: str, prefill: str) -> None:
        self.stream(decode, prefill).cut()
        node = self.decode(decode)
        if node is not None:
            node.side.on_disconnected(prefill)

    def _read(self, transfer: Transfer) -> None:
        """One unit moves."""
        source, target = self.prefill(transfer.prefill), self.decode(transfer.decode)
        if target is None:
            self.transfers.remove(transfer)
            return
        if source is None:
            transfer.error = "remote disconnect"
            return
        remote, ours = transfer.todo.pop()
        tag, unit = transfer.tags[ours], self.unit
        block = ours * unit // target.size
        if target.owner[block] not in (tag, "quarantine"):
            raise Violation(
                f"a pull ordered for {tag!r} writes to block {block} of"
                f" {target.owner[block]!r} on {target.engine_id}"
            )
        for slot in range(unit):
            target.memory[ours * unit + slot] = source.memory[remote * unit + slot]

    def _notice(self, node: DecodeNode, transfer: Transfer) -> None:
        """The transfer thread sees the end, and then reads its clock."""
        self.transfers.remove(transfer)
        error = transfer.error or ("cancelled" if transfer.cancelled else "")
        node.inbox.append(PullDone(transfer.order_id, 0.0, node.clock_s(), 1, 1, error))

    def _pull_done(self, node: DecodeNode) -> None:
        node.side.on_pull_done(node.inbox.popleft(), node.clock_s())
        self.flush_decode(node)

    def crash_prefill(self, slot: int) -> None:
        """Another engine takes the place; what the old one owned is no more."""
        old = self.prefills[slot]
        old.alive = False
        for decode, prefill in list(self.streams):
            if prefill == old.engine_id:
                self.cut(decode, prefill)
        self.prefills[slot] = self._prefill_node()
        for request in self.requests.values():
            if request.prefill == old.engine_id:
                request.prefill_over = True

    def crash_decode(self, slot: int) -> None:
        old = self.decodes[slot]
        old.alive = False
        self.streams = {key: s for key, s in self.streams.items() if key[0] != old.engine_id}
        self.transfers = [t for t in self.transfers if t.decode != old.engine_id]
        self.decodes[slot] = self._decode_node()
        for request in self.requests.values():
            if request.decode == old.engine_id and not request.decode_over:
                if request.retargets_left > 0 and not request.decoded and len(self.decodes) > 1:
                    self.retarget(request.request_id)
                else:
                    request.decode_over = True
                    self.command(
                        f"abort {request.request_id}",
                        request.prefill,
                        lambda n, r=request.request_id: n.abort(r),
                    )

    # The end.

    def settle(self, frozen: str = "", leases: float = 12.0, max_actions: int = 20_000) -> None:
        """Faults are over: let everything run, time pass only when nothing else can.

        Args:
            frozen: an engine that stays stopped for ever; the others must drain all the same.

        Raises:
            Violation: something is left after so many leases, or never comes to rest.
        """
        self.frozen = frozen
        for request in self.requests.values():
            if request.decode == frozen and not request.decode_over:
                self.abort(request.request_id)  # the router has noticed
        for node in (*self.prefills, *self.decodes):
            node.paused = node.engine_id == frozen
        until_s = self.now_s + leases * LEASE_S
        for _ in range(max_actions):
            action = next(self.actions(), None)
            if action is not None:
                action.run()
                continue
            if not self.stranded():
                return
            deadline_s = self.next_deadline_s()
            if deadline_s is None or deadline_s > until_s:
                break
            self.now_s = max(self.now_s, deadline_s + 1e-6)
            for tick in self.ticks():
                tick.run()
        raise Violation(f"stranded: {'; '.join(self.stranded()) or 'it never comes to rest'}")
