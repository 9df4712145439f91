"""The GPU's digests are those of the CPU; here by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernels import DEVICE

from tasuki.kv.digester import Digester


@pytest.mark.parametrize(
    ("dtype", "tokens", "dim"),
    [(torch.bfloat16, 8, 6), (torch.float32, 2, 4), (torch.bfloat16, 4, 3)],
    ids=str,
)
def test_the_kernel_computes_the_same(dtype: torch.dtype, tokens: int, dim: int) -> None:
    shape = (5, 3, 2, 2, 8, dim)
    raw = np.random.default_rng(7).integers(0, 256, int(np.prod(shape)) * dtype.itemsize)
    pool = torch.from_numpy(raw.astype(np.uint8)).view(dtype).view(shape)
    units = [3, 0, 4]
    expected = Digester(pool).start(units, tokens, 1, 2)()
    job = Digester(pool.to(DEVICE), interpret=True).start(units, tokens, 1, 2)
    while (found := job()) is None:
        pass
    assert expected is not None
    assert found.tolist() == expected.tolist()
