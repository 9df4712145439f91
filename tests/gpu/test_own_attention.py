"""Attention without FlashInfer against the definition: our decode kernels, PyTorch's prompts.

CUDA graphs over it are tested in test_gpu_engine.py with TASUKI_EMULATE_NO_FLASHINFER=1.
"""

from __future__ import annotations

import pytest
import torch
from fp8 import needs_fp8
from support.attention_cases import Shape, definition, make_case

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.attention.own import OwnAttention

ERROR = 5e-3  # |got - want| / |want|; see test_attention.py
DECODES = [(n, 1) for n in (0, 15, 16, 17, 63, 100, 769, 1023, 2500)]
STEPS = {
    "decodes": DECODES,
    "whole prompts": [(0, 100), (0, 1024), (0, 2)],
    "mixed": [*DECODES, (0, 17), (512, 300), (1000, 129)],
}


def error(step: str, head_dim: int, window: int | None, kv_dtype: torch.dtype | None) -> float:
    blocks = sum(-(-(before + new) // 32) for before, new in STEPS[step]) + 8
    shape = Shape(8, head_dim, 32, blocks, dtype=torch.bfloat16, kv_dtype=kv_dtype, device="cuda")
    case = make_case(1, shape, STEPS[step])
    query, scale = case.query(32), head_dim**-0.5
    backend = OwnAttention(case.pool, 32, torch.bfloat16)
    backend.plan(case.batch)
    got = case.run(backend, 1, query, scale=scale, window=window)
    want = definition(case, query, scale, window)
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("step", STEPS)
def test_steps(step: str, head_dim: int, window: int | None) -> None:
    assert error(step, head_dim, window, None) < ERROR


@needs_fp8
def test_fp8_decodes() -> None:
    assert error("decodes", 128, None, torch.float8_e4m3fn) < ERROR
