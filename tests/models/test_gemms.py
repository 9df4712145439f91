"""GEMMs of few rows with what surrounds them, against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernels import DEVICE
from triton.runtime.errors import OutOfResources

from tasuki.models import gemm_tiles, gemms
from tasuki.models.gemm_tiles import Device, Shape, parts_of, row_groups, tiles_of
from tasuki.models.gemms import MAX_ROWS, MIN_ROWS_WEIGHTED, FewRows
from tasuki.models.layers import PlainLinear

SIZE, OUT = 1024, 144
EPS = 1e-5
ROWS = [1, 2, 17, 40]  # one row; then each way to group them but 64
# float16: the interpreter's GEMM knows no bfloat16.
HALF = torch.float16
TOLERANCE = 2**-8  # of which the result's rounding, which the interpreter cuts, is a half


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with DEVICE:
        yield


@pytest.fixture(params=["whole", "divided", "in blocks"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FewRows:
    """Divides columns into as many parts as leave so many programs; copies blocks, or not."""
    few = FewRows(EPS, DEVICE)
    few._programs = 1 if request.param == "whole" else 16
    few._has_tma = request.param == "in blocks"
    monkeypatch.setattr(gemm_tiles, "IN_BLOCKS_FROM", 2)
    return few


def linear(out: int, dtype: torch.dtype = HALF, *, biased: bool = False) -> PlainLinear:
    weight = torch.randn(out, SIZE) * SIZE**-0.5
    return PlainLinear(weight.to(dtype), torch.randn(out).to(dtype) if biased else None)


def exact(gemm: PlainLinear, x: torch.Tensor) -> torch.Tensor:
    result = x.float() @ gemm.weight.float().t()
    return result if gemm.bias is None else result + gemm.bias.float()


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.rms_norm(x.float(), (SIZE,), weight.float(), EPS)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == HALF
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_plain(few: FewRows, rows: int, biased: bool) -> None:
    gemm, x = linear(OUT, biased=biased), torch.randn(rows, SIZE).to(HALF)
    check(few.plain(gemm, x), exact(gemm, x))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_normed(few: FewRows, rows: int, biased: bool) -> None:
    gemm, norm = linear(OUT, biased=biased), torch.randn(SIZE).to(HALF)
    x = (3 * torch.randn(rows, SIZE + 16)).to(HALF)[:, :SIZE]  # rows that lie apart
    check(few.normed(gemm, x, norm), exact(gemm, norm_of(x, norm)))


@pytest.mark.parametrize("rows", ROWS)
def test_gated(few: FewRows, rows: int) -> None:
    gemm, norm = linear(2 * OUT), torch.randn(SIZE).to(HALF)
    x = (3 * torch.randn(rows, SIZE)).to(HALF)
    gate, up = exact(gemm, norm_of(x, norm)).chunk(2, -1)
    check(few.gated(gemm, x, norm), F.silu(gate) * up)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_add_touches_its_rows_only(few: FewRows, rows: int, biased: bool) -> None:
    gemm, x = linear(OUT, biased=biased), torch.randn(rows, SIZE).to(HALF)
    hidden = torch.randn(rows + 1, OUT).to(HALF)
    want = hidden.float()
    want[:rows] += exact(gemm, x)
    few.add(gemm, x, hidden[:rows])
    check(hidden, want)
    few.add(gemm, x, hidden[:rows])  # counters are as they were
    want[:rows] += exact(gemm, x)
    torch.testing.assert_close(hidden.float(), want, atol=2 * TOLERANCE, rtol=2 * TOLERANCE)


@pytest.mark.parametrize("rows", [MIN_ROWS_WEIGHTED, 17, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_gemms(
    few: FewRows, rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun by the one that adds, ended by the one after it, without a kernel between."""
    monkeypatch.setattr(gemms, "_WEIGHTED", (HALF,))
    adding, norm = linear(SIZE, biased=True), torch.randn(SIZE).to(HALF)
    x, hidden = torch.randn(2, rows, SIZE).to(HALF)
    want = hidden + exact(adding, x)
    monkeypatch.setattr(gemms.kernels, "norm", None)
    weighted = few.add(adding, x, hidden, norm)
    check(hidden, want)
    assert weighted is not None
    squares = weighted.squares.sum(0)[:rows]
    torch.testing.assert_close(squares, hidden.float().square().sum(1))
    after = linear(2 * OUT, biased=not gated)
    want = exact(after, norm_of(hidden, norm))
    if gated:
        gate, up = want.chunk(2, -1)
        check(few.gated(after, weighted, norm), F.silu(gate) * up)
    else:
        check(few.normed(after, weighted, norm), want)


def test_what_is_not_weighted(few: FewRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16, which has no room for it; too few rows; too large rows; rows no norm follows."""
    gemm, norm = linear(SIZE), torch.randn(SIZE).to(HALF)

    def is_weighted(rows: int, norm: torch.Tensor | None = norm) -> bool:
        x = torch.randn(rows, SIZE).to(HALF)
        return few.add(gemm, x, x.clone(), norm) is not None

    assert not is_weighted(MIN_ROWS_WEIGHTED)
    monkeypatch.setattr(gemms, "_WEIGHTED", (HALF,))
    assert is_weighted(MIN_ROWS_WEIGHTED)
    assert not is_weighted(MIN_ROWS_WEIGHTED, None)
    assert not is_weighted(MIN_ROWS_WEIGHTED - 1)
    assert not is_weighted(1)
    monkeypatch.setattr(gemms, "_MAX_STRETCHES", 15)
    assert not is_weighted(MIN_ROWS_WEIGHTED)


def test_one_row_in_float32(few: FewRows) -> None:
    gemm, norm = linear(OUT, torch.float32, biased=True), torch.randn(SIZE)
    x = 3 * torch.randn(1, SIZE)
    want = exact(gemm, norm_of(x, norm))
    torch.testing.assert_close(few.normed(gemm, x, norm), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 17])
def test_a_kernel_that_does_not_fit_is_done_without(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer, refused at its first, second or third GEMM, comes out right; one line is logged."""
    monkeypatch.setattr(gemms, "_WEIGHTED", (HALF,))
    adding, after, norm = linear(SIZE), linear(2 * OUT), torch.randn(SIZE).to(HALF)
    start, hidden_before = torch.randn(2, rows, SIZE).to(HALF)
    normed = exact(adding, norm_of(start, norm)).to(HALF)
    want = hidden_before + exact(adding, normed)
    gate, up = exact(after, norm_of(want.to(HALF), norm)).chunk(2, -1)
    for fails_at in (1, 2, 3):
        caplog.clear()
        few, hidden = FewRows(EPS, DEVICE), hidden_before.clone()
        launch, calls = few._launch, []

        def refuse(*args: Any, fails_at=fails_at, launch=launch, calls=calls, **more: Any) -> None:
            calls.append(args)
            if len(calls) == fails_at:
                raise OutOfResources(102_400, 101_376, "shared memory")
            launch(*args, **more)

        monkeypatch.setattr(few, "_launch", refuse)
        x = few.normed(adding, start, norm)
        weighted = few.add(adding, x, hidden, norm)
        assert (weighted is not None) == (rows == 17)
        got = few.gated(after, hidden if weighted is None else weighted, norm)
        torch.testing.assert_close(hidden.float(), want, atol=0.03, rtol=0.01)
        torch.testing.assert_close(got.float(), F.silu(gate) * up, atol=0.05, rtol=0.02)
        assert len(calls) == fails_at
        assert not few.takes(after, rows)
        (line,) = caplog.messages
        assert "102400" in line and "cuBLAS takes over" in line


def test_blocks_of_a_larger_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of rows, of which the second is not full, in a larger tensor; and rows
    that do not begin at multiples of 16 bytes, which no description of blocks takes.
    """
    few, gemm = FewRows(EPS, DEVICE), linear(OUT)
    few._has_tma, described = True, []
    monkeypatch.setattr(gemm_tiles, "IN_BLOCKS_FROM", 2)
    describe = gemms._blocks
    monkeypatch.setattr(
        gemms, "_blocks", lambda *args: described.append(describe(*args)) or described[-1]
    )
    for apart, blocks in ((16, [32, 16, 64]), (1, [])):
        described.clear()
        x = torch.full((64, SIZE + apart), float("nan")).to(HALF)
        x[:40, :SIZE] = torch.randn(40, SIZE)
        check(few.plain(gemm, x[:40, :SIZE]), exact(gemm, x[:40, :SIZE]))
        assert [blocks.block_shape[0] for blocks in described if blocks is not None] == blocks


def test_what_is_not_taken(few: FewRows) -> None:
    gemm = linear(OUT)
    assert few.takes(gemm, MAX_ROWS)
    assert not few.takes(gemm, MAX_ROWS + 1)
    assert not few.takes(gemm, 0)
    assert not few.takes(gemm.__call__, 1)
    assert not few.takes(linear(OUT, torch.float32), 2)
    assert not few.takes(PlainLinear(torch.zeros(OUT, SIZE - 16).to(HALF), None), 2)


@pytest.mark.parametrize("gated", [False, True])
def test_the_last_part_of_the_columns_may_be_smaller(gated: bool) -> None:
    columns = gemm_tiles.COLUMNS_OF_GATED if gated else gemm_tiles.COLUMNS
    size, few = 13 * columns, FewRows(EPS, DEVICE)
    few._programs = 9  # for three tiles
    assert tiles_of(Shape(17, size, OUT, gated), Device(few._shared_bytes, 9, False)).split == 3
    weight = (torch.randn(OUT * (1 + gated), size) * size**-0.5).to(HALF)
    x, gemm = torch.randn(17, size).to(HALF), PlainLinear(weight, None)
    if gated:
        gate, up = exact(gemm, x).chunk(2, -1)
        check(few.gated(gemm, x, None), F.silu(gate) * up)
    else:
        check(few.plain(gemm, x), exact(gemm, x))


def test_parts_of_columns_are_all_that_fit_and_none_is_empty() -> None:
    assert [parts_of(20, most) for most in (0, 1, 2, 3, 6, 20)] == [1, 1, 2, 3, 5, 20]
    for steps in range(1, 200):
        for most in range(1, steps + 1):
            parts = parts_of(steps, most)
            share = -(-steps // parts)
            assert parts <= most and (parts - 1) * share < steps


def test_row_groups_hold_the_rows_and_waste_little() -> None:
    assert [row_groups(n) for n in (2, 16, 17, 32)] == [(16, 0), (16, 0), (32, 0), (32, 0)]
    assert [row_groups(n) for n in (33, 48, 49, 64)] == [(32, 16), (32, 16), (64, 0), (64, 0)]


@pytest.mark.parametrize(
    ("shared_bytes", "has_tma", "plain", "gated"),
    [
        (232_448, True, [6, 6, 6, 4], [4, 4, 4, 4]),  # Hopper
        (166_912, False, [6, 6, 5, 5], [4, 4, 4, 4]),  # A100
        (101_376, False, [4, 4, 3, 3], [4, 4, 4, 4]),  # Ada, consumer Ampere
        (101_376, True, [4, 4, 3, 3], [4, 4, 4, 4]),  # consumer Blackwell
    ],
)
def test_what_is_being_loaded_fits(
    shared_bytes: int, has_tma: bool, plain: list[int], gated: list[int]
) -> None:
    device, rows = Device(shared_bytes, 132, has_tma), (16, 32, 48, 64)

    def stages(gated: bool) -> list[int]:
        return [tiles_of(Shape(n, 2560, 9728, gated), device).stages for n in rows]

    assert stages(False) == plain
    assert stages(True) == gated
