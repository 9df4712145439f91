"""The pool's shape, its bytes, and what is told to peers."""

import pytest
import torch

from tasuki.kv.layout import CacheLayout, LayoutError

LAYOUT = CacheLayout(
    num_blocks=5, kv_heads=3, layers=2, block_size=4, head_dim=8, dtype=torch.bfloat16
)


def test_a_block_is_one_contiguous_run_of_block_bytes() -> None:
    pool = LAYOUT.allocate()
    assert tuple(pool.shape) == (5, 3, 2, 2, 4, 8)
    assert pool[1].is_contiguous()
    assert pool[1].data_ptr() - pool.data_ptr() == LAYOUT.block_bytes
    assert LAYOUT.pool_bytes == pool.numel() * 2 == 5 * LAYOUT.block_bytes


def test_a_pool_starts_zeroed_at_a_memory_page() -> None:
    pool = LAYOUT.allocate()
    assert not pool.any()
    assert pool.data_ptr() % 4096 == 0


def test_a_heads_slice_of_a_block_is_contiguous() -> None:
    assert LAYOUT.allocate()[2, 1:3].is_contiguous()


def test_the_wire_tells_where_the_blocks_are() -> None:
    pool = LAYOUT.allocate()
    wire = LAYOUT.to_wire(pool, transport="nixl/UCX")
    assert (wire.block_size, wire.transport) == (4, "nixl/UCX")
    [group] = wire.groups
    assert (group.kind, group.memory, group.device) == ("full", "DRAM", 0)
    assert group.base_address == pool.data_ptr()
    assert (group.block_bytes, group.num_blocks) == (LAYOUT.block_bytes, 5)
    assert list(group.layers) == [0, 1]
    assert (group.first_kv_head, group.kv_heads) == (0, 3)


def test_a_pool_of_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="layout says"):
        LAYOUT.to_wire(LAYOUT.allocate()[:4], transport="nixl/UCX")
    with pytest.raises(LayoutError, match="strides"):
        shifted = torch.zeros(5, 3, 2, 2, 8, 4, dtype=torch.bfloat16).transpose(4, 5)
        LAYOUT.to_wire(shifted, transport="nixl/UCX")


def test_sizes_are_positive() -> None:
    with pytest.raises(LayoutError, match="first_kv_head is -1"):
        CacheLayout(1, 1, 1, 1, 1, torch.float32, first_kv_head=-1)
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        CacheLayout(0, 1, 1, 1, 1, torch.float32)
