"""All that there is in the world of `handoff_model.py`, and how things happen in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from handoff_nodes import DecodeNode, Node, PrefillNode
from handoff_world_parts import (
    LEASE_S,
    Action,
    Request,
    Sides,
    Stream,
    Transfer,
    Violation,
)

from tasuki.engine.api import LegEndReason
from tasuki.kv.config import HandoffConfig
from tasuki.kv.effects import CancelPull, Pull, PullDone, Redial, ToDecode, ToPrefill
from tasuki.v1 import kv_pb2 as pb


class WorldState:
    """Everything that there is.

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
