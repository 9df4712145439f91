"""GEMMs by weights of fp8, of one row and of rounded rows, against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernels import DEVICE
from triton.runtime.errors import OutOfResources

from tasuki.models import fp8_linear
from tasuki.models.fp8_linear import (
    FEW_ROWS,
    Fp8Linear,
    Rounded,
    add_norm_rounded,
    gated_rounded,
    norm_rounded,
    rounded,
)
from tasuki.models.weights import FP8, Fp8Weight

pytestmark = pytest.mark.interpreter

SIZE, OUT = 512, 128
EPS = 1e-5
HALF = torch.float16  # the interpreter's GEMM knows no bfloat16
TOLERANCE = 2**-8


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with DEVICE:
        yield


def linear(
    out: int, *, biased: bool = False, rows: int = 128, size: int = SIZE, programs: int = 1
) -> Fp8Linear:
    """Values and scales at random: each block's scale shows in the result."""
    values = (4 * torch.randn(out, size)).to(FP8)
    scales = (0.5 + torch.rand(-(-out // rows), size // 128)) * size**-0.5 / 4
    weight = Fp8Weight(values, scales, rows, 128, HALF)
    gemm = Fp8Linear(weight, torch.randn(out).to(HALF) if biased else None)
    gemm._device = replace(gemm._device, programs=programs)
    return gemm


def exact(gemm: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
    weight = gemm.weight
    scales = weight.scales.repeat_interleave(weight.rows, 0)[: gemm.outs]
    result = x.float() @ (weight.values.float() * scales.repeat_interleave(128, 1)).t()
    return result if gemm.bias is None else result + gemm.bias.float()


def rounded_rows(rows: int, size: int = SIZE) -> Rounded:
    """Numbers that fp8 has, with scales at random."""
    values = torch.randn(rows, size).to(FP8)
    return Rounded(values, (0.5 + torch.rand(size // 128, rows)).t(), rows, HALF)


def row_of_seven_bits(size: int = SIZE) -> torch.Tensor:
    """More than fp8 has, but nothing that rounds up, which the interpreter does wrongly."""
    numbers = torch.randint(8, 16, (1, size)) * 16 + torch.randint(0, 8, (1, size))
    numbers[:, ::128] = 224  # of a block the largest, times a power of two 448
    numbers = torch.where(torch.rand(1, size) < 0.5, -numbers, numbers)
    numbers = torch.minimum(numbers, torch.tensor(224))
    return (numbers.clamp(min=-224) * 2.0 ** torch.randint(-9, -5, (1, 1))).to(HALF)


def exact_rows(x: Rounded) -> torch.Tensor:
    return x.values.float() * x.scales.repeat_interleave(128, 1)


def gate(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return F.silu(first) * second


def check(got: torch.Tensor, want: torch.Tensor, times: float = 1.0) -> None:
    assert got.dtype == HALF
    tolerance = times * TOLERANCE
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


def check_rounded(got: Rounded, want: torch.Tensor) -> None:
    """To half a step of fp8, but where the interpreter rounds up and forgets the carry."""
    error = (exact_rows(got) - want).abs()
    least = got.scales.repeat_interleave(128, 1) * 2**-8
    assert bool((error <= want.abs() * 0.51 + least).all())
    assert float((error > want.abs() * 2**-3 + least).float().mean()) < 0.06


@pytest.mark.parametrize("height", [128, 32, 1])
@pytest.mark.parametrize("programs", [1, 12])
def test_one_row(height: int, programs: int) -> None:
    """Divided into pieces of fp8, it is not rounded."""
    gemm = linear(OUT + 16, biased=height > 1, rows=height, programs=programs)
    x = row_of_seven_bits()
    divided = rounded(x)
    assert torch.equal(divided.dense(), x) and not torch.equal(exact_rows(divided)[:1], x.float())
    check(gemm(divided), exact(gemm, x), 2)
    check(gemm(x), exact(gemm, x), 2)


@pytest.mark.parametrize("rows", [3, FEW_ROWS, FEW_ROWS + 1, 150])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("programs", [1, 8])
def test_rows(rows: int, biased: bool, programs: int) -> None:
    x, gemm = rounded_rows(rows), linear(OUT + 16, biased=biased, rows=64, programs=programs)
    for _ in range(2):  # counters are as they were
        check(gemm(x), exact(gemm, exact_rows(x)), 2)


def test_no_rows() -> None:
    assert linear(OUT)(torch.zeros(0, SIZE, dtype=HALF)).shape == (0, OUT)


@pytest.mark.parametrize("kind", ["plain", "normed", "added", "gated"])
@pytest.mark.parametrize("size", [512, 1152])
def test_rounding_rows(kind: str, size: int) -> None:
    x = (3 * torch.randn(4, 2 * size + 16)).to(HALF)[:, : size * (1 + (kind == "gated"))]
    x[1, :128] = 0.0  # rows that lie apart, and a block of nothing
    norm, hidden = torch.randn(size).to(HALF), torch.randn(4, size).to(HALF)
    if kind == "plain":
        got, want = rounded(x), x.float()
    elif kind == "gated":
        got, want = gated_rounded(x), gate(x.float())
    else:
        total = (hidden + x) if kind == "added" else x
        want = torch.rms_norm(total.float(), (size,), norm.float(), EPS)
        if kind == "added":
            got = add_norm_rounded(hidden, x, norm, EPS)
            torch.testing.assert_close(hidden, total)
        else:
            got = norm_rounded(x, norm, EPS)
    largest = want.unflatten(1, (-1, 128)).abs().amax(2)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    torch.testing.assert_close(got.scales, scales, rtol=2e-3, atol=0)
    assert got.all_scales.stride() == (1, 16) and got.all_values.shape == (16, size)
    check_rounded(got, want)


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 150])
def test_a_kernel_that_does_not_fit_is_done_without(
    rows: int, by_library: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gemm = linear(SIZE)
    multiplied: list[int] = []

    def block_scaled(x: Rounded, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """As cuBLAS: of all rows, padding too."""
        multiplied.append(x.rows)
        all_rows = x.all_values.float() * x.all_scales.repeat_interleave(128, 1)
        weight = values.float() * scales.repeat_interleave(128, 1)
        return (all_rows @ weight.t()).to(x.dtype)

    if by_library:
        gemm._by_library = True
        monkeypatch.setattr(fp8_linear, "block_scaled", block_scaled)
        monkeypatch.setattr(fp8_linear, "_SQUARE_ROWS", 1000)
    x = row_of_seven_bits() if rows == 1 else rounded_rows(rows)
    dense = x.float() if isinstance(x, torch.Tensor) else exact_rows(x)

    def refuse(*args: Any, **more: Any) -> None:
        raise OutOfResources(102_400, 101_376, "shared memory")

    monkeypatch.setattr(fp8_linear, "_refused", set())
    monkeypatch.setattr(Fp8Linear, "_launch_few", refuse)
    monkeypatch.setattr(Fp8Linear, "_launch_many", refuse)
    for _ in range(2):
        check(gemm(x), exact(gemm, dense), 2)
    assert len(caplog.messages) == (0 if by_library and rows > FEW_ROWS else 1)
    assert multiplied == ([rows] * 2 if by_library else [])
