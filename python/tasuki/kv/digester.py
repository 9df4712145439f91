"""Computes digests of units of a pool: on the CPU at once, on a GPU in one launch of a kernel.

Each call gives a job that is asked whether it is over, as transfers are. On a GPU the kernel runs
on a stream of its own, and so beside steps and transfers.

`DigestJobs` has those under way: of what pieces of pulls brought, and of our own blocks for a peer.
A piece that has arrived waits until the next one is posted, so that the two overlap.
Transfer thread only; part of `puller.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tasuki.errors import TasukiError
from tasuki.kv.digest import UnitDigests, Values, column_keys, row_keys
from tasuki.kv.effects import Digest, Digested
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import Transport

Job = Callable[[], "Values | None"]  # None: not over yet

_WORDS = {4: np.int32, 2: np.int16, 1: np.int8}
Deliver = Callable[["UnitDigests | None", str], None]  # digests, or why there are none


class DigestError(TasukiError):
    """Digests could not be computed."""


class Digester:
    """Digests of one pool.

    Args:
        pool: As `layout.py` has it: [num_blocks, kv_heads, layers, planes, block_size, head_dim],
            contiguous.
        interpret: Use the GPU's kernel wherever the pool is, for tests.
    """

    def __init__(self, pool: torch.Tensor, *, interpret: bool = False) -> None:
        blocks, self.heads, layers, planes, self._block_tokens, _ = pool.shape
        slot_bytes = pool.shape[-1] * pool.element_size()
        width = next(width for width in _WORDS if slot_bytes % width == 0)
        raw = pool.detach().view(-1).view(torch.uint8)
        word = getattr(torch, _WORDS[width].__name__)
        self._slot_words = slot_bytes // width
        self._words = raw.view(word).view(blocks, self.heads, layers * planes, -1)
        self._on_gpu = pool.is_cuda or interpret
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]
        self._keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(
        self, units: Sequence[int], unit_tokens: int, first_head: int = 0, heads: int | None = None
    ) -> Job:
        """Begin to compute digests, [units, heads] uint64, not sealed.

        Args:
            units: Numbers, counted over the whole pool: `block_size // unit_tokens` for each block.
            unit_tokens: Divides the block size.
            first_head: Of this pool.
            heads: From there on; None: all that follow.

        Raises:
            DigestError: The device refuses.
        """
        count = self.heads - first_head if heads is None else heads
        try:
            if self._on_gpu:
                return self._launch(units, unit_tokens, first_head, count)
            values = self._compute(units, unit_tokens, first_head, count)
        except (RuntimeError, MemoryError) as error:
            raise DigestError(f"digests of {len(units)} units of KV: {error}") from error
        return lambda: values

    def _compute(self, units: Sequence[int], unit_tokens: int, first: int, count: int) -> Values:
        words, per_block = self._words.numpy(), self._block_tokens // unit_tokens
        columns = unit_tokens * self._slot_words
        rows = row_keys(words.shape[2])[:, None]
        weights = column_keys(columns)
        found = np.empty((len(units), count), dtype=np.int64)
        wide = np.empty((words.shape[2], columns), dtype=np.int64)  # stays in the core's cache
        for index, unit in enumerate(units):
            block, at = divmod(unit, per_block)
            for head in range(count):
                piece = words[block, first + head, :, at * columns : (at + 1) * columns]
                np.multiply(piece, rows, out=wide)
                found[index, head] = np.dot(wide.sum(axis=0), weights)
        return found.view(np.uint64)

    def _launch(self, units: Sequence[int], unit_tokens: int, first: int, count: int) -> Job:
        from tasuki.kv.digest_kernel import digest

        words, device = self._words, self._words.device
        columns = unit_tokens * self._slot_words
        if columns not in self._keys:
            self._keys[columns] = (
                torch.from_numpy(row_keys(words.shape[2])).to(device),
                torch.from_numpy(column_keys(columns)).to(device),
            )
        keys, per_block = self._keys[columns], self._block_tokens // unit_tokens
        host = torch.tensor(units, dtype=torch.int64)
        if self._stream is None:
            interpreted = digest(words, host, per_block, first, count, *keys)
            return lambda: interpreted.cpu().numpy().view(np.uint64)
        with torch.cuda.stream(self._stream):
            numbers = host.pin_memory().to(device, non_blocking=True)
            found = digest(words, numbers, per_block, first, count, *keys)
            here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            here.copy_(found, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        over: Callable[[], bool] = event.query
        return lambda: here.numpy().view(np.uint64) if over() else None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Runs that are here; of their units those in `check` get digests."""

    runs: Sequence[Run]
    check: frozenset[int]
    plan: TransferPlan
    deliver: Deliver


class DigestJobs:
    """Digests to compute and being computed.

    Args:
        transport: Registered; its pool is what digests are of.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._digester: Digester | None = None
        self._arrived: deque[_Arrived] = deque()
        self._jobs: list[tuple[Job, Callable[[Values], None]]] = []

    @property
    def waiting(self) -> bool:
        """Whether `begin` has something to do."""
        return bool(self._arrived)

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to look at."""
        return bool(self._jobs)

    def arrived(
        self, runs: Sequence[Run], check: frozenset[int], plan: TransferPlan, deliver: Deliver
    ) -> None:
        """Runs of a pull are here: digests of their units in `check` are wanted."""
        self._arrived.append(_Arrived(runs, check, plan, deliver))

    def begin(self) -> bool:
        """Begin with the runs that arrived first. Returns whether there were any."""
        if not self._arrived:
            return False
        one = self._arrived.popleft()
        plan, deliver = one.plan, one.deliver
        units = [
            unit
            for run in one.runs
            for unit in range(run.local, run.local + run.count)
            if unit in one.check
        ]
        first = plan.first_head - self._transport.layout.pool.first_kv_head
        try:
            job = self._of_pool().start(units, plan.unit_tokens, first, plan.heads)
        except TasukiError as error:
            deliver(None, str(error))
            return True
        self._jobs.append((job, lambda v: deliver(UnitDigests(plan.first_head, units, v), "")))
        return True

    def own(self, order: Digest, report: Callable[[Digested], None]) -> None:
        """Begin with digests of our own blocks."""
        first = self._transport.layout.pool.first_kv_head
        try:
            job = self._of_pool().start(order.units, order.unit_tokens)
        except TasukiError as error:
            report(Digested(order.order_id, error=str(error)))
            return

        def deliver(values: Values) -> None:
            report(Digested(order.order_id, (UnitDigests(first, order.units, values),)))

        self._jobs.append((job, deliver))

    def poll(self) -> bool:
        """Deliver what is there. Returns whether anything was."""
        jobs, self._jobs = self._jobs, []
        for job, deliver in jobs:
            values = job()
            if values is None:
                self._jobs.append((job, deliver))
            else:
                deliver(values)
        return len(self._jobs) < len(jobs)

    def _of_pool(self) -> Digester:
        if self._digester is None:
            self._digester = Digester(self._transport.pool)
        return self._digester
