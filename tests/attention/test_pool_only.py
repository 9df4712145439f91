"""The backend of models that attend themselves."""

from __future__ import annotations

import pytest
import torch

from tasuki.attention.errors import AttentionError
from tasuki.attention.pool_only import PoolOnly


def test_it_brings_the_pool_and_refuses_to_attend() -> None:
    pool = torch.zeros(2, 1, 3, 2, 4, 8)
    backend = PoolOnly(pool)
    assert backend.pool is pool
    rows = torch.zeros(1, 1, 8)
    with pytest.raises(AttentionError, match=r"layer 2 .* kernels of its own"):
        backend.forward(2, rows, rows, rows, scale=1.0)
