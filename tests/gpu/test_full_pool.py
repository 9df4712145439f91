"""Attention over blocks that lie all over a pool as large as this GPU holds.

A file of its own: it runs when no other tests use the GPU.
"""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import Shape, definition, make_case, spread

pytest.importorskip("flashinfer", reason="FlashInfer is not installed (optional: tasuki[gpu])")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.attention.flashinfer import FlashInferAttention

HEADS, LAYERS, LAYER = 32, 36, 35
SHAPE = Shape(8, 128, block_size=32, num_blocks=120, dtype=torch.bfloat16, device="cuda")
BLOCK_BYTES = SHAPE.kv_heads * LAYERS * 2 * SHAPE.block_size * SHAPE.head_dim * 2
MOST_BYTES, LEFT_BYTES = 110_000_000_000, 6 << 30
BFLOAT16_ERROR = 5e-3  # relative, as in test_attention.py
STEPS = {
    "decodes": [(700, 1), (90, 1), (1500, 1), (0, 1)],
    "whole prompts": [(0, 300), (0, 40)],
    "later chunks": [(200, 64), (1000, 129)],
    "mixed": [(700, 1), (90, 1), (0, 300), (200, 64)],
}


@pytest.mark.gpu
def test_every_kind_of_step(capsys: pytest.CaptureFixture[str]) -> None:
    free = torch.cuda.mem_get_info()[0]
    num_blocks = min(MOST_BYTES, free - LEFT_BYTES) // BLOCK_BYTES
    pool_bytes = num_blocks * BLOCK_BYTES
    if pool_bytes <= 2**33:
        pytest.skip(f"{free / 1e9:.0f} GB are free: such a pool has not 2^32 elements")
    size = (num_blocks, SHAPE.kv_heads, LAYERS, 2, SHAPE.block_size, SHAPE.head_dim)
    pool = torch.zeros(size, dtype=SHAPE.dtype, device="cuda")
    backend = FlashInferAttention(pool, HEADS, SHAPE.dtype)
    scale = SHAPE.head_dim**-0.5
    errors = {}
    for name, step in STEPS.items():
        case = make_case(1, SHAPE, step)
        spread(case, pool, layer=1, into=LAYER)
        query = case.query(HEADS)
        backend.plan(case.batch)
        got = case.run(backend, LAYER, query, scale=scale)
        want = definition(case, query, scale, None)
        errors[name] = float((got.double() - want).norm() / want.norm())
    del pool, backend, case
    torch.cuda.empty_cache()  # servers of later tests measure what is free
    worst = max(errors.values())
    with capsys.disabled():
        print(f"a pool of {pool_bytes / 1e9:.0f} GB, error of at most {worst:.1e} ", end="")
    assert worst < BFLOAT16_ERROR, errors
