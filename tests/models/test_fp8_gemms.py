"""GEMMs by weights of fp8, as they are and with rounded rows, against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernels import DEVICE
from triton.runtime.errors import OutOfResources

from tasuki.models import fp8_linear, gemm_tiles
from tasuki.models.fp8_linear import Fp8Linear, Rounded, rounded
from tasuki.models.gemms import LIMIT_ROWS, MAX_ROWS, FewRows
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


@pytest.fixture(params=[1, 16], ids=["whole", "divided"])
def few(request: pytest.FixtureRequest) -> FewRows:
    """Divides columns into as many parts as make so many programs."""
    few = FewRows(EPS, DEVICE)
    few._programs = request.param
    return few


def linear(out: int, *, biased: bool = False, rows: int = 128, size: int = SIZE) -> Fp8Linear:
    """Values and scales at random: each block's scale shows in the result."""
    values = (4 * torch.randn(out, size)).to(FP8)
    scales = (0.5 + torch.rand(-(-out // rows), size // 128)) * size**-0.5 / 4
    weight = Fp8Weight(values, scales, rows, 128, HALF)
    return Fp8Linear(weight, torch.randn(out).to(HALF) if biased else None)


def exact(gemm: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
    weight = gemm.weight
    scales = weight.scales.repeat_interleave(weight.rows, 0)[: gemm.outs]
    result = x.float() @ (weight.values.float() * scales.repeat_interleave(128, 1)).t()
    return result if gemm.bias is None else result + gemm.bias.float()


def rounded_rows(rows: int, size: int = SIZE) -> Rounded:
    """Numbers that fp8 has, with scales at random."""
    values = torch.randn(rows, size).to(FP8)
    return Rounded(values, 0.5 + torch.rand(rows, size // 128), HALF)


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


@pytest.mark.parametrize(("rows", "height"), [(1, 128), (2, 128), (40, 32)])
def test_few_rows(few: FewRows, rows: int, height: int) -> None:
    """With a norm before, a gate or an addition behind; blocks of a weight cut smaller, too."""
    norm, x = torch.randn(SIZE).to(HALF), (3 * torch.randn(rows, SIZE)).to(HALF)
    gemm = linear(OUT + 16, biased=True, rows=height)
    assert few.takes(gemm, rows)
    normed = torch.rms_norm(x.float(), (SIZE,), norm.float(), EPS)
    check(few.normed(gemm, x, norm), exact(gemm, normed), 2)
    both = linear(2 * OUT, rows=height)
    check(few.gated(both, x, norm), gate(exact(both, normed)), 4)
    hidden = torch.randn(rows + 1, OUT + 16).to(HALF)
    want = hidden.float()
    want[:rows] += exact(gemm, x)
    few.add(gemm, x, hidden[:rows])
    check(hidden, want, 4)


@pytest.mark.parametrize("rows", [65, 96, LIMIT_ROWS])
def test_rounded_rows(few: FewRows, rows: int) -> None:
    x, gemm = rounded_rows(rows), linear(OUT + 16, biased=True)
    assert few.takes_rounded(gemm, rows) and not few.takes(gemm, rows)
    check(few.plain(gemm, x), exact(gemm, exact_rows(x)), 2)
    hidden = torch.randn(rows + 1, OUT + 16).to(HALF)
    want = hidden.float()
    want[:rows] += exact(gemm, exact_rows(x))
    few.add(gemm, x, hidden[:rows])
    check(hidden, want, 2)
    both = linear(2 * OUT)
    got, want = few.gated_rounded(both, x), gate(exact(both, exact_rows(x)))
    assert got.values.dtype == FP8
    expected = Rounded.empty(rows, OUT, got)
    expected.copy_(want)
    torch.testing.assert_close(got.scales, expected.scales, rtol=1e-3, atol=0)
    check_rounded(got, want)


@pytest.mark.parametrize("rows", [3, 150])
@pytest.mark.parametrize("biased", [False, True])
def test_many_rows(rows: int, biased: bool) -> None:
    x, gemm = rounded_rows(rows), linear(OUT + 16, biased=biased, rows=64)
    check(gemm(x), exact(gemm, exact_rows(x)), 2)


def test_no_rows() -> None:
    assert linear(OUT)(torch.zeros(0, SIZE, dtype=HALF)).shape == (0, OUT)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [512, 1152])
def test_rounding_rows(normed: bool, size: int) -> None:
    x = (3 * torch.randn(4, size + 16)).to(HALF)[:, :size]  # rows that lie apart
    x[1, :128] = 0.0
    norm = torch.randn(size).to(HALF)
    want = torch.rms_norm(x.float(), (size,), norm.float(), EPS) if normed else x.float()
    got = rounded(x, norm if normed else None, EPS)
    largest = want.unflatten(1, (-1, 128)).abs().amax(2)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    torch.testing.assert_close(got.scales, scales, rtol=1e-3, atol=0)
    check_rounded(got, want)


def test_rounded_rows_by_pytorch_are_the_same() -> None:
    x = torch.randn(3, SIZE)
    mine = Rounded.empty(3, SIZE, x)
    mine.copy_(x)
    torch.testing.assert_close(mine.dense(), x, rtol=2**-4, atol=1e-4)
    kernels = rounded(x)
    torch.testing.assert_close(mine.scales, kernels.scales, rtol=1e-3, atol=0)
    check_rounded(kernels, x)


@pytest.mark.parametrize("rows", [1, 17, 96])
def test_a_kernel_that_does_not_fit_is_done_without(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few, gemm, both = FewRows(EPS, DEVICE), linear(SIZE), linear(2 * OUT)
    x = torch.randn(rows, SIZE).to(HALF) if rows <= MAX_ROWS else rounded_rows(rows)
    dense = x.float() if isinstance(x, torch.Tensor) else exact_rows(x)

    def refuse(*args: Any, **more: Any) -> None:
        raise OutOfResources(102_400, 101_376, "shared memory")

    monkeypatch.setattr(few, "_launch", refuse)
    hidden = torch.zeros(rows, SIZE, dtype=HALF)
    few.add(gemm, x, hidden)
    check(hidden, exact(gemm, dense), 2)
    if isinstance(x, Rounded):
        got = few.gated_rounded(both, x).dense()
        torch.testing.assert_close(got.float(), gate(exact(both, dense)), rtol=0.1, atol=0.02)
    assert not few.takes(gemm, rows) and not few.takes_rounded(gemm, rows)
    monkeypatch.setattr(fp8_linear, "_refused", set())
    monkeypatch.setattr(Fp8Linear, "_launch", refuse)
    for _ in range(2):
        check(gemm(x), exact(gemm, dense), 2)
    assert len(caplog.messages) == 2


def test_parts_of_columns_are_whole_steps_and_none_is_empty() -> None:
    device = gemm_tiles.Device(232_448, 132)
    shapes = [(6144, 2560, False), (2560, 4096, False), (9728, 2560, True), (2560, 9728, False)]
    for out, size, gated in shapes:
        for rounded_x in (False, True):
            shape = gemm_tiles.Shape(96 if rounded_x else 32, size, out, gated)
            tiles = gemm_tiles.tiles_of_fp8(shape, device, rounded=rounded_x)
            steps, programs = size // tiles.columns, -(-out // tiles.outs) * tiles.split
            each = -(-steps // tiles.split)
            assert each * (tiles.split - 1) < steps and tiles.stages >= 3
            assert tiles.split == 1 or programs <= 2 * device.programs
