"""How a GEMM of few rows is divided into programs: pure functions of its shape and the device."""

from __future__ import annotations

from dataclasses import dataclass

OUTS = 64
IN_BLOCKS_FROM = 49  # rows; what a step reads is copied in blocks
COLUMNS, COLUMNS_OF_GATED = 128, 64
LEAST_STEPS = 4  # of a part of the columns
_SPARE_BYTES = 1 << 10  # of shared memory, for what a program keeps beside its loads


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
        has_tma: Whether it copies blocks of memory by a description of them, without registers.
    """

    shared_bytes: int
    programs: int
    has_tma: bool


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
        in_blocks: Whether what a step reads is copied in blocks.
    """

    outs: int
    columns: int
    warps: int
    stages: int
    split: int
    in_blocks: bool


def tiles_of(shape: Shape, device: Device) -> Tiles:
    """As many parts of the columns as leave one program a multiprocessor."""
    columns = COLUMNS_OF_GATED if shape.gated else COLUMNS
    tiles, steps = -(-shape.out // OUTS), shape.size // columns
    split = parts_of(steps, min(device.programs // tiles, steps // LEAST_STEPS))
    in_blocks = device.has_tma and shape.rows >= IN_BLOCKS_FROM
    most = 4 if shape.gated or in_blocks else 6
    stages = stages_of(
        most, columns * 2 * (OUTS * (1 + shape.gated) + held_rows(shape.rows)), device
    )
    return Tiles(OUTS, columns, 4, stages, split, in_blocks)


def fp8_tiles_of(rows: int, out: int, size: int, device: Device) -> Tiles:
    """The division of [rows, size] by [out, size] in fp8, where a step has the columns of a scale.

    Up to 16 rows small tiles and two programs a multiprocessor are faster, beyond them large ones.
    """
    held, steps = held_rows(rows), size // COLUMNS
    outs, together = (OUTS, 2) if held <= 16 else (2 * OUTS, 1)
    tiles, programs = -(-out // outs), device.programs * together
    stages = stages_of(4 if tiles >= device.programs else 6, COLUMNS * (outs + held), device)
    return Tiles(outs, COLUMNS, 4, stages, parts_of(steps, programs // tiles), False)


def parts_of(steps: int, most: int) -> int:
    """Parts of equally many steps but for the last, none of them empty: at most `most`, or one."""
    share = -(-steps // max(1, most))
    return -(-steps // share)


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
