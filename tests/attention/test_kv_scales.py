"""Caches in fp8 with scales: what is kept, and that chunks and prefixes do not matter."""

from __future__ import annotations

import math

import pytest
import torch
from support.attention_cases import STEPS, Shape, make_case

from tasuki.attention.kv_scales import FP8, KvScales, rounded, to_fp8
from tasuki.attention.sdpa import SdpaAttention

SCALES = KvScales(((-3, 2), (1, -4)))


def test_scales_hold_the_largest_number_and_are_no_larger_than_that_takes() -> None:
    largest = [(448.0, 449.0), (1e-3, 3e4), (0.0, math.nan)]
    scales = KvScales.holding(largest)
    assert scales.of(0) == (1.0, 2.0) and scales.of(2) == (1.0, 1.0)
    for key, value in (scales.of(1),):
        assert key * 448 >= 1e-3 > key * 224 and value * 448 >= 3e4 > value * 224
    assert KvScales.holding(largest, 2.0).of(0) == (2.0, 4.0)
    assert KvScales().of(7) == (1.0, 1.0)


def test_numbers_beyond_the_range_become_the_largest_and_nan_stays() -> None:
    x = torch.tensor([1e6, -1e6, 3.0, math.nan])
    kept = rounded(x, 2.0)
    assert kept[:3].tolist() == [896.0, -896.0, 3.0] and math.isnan(kept[3])
    assert to_fp8(x, 2.0).dtype == FP8


@pytest.mark.parametrize("step", STEPS)
def test_attention_sees_what_the_cache_keeps(step: str) -> None:
    """As over a cache of float32 that holds the rounded numbers."""
    case = make_case(1, Shape(2), STEPS[step])
    query, (key_scale, value_scale) = case.query(4), SCALES.of(1)
    keys, values = case.new(case.keys), case.new(case.values)
    pool = torch.zeros(case.pool.shape).to(FP8)
    layer = case.pool[:, :, 1].clone()
    pool[:, :, 1, 0] = to_fp8(layer[:, :, 0], key_scale)
    pool[:, :, 1, 1] = to_fp8(layer[:, :, 1], value_scale)
    backend = SdpaAttention(pool, torch.float32, SCALES)
    backend.plan(case.batch)
    got = backend.forward(1, query, keys, values, scale=0.3)
    case.pool[:, :, 1, 0] = rounded(layer[:, :, 0], key_scale)
    case.pool[:, :, 1, 1] = rounded(layer[:, :, 1], value_scale)
    exact = SdpaAttention(case.pool)
    exact.plan(case.batch)
    new = rounded(keys, key_scale), rounded(values, value_scale)
    torch.testing.assert_close(got, exact.forward(1, query, *new, scale=0.3))
    kept = pool[:, :, 1].float() * torch.tensor(SCALES.of(1))[:, None, None]
    assert torch.equal(kept, case.pool[:, :, 1])
