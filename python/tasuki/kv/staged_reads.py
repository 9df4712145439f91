"""One-sided reads of blocks of another size: slices to staging memory, units to the pool.

Each peer with blocks of another size has staging memory of its own while it is connected, of a
bounded size and on the device of the pool. A slot of it holds one slice. A read is over when its
units are copied. The transport reads slices into slots (`ReadSlices`). Transfer thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tasuki.kv.pool_copies import PoolCopies, Rows
from tasuki.kv.repack import Repack
from tasuki.kv.transfer_plan import Region, Run, TransferPlan
from tasuki.kv.transport import Transfer, TransportError

# Begins to read the peer's slices of these blocks (second) into these slots (first).
ReadSlices = Callable[[Sequence[int], Sequence[int]], Transfer]


class StagingMemory:
    """Registered memory for peers with blocks of another size, used again and never freed.

    Args:
        register: opens memory to the transport's writes, for the life of the process.
        pool: what is staged goes there.
    """

    def __init__(self, register: Callable[[torch.Tensor], None], pool: torch.Tensor) -> None:
        self._register = register
        self._device = pool.device
        self._memory = "VRAM" if pool.is_cuda else "DRAM"
        self._free: list[torch.Tensor] = []

    def take(self, plan: TransferPlan) -> torch.Tensor:
        """Memory for the slices of `plan`, [bytes] uint8.

        Raises:
            TransportError: There is none, or the transport refuses it.
        """
        size_bytes = plan.staged_slices * plan.slice_bytes
        for index, memory in enumerate(self._free):
            if memory.numel() >= size_bytes:
                return self._free.pop(index)
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise TransportError(
                f"no memory for {size_bytes} bytes, which reading blocks of {plan.remote_tokens}"
                f" tokens into blocks of {plan.local_tokens} takes: give both workers the same"
                " --block-size"
            ) from error
        self._register(memory)
        return memory

    def give_back(self, memory: torch.Tensor) -> None:
        """A peer is gone; nothing of it is under way."""
        self._free.append(memory)

    def region(self, memory: torch.Tensor, plan: TransferPlan) -> Region:
        """The slots of `memory`, as descriptors need them."""
        return Region(
            memory.data_ptr(),
            plan.slice_bytes,
            plan.staged_slices,
            self._device.index or 0,
            self._memory,
        )


@dataclass(slots=True)
class StagedPeer:
    """What is read of one peer through staging memory.

    Attributes:
        copies: into the pool.
        repack: how units lie in both sides' blocks.
        memory: its staging memory.
        read_slices: of this peer, into slots of `memory`.
        free: slots that no read uses.
    """

    copies: PoolCopies
    repack: Repack
    memory: torch.Tensor
    read_slices: ReadSlices
    free: list[int]

    def read(self, runs: Sequence[Run]) -> StagedRead:
        """Begin to read a piece.

        Raises:
            TransportError: The peer is not there.
        """
        blocks = self.repack.blocks(runs)
        assert len(blocks) <= len(self.free), "the plan bounds what is under way"
        slots = [self.free.pop() for _ in blocks]
        try:
            read = self.read_slices(slots, [block for block, _ in blocks])
        except Exception:
            self.free += slots
            raise
        planes, slice_bytes = range(self.repack.planes), self.repack.plan.slice_bytes
        rows = [
            each
            for slot, (_, of_block) in zip(slots, blocks, strict=True)
            for each in self.repack.rows(of_block, slot * slice_bytes, planes)
        ]
        return StagedRead(self, slots, rows, read)


class StagedRead:
    """A read under way; made by `StagedPeer.read`."""

    def __init__(self, peer: StagedPeer, slots: list[int], rows: list[Rows], read: Transfer):
        self._peer, self._slots, self._rows, self._read = peer, slots, rows, read
        self._copied: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether all units are in the pool.

        Raises:
            TransportError: It failed, and writes to our blocks no more.
        """
        try:
            if self._copied is None:
                if not self._read.done():
                    return False
                self._copied = self._peer.copies.spread(self._peer.memory, self._rows)
            if not self._copied():
                return False
        except Exception as error:
            self._end()
            if isinstance(error, TransportError):
                raise
            said = f"{type(error).__name__}: {error}"
            raise TransportError(f"copying staged blocks: {said}") from error
        self._end()
        return True

    def _end(self) -> None:
        self._peer.free += self._slots
        self._slots = []
