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

An `Action` is a named thing that may happen next; the explorer picks. `handoff_world.py` has
all that there is and how things happen, `handoff_nodes.py` the engines.
"""

from __future__ import annotations

from collections.abc import Iterator

from handoff_nodes import DecodeNode, PrefillNode
from handoff_world import WorldState
from handoff_world_parts import LEASE_S, Action, Sides, Violation

__all__ = ["LEASE_S", "Action", "Sides", "Violation", "World"]


class World(WorldState):
    """What may happen next."""

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
