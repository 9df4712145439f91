"""Attention of decodes by our own kernels (decode_kernels.py says how): CUDA only.

A plan is a launch on the current stream that reads nothing but the device, so it
costs the host next to nothing, and a step in flight may still use what it writes:
the stream keeps the order. Plans of a bucket write to the same memory each time,
which its graph reads.

Owns that memory, and what pieces of divided sequences leave for each other during
a launch. Runs on the engine thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton.runtime import JITFunction

from tasuki.attention import decode_kernels as kernels
from tasuki.attention.batch import Batch, StepLimits
from tasuki.attention.errors import AttentionError
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.device_limits import DeviceLimits, limits_of
from tasuki.overlap import overlaps

_COMPILED = isinstance(kernels.attend, JITFunction)  # and not interpreted, on a CPU
_PROGRAMS_PER_CORE = 2  # that run together on a multiprocessor, where its memory allows
_LEAST_TILE = 16
_LEAST_ROWS = 16
_LEAST_TILES = 2  # of a program: fewer cost more in merging than they bring


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of plans, int32 on the device; decode_kernels.py says what is in it.

    Attributes:
        begins: [sequences + 1] first tile of each sequence.
        records: [tiles x fields], one more than there are tiles at most.
        arrived: [sequences x kv_heads] pieces that are there; 0 between launches.
    """

    begins: torch.Tensor
    records: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The tiles of some sequences for layers of one window.

    Attributes:
        sequences: how many at most; the batch's first rows.
        window: tokens that each sees, its own included; None: all.
        buffers: where they lie.
    """

    sequences: int
    window: int | None
    buffers: _Buffers


class DecodeAttention:
    """Decodes over one pool on one device."""

    def __init__(
        self,
        pool: torch.Tensor,
        heads: int,
        programs: int | None = None,
        tile_elements: int | None = None,
        scales: KvScales = UNSCALED,
    ) -> None:
        """Attend over `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim].

        Args:
            pool: of the queries' dtype, or float8_e4m3fn.
            heads: query heads, a multiple of `kv_heads`.
            programs: for each KV head; None: as many as run together on the device.
            tile_elements: of a tile's keys; None: as many as TILE_BYTES. Less where two
                programs of a multiprocessor would not fit in its shared memory.
            scales: of an fp8 pool.

        Raises:
            AttentionError: The pool is of fp8 and the device cannot convert it.
        """
        limits = limits_of(pool.device)
        if pool.itemsize == 1 and not limits.has_fp8:
            raise AttentionError(no_fp8(limits))
        _, self._kv_heads, layers, _, self._block_size, self._head_dim = pool.shape
        self._pools = [pool.select(2, layer) for layer in range(layers)]
        self._scales = scales
        self._share = heads // self._kv_heads
        self._overlaps = overlaps(pool.device)
        self._just_planned = False
        # Tokens that lie together: a block, or the power of two that divides it.
        together = self._block_size & -self._block_size
        if tile_elements is None:
            tile_elements = kernels.TILE_BYTES // pool.itemsize
        self._tile = max(tile_elements // self._head_dim, _LEAST_TILE)
        if together >= 16:  # the kernel's fast way has few units in a tile
            self._tile = min(self._tile, together * (4 if pool.itemsize == 1 else 2))
        self._tile, programs_per_core = self._fitting(limits, self._tile, pool.itemsize)
        self._unit = min(together, self._tile)
        self._fields = 2 + self._tile // self._unit
        if programs is None:
            programs = max(limits.cores * programs_per_core // self._kv_heads, 1)
        self._programs = programs
        pieces = self._programs * 2 * heads
        self._sums = torch.zeros(pieces * self._head_dim, device=pool.device)
        self._weights = torch.zeros(pieces * 2, device=pool.device)
        # By window and graphs, and the newest of each window. The largest bucket is
        # planned first: the others find room in its buffers.
        self._held: dict[tuple[int | None, int | StepLimits], _Buffers] = {}
        self._newest: dict[int | None, _Buffers] = {}

    def plan(self, batch: Batch, window: int | None) -> DecodePlan:
        """Lay out the batch's decodes for layers of one window; padding gets nothing to do.

        Raises:
            AttentionError: A padded batch has more tiles than the buffers of its graphs.
        """
        sequences = batch.bucket or (batch.limits.decodes if batch.limits else batch.num_decodes)
        lengths = batch.context_lens[: batch.num_decodes]
        tiles = sum(-(-length // self._tile) for length in lengths)
        buffers = self._room(batch, window, sequences, tiles)
        tables = batch.block_tables
        kernels.lay_out[(sequences,)](
            batch.positions,
            tables,
            tables.stride(0),
            batch.num_decodes,
            buffers.begins,
            buffers.records,
            window=window or 0,
            block_size=self._block_size,
            unit=self._unit,
            tile=self._tile,
            width=kernels.RECORDS_AT_ONCE,
            many=triton.next_power_of_2(sequences),
        )
        self._just_planned = True
        return DecodePlan(sequences, window, buffers)

    def forward(
        self,
        plan: DecodePlan,
        layer: int,
        query: torch.Tensor,
        scale: float,
        result: torch.Tensor,
    ) -> None:
        """Attend in one layer, whose keys and values are in the pool.

        Args:
            plan: this step's.
            layer: index of the layer in the pool.
            query: [sequences, heads, head_dim], heads adjacent.
            scale: factor on the scores.
            result: [sequences, heads, head_dim], contiguous.
        """
        if query.stride(1) != self._head_dim:
            query = query.contiguous()
        pool = self._pools[layer]
        key_scale, value_scale = self._scales.of(layer)
        block_stride, head_stride, side_stride, _, _ = pool.stride()
        # A kernel that begins before the last one's end reads the plan at once: not the first
        # after the plan, which nothing may stand between.
        dependent, self._just_planned = self._overlaps and not self._just_planned, False
        buffers, shared = plan.buffers, triton.next_power_of_2(self._share)
        kernels.attend[(self._programs * self._kv_heads,)](
            query,
            query.stride(0),
            result,
            pool,
            block_stride,
            head_stride,
            side_stride,
            plan.sequences,
            buffers.begins,
            buffers.records,
            self._programs,
            self._sums,
            self._weights,
            buffers.arrived,
            scale * key_scale * math.log2(math.e),
            value_scale,
            window=plan.window or 0,
            kv_heads=self._kv_heads,
            share=self._share,
            head_dim=self._head_dim,
            block_size=self._block_size,
            unit=self._unit,
            tile=self._tile,
            least_tiles=_LEAST_TILES,
            loads=kernels.LOADS,
            rows=max(shared, _LEAST_ROWS),
            merged_rows=shared,
            few_pieces=kernels.FEW_PIECES,
            many_at_once=max(kernels.ROWS_AT_ONCE // shared, 1),
            dependent=dependent,
            ahead=kernels.AHEAD,
            assembled=_COMPILED,
            num_warps=kernels.WARPS,
            launch_pdl=dependent,
        )

    def _fitting(self, limits: DeviceLimits, tile: int, itemsize: int) -> tuple[int, int]:
        """The tile, at most `tile`, and the programs of a multiprocessor that run together."""
        rows = max(triton.next_power_of_2(self._share), _LEAST_ROWS)
        while True:
            shared = kernels.shared_bytes(tile, self._head_dim, rows, itemsize)
            programs = limits.blocks_per_core(shared)
            if programs >= _PROGRAMS_PER_CORE or tile <= _LEAST_TILE:
                return tile, min(max(programs, 1), _PROGRAMS_PER_CORE)
            tile //= 2

    def _room(self, batch: Batch, window: int | None, sequences: int, tiles: int) -> _Buffers:
        """Buffers for so many tiles, the same for the graphs of a bucket or of limits each time."""
        graphs = batch.bucket or batch.limits
        held = self._held.get((window, graphs)) if graphs is not None else None
        if held is not None:
            if tiles > (most := self._most_tiles(held)):
                raise AttentionError(
                    f"a batch's decodes have {tiles} tiles of {self._tile} tokens, the first plan"
                    f" for its graphs ({graphs}) left room for {most}: make the block tables of a"
                    f" bucket, or the limits, as wide as the longest sequence"
                )
            return held
        if graphs is not None:
            width = batch.limits.width if batch.limits else batch.block_tables.shape[1]
            tiles = sequences * -(-width * self._block_size // self._tile)
        newest = self._newest.get(window)
        small = newest is None or self._most_tiles(newest) < tiles
        if newest is None or small or newest.begins.shape[0] <= sequences:
            newest = self._newest[window] = self._new_buffers(sequences * 3 // 2, tiles * 3 // 2)
        if graphs is not None:
            self._held[window, graphs] = newest
        return newest

    def _most_tiles(self, buffers: _Buffers) -> int:
        return buffers.records.shape[0] // self._fields - 1

    def _new_buffers(self, sequences: int, tiles: int) -> _Buffers:
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._sums.device)

        return _Buffers(
            begins=zeros(sequences + 1),
            records=zeros((tiles + 1) * self._fields),
            arrived=zeros(sequences * self._kv_heads),
        )


def no_fp8(limits: DeviceLimits) -> str:
    """Why a cache of fp8 is refused."""
    major, minor = limits.capability
    return (
        f"the KV cache is float8_e4m3fn, the GPU's compute capability is {major}.{minor}: fp8 needs"
        f" 8.9 or newer; use --kv-dtype auto"
    )
