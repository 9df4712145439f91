"""Attention without FlashInfer: our decode kernels and PyTorch's operators, interpreted here."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import STEPS, Shape, definition, make_case
from support.kernels import DEVICE

from tasuki.attention.errors import AttentionError
from tasuki.attention.own import OwnAttention

HEADS, SCALE = 6, 0.3
FP8 = torch.float8_e4m3fn
# float16: the interpreter's GEMMs know no bfloat16.
SHAPE = Shape(2, head_dim=32, dtype=torch.float16, device=DEVICE)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_step(step: str, window: int | None) -> None:
    case = make_case(1, SHAPE, STEPS[step])
    query = case.query(HEADS)
    backend = OwnAttention(case.pool, HEADS, torch.float16)
    for _ in range(2):  # the second time the window is known before
        backend.plan(case.batch)
        got = case.run(backend, 1, query, scale=SCALE, window=window)
    want = definition(case, query, SCALE, window)
    torch.testing.assert_close(got.double(), want, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("step", ["uneven decodes", "later chunk", "all mixed"])
def test_fp8_cache(step: str) -> None:
    shape = Shape(2, head_dim=32, dtype=torch.float16, kv_dtype=FP8, device=DEVICE)
    case = make_case(1, shape, STEPS[step])
    # What fp8 has exactly: the interpreter does not round as the device does.
    for sequences in (case.keys, case.values):
        sequences[:] = [s.to(FP8).to(torch.float16) for s in sequences]
    query = case.query(HEADS)
    backend = OwnAttention(case.pool, HEADS, torch.float16)
    backend.plan(case.batch)
    got = case.run(backend, 1, query, scale=SCALE)
    want = definition(case, query, SCALE, None)
    torch.testing.assert_close(got.double(), want, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (Shape(2, head_dim=64, dtype=torch.float32), torch.float32, "bfloat16 or float16"),
        (Shape(2, head_dim=96, dtype=torch.bfloat16), torch.bfloat16, "head_dim is 96"),
        (Shape(4, head_dim=64, dtype=torch.bfloat16), torch.bfloat16, "6 query heads over 4"),
        (Shape(2, head_dim=64, dtype=torch.float16), torch.bfloat16, "KV cache is torch.float16"),
    ],
)
def test_refuses_what_there_are_no_kernels_for(
    shape: Shape, dtype: torch.dtype, reason: str
) -> None:
    pool = make_case(0, shape, [(0, 1)]).pool
    with pytest.raises(AttentionError, match=reason):
        OwnAttention(pool, HEADS, dtype)
