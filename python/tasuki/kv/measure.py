"""How quickly blocks are read from another process, by the transport and thread that workers use.

    source:  Blocks(…).fill(seed) ── pool ──▶ any channel ──▶ reader:  Link(Blocks(…), pool)
                                                              read(blocks) ─▶ Reading
                                                              first_damaged(seed, blocks)

For checks and benchmarks: a worker has its own pool. One thread uses a `Link`; its transfer
thread is the `Puller` of a worker, with the same bounds on what is under way.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tasuki.kv.backends import DEFAULT
from tasuki.kv.effects import Pull, PullDone
from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.puller import Connect, Forget, PeerFailed, Puller, PullerReport
from tasuki.kv.transfer_plan import Region, TransferPlan
from tasuki.kv.transport import TransportError, create_transport, rank_pool
from tasuki.kv.ways import Way
from tasuki.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Reading:
    """One read of many blocks.

    Attributes:
        seconds: From the first post to the end of the last byte.
        payload_bytes: All of it.
        descriptors: That were posted.
        way: How it travelled; None: UCX does not say.
        post_s: What handing the descriptors to the transport took.
    """

    seconds: float
    payload_bytes: int
    descriptors: int
    way: Way | None
    post_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate."""
        return self.payload_bytes / max(self.seconds, 1e-9)


class Blocks:
    """A pool of equal blocks, registered with a transport of its own.

    Args:
        block_bytes: Of a block; even.
        num_blocks: In the pool.
        device: Where it is.
        transport: As in `create_transport`.
        network: What transfers may use.

    Raises:
        TransportError: The transport does not start, or refuses the memory.
    """

    def __init__(
        self,
        block_bytes: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        transport: str = DEFAULT,
        network: Network = LOCAL,
    ) -> None:
        layout = CacheLayout(num_blocks, 1, 1, 1, block_bytes // 2, torch.uint8)
        self.block_bytes, self.num_blocks = block_bytes, num_blocks
        self.transport = create_transport(transport, network=network)
        pool = self.transport.allocate(layout, device)
        self.memory = pool.view(num_blocks, block_bytes)
        self.transport.register(pool, layout)

    @property
    def pool(self) -> kv_pb2.RankPool:
        """What a reader must know."""
        return rank_pool(self.transport)

    def fill(self, seed: int) -> None:
        """Write bytes that follow from `seed`."""
        for block in range(self.num_blocks):
            self.memory[block] = torch.from_numpy(_bytes_of(seed, block, self.block_bytes))

    def clear(self) -> None:
        """Write zeros."""
        self.memory.zero_()

    def first_damaged(self, seed: int, blocks: Sequence[int]) -> int | None:
        """The first of `blocks` whose BLAKE2b is not that of what `fill` wrote; None: all are."""
        arrived = self.memory.cpu().numpy()
        for block in blocks:
            if _digest(arrived[block]) != _digest(_bytes_of(seed, block, self.block_bytes)):
                return block
        return None


class Link:
    """Reads of a peer's blocks into the same blocks here.

    Args:
        blocks: Ours, of the peer's block size.
        pool: The peer's; may have more blocks.
        peer: Its name, for messages.
    """

    def __init__(self, blocks: Blocks, pool: kv_pb2.RankPool, peer: str) -> None:
        self._blocks, self._pool, self._peer, self._orders = blocks, pool, peer, 0
        self._reports: queue.SimpleQueue[PullerReport] = queue.SimpleQueue()
        self._puller = Puller(blocks.transport, self._reports.put)
        self._puller.start()
        self._connect(pool.layout.pool.block_bytes)

    def cut(self, block_bytes: int) -> None:
        """From now on both memories count as blocks of `block_bytes`."""
        self._puller.put(Forget(self._peer))
        self._connect(block_bytes)

    def _connect(self, size: int) -> None:
        ours, theirs = (
            Region(
                place.base_address,
                size,
                place.num_blocks * place.block_bytes // size,
                place.device,
                place.memory,
            )
            for place in (self._blocks.transport.layout.pool, self._pool.layout.pool)
        )
        plan = TransferPlan(slice_bytes=size, local=ours, remote=theirs)
        metadata, digest = self._pool.transport_metadata, self._pool.transport_metadata_digest
        self._puller.put(Connect(self._peer, metadata, digest, plan))

    def read(self, blocks: Sequence[int], timeout_s: float) -> Reading:
        """Read blocks, and wait for them.

        Raises:
            TransportError: The peer cannot be read, or not within `timeout_s`.
        """
        self._orders += 1
        self._puller.put(Pull(self._orders, self._peer, [(block, block) for block in blocks]))
        done = self._ended(timeout_s)
        return Reading(
            seconds=done.finished_s - done.posted_s,
            payload_bytes=done.moved_bytes,
            descriptors=done.descriptors,
            way=done.way,
            post_s=done.post_s,
        )

    def close(self) -> None:
        """End the transfer thread."""
        self._puller.stop()

    def _ended(self, timeout_s: float) -> PullDone:
        failed = ""
        while True:
            try:
                match self._reports.get(timeout=timeout_s):
                    case PullDone(order_id=order, error=error) as done if order == self._orders:
                        if error:
                            raise TransportError(failed or error)
                        return done
                    case PeerFailed(message=message):
                        failed = message
            except queue.Empty:
                raise TransportError(
                    f"a read of {self._peer} has not ended after {timeout_s:g} s: look at the"
                    " network between the two"
                ) from None


def _bytes_of(seed: int, block: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    words = np.random.Generator(np.random.PCG64([seed, block])).bytes(size)
    return np.frombuffer(bytearray(words), dtype=np.uint8)


def _digest(block: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    return hashlib.blake2b(block.tobytes(), digest_size=16).digest()
