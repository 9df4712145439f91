"""Who reads what for an order when there are several ranks, and when all of it has ended.

An order names an engine and its blocks; block ids are the same on all ranks. It
is carried out as one part for each pair of a rank here and a rank there that
share heads (`transfer_plan.py`), by the transfer thread of the rank here. Its
end is told when every part has ended: until then some rank may still write to
its blocks. The end's time is the last part's, so what the fence proves of it
holds on every rank.

    Pull(7, "e") ─┬─▶ rank 0: Pull(31, "e/0") ─▶ PullDone(31) ─┐
                  └─▶ rank 1: Pull(32, "e/1") ─▶ PullDone(32) ─┴─▶ PullDone(7)

Why rank 0 may speak for all when it announces or reuses blocks: in every layer
a rank writes its KV, attends and gives its part to the all-reduce, in the order
of one stream. What rank 0 computes after the last all-reduce needs every rank's
part of it. So when a step is over on rank 0, all ranks have written and read
all that the step writes and reads of the pool.

Engine thread only; does no I/O itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tasuki.kv.effects import CancelPull, Digest, Digested, Pull, PullDone
from tasuki.kv.puller import Connect, Forget, PullerCommand
from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.ways import slowest
from tasuki.v1 import kv_pb2


@dataclass(slots=True)
class _Order:
    """An order under way: its parts, by id, and what those that ended brought."""

    order_id: int
    parts: dict[int, int] = field(default_factory=dict)  # part to our rank
    ended: list[PullDone] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The first one."""
        return next((part.error for part in self.ended if part.error), "")


class RankedPuller:
    """The transfer threads of all ranks, as one.

    Args:
        layouts: of our ranks' pools, in order.
        put: gives a command to the transfer thread of each rank; never waits.
    """

    def __init__(
        self,
        layouts: Sequence[kv_pb2.Layout],
        put: Sequence[Callable[[PullerCommand], None]],
    ) -> None:
        assert len(layouts) == len(put)
        self._layouts = layouts
        self._put = put
        self._peers: dict[str, list[tuple[int, str]]] = {}  # engine: our rank, name of theirs
        self._engines: dict[str, str] = {}  # by the names of its ranks
        self._orders: dict[int, _Order] = {}
        self._parts: dict[int, _Order] = {}
        self._digests: dict[int, list[Digested]] = {}  # those that came, by order
        self._digest_parts: dict[int, int] = {}  # part to order
        self._next_part = itertools.count(1)

    def connect(self, engine: str, pools: Sequence[kv_pb2.RankPool]) -> None:
        """Make `engine` readable before the orders that follow.

        Raises:
            LayoutMismatchError: its pools cannot be read into ours.
        """
        plans = make_plans(self._layouts, [pool.layout for pool in pools])
        self._peers[engine] = [(plan.local, f"{engine}/{plan.remote}") for plan in plans]
        for plan, (rank, name) in zip(plans, self._peers[engine], strict=True):
            pool = pools[plan.remote]
            self._engines[name] = engine
            self._put[rank](
                Connect(name, pool.transport_metadata, pool.transport_metadata_digest, plan.plan)
            )

    def forget(self, engine: str) -> None:
        """No more orders will come for `engine`, unless it is connected again."""
        for rank, name in self._peers.pop(engine, []):
            self._engines.pop(name, None)
            self._put[rank](Forget(name))

    def engine_of(self, peer: str) -> str | None:
        """The engine that a transfer thread knows a rank of as `peer`; None: forgotten."""
        return self._engines.get(peer)

    def pull(self, order: Pull) -> None:
        """Read the blocks of `order` into every rank."""
        whole = self._orders[order.order_id] = _Order(order.order_id)
        # An engine that is not connected is refused by our own transfer thread.
        for rank, name in self._peers.get(order.peer, [(0, order.peer)]):
            part = next(self._next_part)
            whole.parts[part] = rank
            self._parts[part] = whole
            self._put[rank](Pull(part, name, order.pairs, order.check))

    def cancel(self, order_id: int) -> None:
        """Post no more of an order; it still ends."""
        whole = self._orders.get(order_id)
        if whole is not None:
            for part, rank in whole.parts.items():
                self._put[rank](CancelPull(part))

    def whole(self, part: int) -> int:
        """The order that a part under way belongs to."""
        return self._parts[part].order_id

    def ended(self, part: PullDone) -> PullDone | None:
        """A transfer thread reports a part's end.

        Returns:
            The end of the whole order; None while others of its parts are under way.
        """
        whole = self._parts.pop(part.order_id)
        del whole.parts[part.order_id]
        if part.error and not whole.error:
            self.cancel(whole.order_id)
        whole.ended.append(part)
        if whole.parts:
            return None
        del self._orders[whole.order_id]
        return PullDone(
            order_id=whole.order_id,
            posted_s=min(end.posted_s for end in whole.ended),
            finished_s=max(end.finished_s for end in whole.ended),
            moved_bytes=sum(end.moved_bytes for end in whole.ended),
            descriptors=sum(end.descriptors for end in whole.ended),
            error=whole.error,
            digests=tuple(each for end in whole.ended for each in end.digests),
            post_s=sum(end.post_s for end in whole.ended),
            reconnects=sum(end.reconnects for end in whole.ended),
            way=slowest(end.way for end in whole.ended),
        )

    def digest(self, order: Digest) -> None:
        """Compute digests of our blocks on every rank, which has its heads of them."""
        self._digests[order.order_id] = []
        for put in self._put:
            part = next(self._next_part)
            self._digest_parts[part] = order.order_id
            put(Digest(part, order.units, order.unit_tokens))

    def digested(self, part: Digested) -> Digested | None:
        """A transfer thread has digests of its rank.

        Returns:
            Those of all ranks; None while others are missing.
        """
        order_id = self._digest_parts.pop(part.order_id)
        parts = self._digests[order_id]
        parts.append(part)
        if len(parts) < len(self._put):
            return None
        del self._digests[order_id]
        return Digested(
            order_id,
            [each for one in parts for each in one.digests],
            next((one.error for one in parts if one.error), ""),
        )
