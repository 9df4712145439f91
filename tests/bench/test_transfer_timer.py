"""Handoffs timed between two real processes, by the real transport."""

from __future__ import annotations

import pytest
import torch

from tasuki.bench.steps import DecodePoint, TransferPoint
from tasuki.bench.transfer_timer import TransferTimer, source_layout
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import create_transport

pytestmark = pytest.mark.system

LAYOUT = CacheLayout(
    num_blocks=64, kv_heads=1, layers=2, block_size=16, head_dim=64, dtype=torch.float32
)


def started(most_blocks: int) -> tuple[torch.Tensor, TransferTimer]:
    """A pool, and what times handoffs of at most so many blocks to it."""
    pool = LAYOUT.allocate()
    transport = create_transport("nixl")
    transport.register(pool, LAYOUT)
    return pool, TransferTimer(transport, LAYOUT, most_blocks, "cpu", seed=1)


def test_scattered_blocks_are_read_from_another_process_and_timed() -> None:
    pool, timer = started(most_blocks=30)
    try:
        assert timer.fits(TransferPoint(30))
        assert not timer.fits(TransferPoint(31))
        assert not timer.fits(DecodePoint(1, 1))
        assert timer.measure(TransferPoint(10)) > 0.0
        filled = (pool == 1.0).flatten(1).all(1)
        assert int(filled.sum()) == 10
        pool.zero_()
        assert timer.measure(TransferPoint(30)) > 0.0
        assert int((pool == 1.0).flatten(1).all(1).sum()) == 30
    finally:
        timer.close()
    assert not timer._process.is_alive()


def test_a_handoff_may_have_as_many_blocks_as_the_pool() -> None:
    pool, timer = started(most_blocks=100)
    try:
        assert timer.fits(TransferPoint(64))
        assert not timer.fits(TransferPoint(65))
        assert timer.measure(TransferPoint(64)) > 0.0
        assert bool((pool == 1.0).all())
    finally:
        timer.close()


def test_the_pool_that_is_read_leaves_a_shared_gpu_its_memory() -> None:
    assert source_layout(LAYOUT, 10).num_blocks == 20
    assert source_layout(LAYOUT, 40).num_blocks == LAYOUT.num_blocks
