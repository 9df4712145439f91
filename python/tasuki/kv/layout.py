"""Where every byte of the KV cache lies: the shape of a pool and its place on the wire.

One pool per rank, which all cache groups share; a block is one contiguous run of bytes:

    pool    | block 0 | block 1 | block 2 | ...              num_blocks x block_bytes
            |         |
    block   | head 0            | head 1            | ...    kv_heads x head_bytes
            |                   |
    head    | layer 0     | layer 1     | ...                layers x planes x plane_bytes
            |             |
    layer   | K     | V     |                                planes x plane_bytes
            |       |
    plane   | slot 0 | slot 1 | ...                          block_size x head_dim elements

So a transfer needs one descriptor per block, or per run of adjacent blocks.
Heads are outermost inside a block: those that a rank of another tensor-parallel
degree needs are one contiguous slice (`transfer_plan.py`). Attention kernels see layer `l`, K or V
`i`, as the strided view `pool[:, :, l, i]`, that is
[num_blocks, kv_heads, block_size, head_dim]. Latent attention (MLA) has one plane, of latents.
A block of a group that keeps states has these from its first byte on (attention/states.py).

Source: ARCHITECTURE.md, "The KV cache". This file owns no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tasuki.engine.cache_groups import CacheGroup
from tasuki.errors import TasukiError
from tasuki.v1 import kv_pb2

_ALIGNMENT_BYTES = 4096


class LayoutError(TasukiError):
    """A cache layout that cannot be."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The pool of one rank.

    Attributes:
        num_blocks: blocks in the pool, at least 1.
        kv_heads: KV heads on this rank, at least 1.
        layers: layers in a block, at least 1.
        block_size: token slots in a block, at least 1.
        head_dim: elements of one head's K or V for one token.
        dtype: of the elements.
        planes: of a layer in a block: 2, K and V, or 1 that is both.
        first_kv_head: of the model, the first that this rank holds.
        groups: whose blocks they are; empty: of one group, which keeps every layer and token.
    """

    num_blocks: int
    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    first_kv_head: int = 0
    planes: int = 2
    groups: tuple[CacheGroup, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (CacheGroup(tuple(range(self.layers))),))
        for name in ("num_blocks", "kv_heads", "layers", "planes", "block_size", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise LayoutError(f"cache layout: {name} is {value}, must be at least 1")
        for group in self.groups:
            if len(group.layers) * group.state_bytes > self.block_bytes:
                raise LayoutError(
                    f"cache layout: the states of {len(group.layers)} layers, {group.state_bytes}"
                    f" bytes each, do not fit into a block of {self.block_bytes} bytes: raise"
                    " --block-size, or leave it out"
                )
        if self.first_kv_head < 0:
            raise LayoutError(
                f"cache layout: first_kv_head is {self.first_kv_head}, must be at least 0"
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[num_blocks, kv_heads, layers, planes, block_size, head_dim]."""
        return (
            self.num_blocks,
            self.kv_heads,
            self.layers,
            self.planes,
            self.block_size,
            self.head_dim,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all heads, layers and planes."""
        elements = self.kv_heads * self.layers * self.planes * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_bytes

    def allocate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Allocate the pool, zeroed: a slot never written reads as 0, not as NaN.

        It starts at a memory page, as registration likes it. On the CPU the system
        provides (and clears) a page of it when the page is first used, not at the start.

        Returns:
            Contiguous tensor of `shape` and `dtype` on `device`.
        """
        size = self.pool_bytes + _ALIGNMENT_BYTES
        if torch.device(device).type == "cpu":
            raw = torch.from_numpy(np.zeros(size, dtype=np.uint8))
        else:
            raw = torch.zeros(size, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % _ALIGNMENT_BYTES
        return raw[start : start + self.pool_bytes].view(self.dtype).view(self.shape)

    def to_wire(self, pool: torch.Tensor, *, transport: str) -> kv_pb2.Layout:
        """Describe `pool`, allocated with this layout, to a peer.

        Raises:
            LayoutError: `pool` is not of this layout or not contiguous.
        """
        if tuple(pool.shape) != self.shape or pool.dtype != self.dtype:
            raise LayoutError(
                f"pool is {tuple(pool.shape)} {pool.dtype}, layout says {self.shape} {self.dtype}"
            )
        if not pool.is_contiguous():
            raise LayoutError(f"pool has strides {pool.stride()}, must be contiguous")
        on_cpu = pool.device.type == "cpu"
        place = kv_pb2.Pool(
            base_address=pool.data_ptr(),
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            device=0 if on_cpu else (pool.device.index or 0),
            memory="DRAM" if on_cpu else "VRAM",
            first_kv_head=self.first_kv_head,
            kv_heads=self.kv_heads,
        )
        groups = [
            kv_pb2.Group(
                kind=group.kind,
                layers=group.layers,
                window=group.window or 0,
                state_bytes=group.state_bytes,
            )
            for group in self.groups
        ]
        return kv_pb2.Layout(
            block_size=self.block_size, transport=transport, groups=groups, pool=place
        )
