"""Handoffs timed between two real processes, by the real transport."""

from __future__ import annotations

import pytest
import torch

from tasuki.bench.steps import DecodePoint, TransferPoint
from tasuki.bench.transfer_timer import TransferTimer
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import create_transport

pytestmark = pytest.mark.system

LAYOUT = CacheLayout(
    num_blocks=64, kv_heads=1, layers=2, block_size=16, head_dim=64, dtype=torch.float32
)


def test_scattered_blocks_are_read_from_another_process_and_timed() -> None:
    pool = LAYOUT.allocate()
    transport = create_transport("nixl")
    transport.register(pool, LAYOUT)
    timer = TransferTimer(transport, LAYOUT, 30, "cpu", seed=1)
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
