"""The pool's shape, its bytes, and what is told to peers."""

from dataclasses import replace

import pytest
import torch

from tasuki.engine.cache_groups import CacheGroup
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
    [group], place = wire.groups, wire.pool
    assert (group.kind, list(group.layers), group.window) == ("full", [0, 1], 0)
    assert (place.memory, place.device, place.base_address) == ("DRAM", 0, pool.data_ptr())
    assert (place.block_bytes, place.num_blocks) == (LAYOUT.block_bytes, 5)
    assert (place.first_kv_head, place.kv_heads) == (0, 3)


def test_the_wire_tells_what_the_layers_keep() -> None:
    groups = (CacheGroup((0, 3)), CacheGroup((1, 2), window=128))
    layout = replace(LAYOUT, groups=groups)
    told = layout.to_wire(layout.allocate(), transport="nixl/UCX").groups
    assert [(group.kind, list(group.layers), group.window) for group in told] == [
        ("full", [0, 3], 0),
        ("window", [1, 2], 128),
    ]


def test_a_pool_of_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="layout says"):
        LAYOUT.to_wire(LAYOUT.allocate()[:4], transport="nixl/UCX")
    with pytest.raises(LayoutError, match="strides"):
        shifted = torch.zeros(5, 3, 2, 2, 8, 4, dtype=torch.bfloat16).transpose(4, 5)
        LAYOUT.to_wire(shifted, transport="nixl/UCX")


def test_sizes_are_positive_and_states_fit_into_a_block() -> None:
    with pytest.raises(LayoutError, match="first_kv_head is -1"):
        CacheLayout(1, 1, 1, 1, 1, torch.float32, first_kv_head=-1)
    states = (CacheGroup((0,)), CacheGroup((1, 2), state_bytes=LAYOUT.block_bytes // 2))
    replace(LAYOUT, groups=states)
    with pytest.raises(LayoutError, match="the states of 3 layers"):
        replace(LAYOUT, groups=(states[0], replace(states[1], layers=(1, 2, 3))))
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        CacheLayout(0, 1, 1, 1, 1, torch.float32)
