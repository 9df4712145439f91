"""The cache-writing kernels against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.kernels import DEVICE

from tasuki.attention.parts import flatten
from tasuki.attention.write import rotate_and_write, write

HEADS, KV_HEADS, LAYERS, BLOCK_SIZE = 6, 2, 3, 4
SLOTS = [27, -1, 3, 9, 0]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with DEVICE:
        yield


def make_pool(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(7, KV_HEADS, LAYERS, 2, BLOCK_SIZE, head_dim).to(dtype)


def slot_of(pool: torch.Tensor, layer: int, slot: int) -> torch.Tensor:
    """[2, kv_heads, head_dim] float32: what the slot holds."""
    block, offset = divmod(slot, BLOCK_SIZE)
    return pool[block, :, layer, :, offset].transpose(0, 1).float()


def assert_nothing_else_written(pool: torch.Tensor, layer: int) -> None:
    clean = pool.float().clone()
    for slot in SLOTS:
        if slot >= 0:
            clean[slot // BLOCK_SIZE, :, layer, :, slot % BLOCK_SIZE] = 0
    assert not clean.any()


@pytest.mark.parametrize("head_dim", [12, 16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotates_and_writes(head_dim: int, with_norm: bool, dtype: torch.dtype) -> None:
    pool = make_pool(head_dim, dtype)
    before = torch.randn(5, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    table = torch.randn(20, 2, head_dim // 2)
    positions = torch.tensor([0, 3, 19, 4, 7])
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype))
    qkv = before.clone()
    rotate_and_write(
        qkv, table, positions, norms if with_norm else None, 1e-5, torch.tensor(SLOTS), pool, 1
    )

    turned = before[:, : HEADS + KV_HEADS].float()
    if with_norm:
        weights = torch.stack([norms[0]] * HEADS + [norms[1]] * KV_HEADS).float()
        turned = torch.rms_norm(turned, (head_dim,), eps=1e-5) * weights
    low, high = turned.chunk(2, -1)
    cos, sin = table[positions][:, :, None].unbind(1)
    want = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    rounding = 1e-5 if dtype is torch.float32 else 0.01
    got = qkv[:, : HEADS + KV_HEADS].float()
    torch.testing.assert_close(got, want, atol=rounding, rtol=rounding)
    assert torch.equal(qkv[:, HEADS + KV_HEADS :], before[:, HEADS + KV_HEADS :])
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            cached = torch.stack(qkv[row, HEADS:].float().chunk(2))
            assert torch.equal(slot_of(pool, 1, slot), cached)
    assert_nothing_else_written(pool, 1)


def test_fp8_values_are_kept_and_the_largest_stay_finite() -> None:
    """Values that fp8 has exactly: the interpreter does not round as the device does."""
    head_dim = 16
    pool = make_pool(head_dim, torch.float8_e4m3fn)
    exact = torch.randn(5, HEADS + 2 * KV_HEADS, head_dim).to(torch.float8_e4m3fn)
    qkv = exact.to(torch.bfloat16)
    qkv[2, -1, 0] = 1e4
    table = torch.stack((torch.ones(1, 8), torch.zeros(1, 8)), 1)  # no rotation
    positions = torch.zeros(5, dtype=torch.int64)
    rotate_and_write(qkv, table, positions, None, 1e-6, torch.tensor(SLOTS), pool, 2)
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            cached = torch.stack(qkv[row, HEADS:].float().clamp(max=448).chunk(2))
            assert torch.equal(slot_of(pool, 2, slot), cached)
    assert_nothing_else_written(pool, 2)


@pytest.mark.parametrize("head_dim", [12, 16])
def test_writes_strided_keys_and_values(head_dim: int) -> None:
    pool = make_pool(head_dim, torch.float32)
    # As the transformers fallback hands them over: heads outermost.
    key, value = torch.randn(2, KV_HEADS, 5, head_dim).transpose(1, 2)
    write(key, value, torch.tensor(SLOTS), pool, 0)
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            assert torch.equal(slot_of(pool, 0, slot), torch.stack((key[row], value[row])))
    assert_nothing_else_written(pool, 0)


def test_tables_are_laid_end_to_end() -> None:
    counts = [3, 1, 300, 0, 256]
    wide = torch.arange(5 * 400, dtype=torch.int32).view(5, 400)
    begins = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    flat = torch.full((600,), -7, dtype=torch.int32)
    flatten(wide[:, :310], begins, max(counts), flat)
    want = torch.cat([row[:count] for row, count in zip(wide, counts, strict=True)])
    assert torch.equal(flat[: sum(counts)], want)
    assert (flat[sum(counts) :] == -7).all()
