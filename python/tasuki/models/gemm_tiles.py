"""How a GEMM of few rows is divided into programs: pure functions of its shape and the device."""

from __future__ import annotations

from dataclasses import dataclass

OUTS = 64
COLUMNS, COLUMNS_OF_GATED = 128, 64  # of dense weights
_COLUMNS_OF_FP8 = 128
_SPARE_BYTES = 1 << 10  # of shared memory, for what a program keeps beside its loads
_SCALE_BYTES = 8  # of a row in a step, as the compiler lays scales out
_LEAST_STEPS = 2  # of a part, where columns are divided for fp8


@dataclass(frozen=True, slots=True)
class Shape:
    """A GEMM: `rows` [rows, size] by [out, size], of a gated one [2 x out, size]."""

    rows: int
    size: int
    out: int
    gated: bool


@dataclass(frozen=True, slots=True)
class Device:
    """What one program, and all of them, may take.

    Attributes:
        shared_bytes: Of shared memory, of a program.
        programs: That there should be, at least.
    """

    shared_bytes: int
    programs: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A division.

    Attributes:
        outs: Of a program, of a gated GEMM twice.
        columns: Of a step.
        warps: Of a program.
        stages: Steps whose weights and rows are on their way at a time. Triton keeps them in
            shared memory: as many steps as this, or one fewer before Hopper.
        split: Parts that the columns are divided into.
    """

    outs: int
    columns: int
    warps: int
    stages: int
    split: int


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """What is chosen for a GEMM by a weight of fp8.

    Attributes:
        outs, warps: See `Tiles`.
        stages: At most.
        programs: For each multiprocessor, that columns are divided for.
    """

    outs: int
    warps: int
    stages: int
    programs: float


# The fastest of those measured on an H200 (benchmarks/gpu/fp8.py).
FP8_FEW, FP8_FEW_GATED = Fp8Tiling(64, 4, 5, 2.0), Fp8Tiling(64, 4, 4, 1.0)
FP8_ROUNDED, FP8_ROUNDED_GATED = Fp8Tiling(128, 8, 5, 1.0), Fp8Tiling(128, 8, 4, 1.0)


def tiles_of_dense(shape: Shape, device: Device) -> Tiles:
    """For weights and rows of 16 bits: as many parts as leave one program a multiprocessor."""
    columns = COLUMNS_OF_GATED if shape.gated else COLUMNS
    tiles, steps, split = -(-shape.out // OUTS), shape.size // columns, 1
    while tiles * split * 2 <= device.programs and steps % (split * 2) == 0:
        split *= 2
    most = 4 if shape.gated else 6
    stages = stages_of(
        most, columns * 2 * (OUTS * (1 + shape.gated) + held_rows(shape.rows)), device
    )
    return Tiles(OUTS, columns, 4, stages, split)


def tiles_of_fp8(shape: Shape, device: Device, *, rounded: bool) -> Tiles:
    """For weights of fp8 and rows of 16 bits, or `rounded` ones of fp8 too."""
    if rounded:
        tiling = FP8_ROUNDED_GATED if shape.gated else FP8_ROUNDED
    else:
        tiling = FP8_FEW_GATED if shape.gated else FP8_FEW
    outs = tiling.outs
    tiles, steps = -(-shape.out // outs), shape.size // _COLUMNS_OF_FP8
    split = min(
        max(int(device.programs * tiling.programs) // tiles, 1), max(steps // _LEAST_STEPS, 1)
    )
    split = -(-steps // -(-steps // split))
    weights, rows = outs * (1 + shape.gated), held_rows(shape.rows)
    step_bytes = _COLUMNS_OF_FP8 * (weights + rows * (1 if rounded else 2))
    step_bytes += _SCALE_BYTES * (weights + rows)
    stages = stages_of(tiling.stages, step_bytes, device)
    return Tiles(outs, _COLUMNS_OF_FP8, tiling.warps, stages, split)


def stages_of(most: int, step_bytes: int, device: Device) -> int:
    """Steps that fit in shared memory."""
    return min(most, (device.shared_bytes - _SPARE_BYTES) // step_bytes)


def row_groups(rows: int) -> tuple[int, int]:
    """Two powers of two, the second 0 or at least 16, that hold so many rows with little waste."""
    whole = max(16, 1 << (rows - 1).bit_length())
    part = rows - whole // 2
    rest = max(16, 1 << max(part - 1, 0).bit_length())
    return (whole // 2, rest) if whole >= 64 and rest < whole // 2 else (whole, 0)


def held_rows(rows: int) -> int:
    """Rows of a program's tile."""
    return sum(row_groups(rows))
