"""Which points are measured, in which order, and what is kept of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.steps import (
    GPU_SIZES,
    BackToBackPoint,
    BesidePoint,
    DecodePoint,
    PrefillPoint,
    StepGrid,
    StepPoint,
    TransferPoint,
    measure_all,
    step_lines,
    step_tables,
)
from tasuki.worker.config import WorkerConfig

GRID = StepGrid(
    prefill_tokens=(16, 32),
    prefill_context=(0, 64),
    decode_batch=(1, 2),
    decode_context=(8,),
    transfer_blocks=(4,),
    repeat=3,
)


class FakeTimer:
    """The n-th measurement of a point takes n seconds, but the second takes 100."""

    def __init__(self, too_large: set[StepPoint]) -> None:
        self.too_large = too_large
        self.order: list[StepPoint] = []

    def fits(self, point: StepPoint) -> bool:
        return point not in self.too_large

    def measure(self, point: StepPoint) -> float:
        self.order.append(point)
        count = self.order.count(point)
        return 100.0 if count == 2 else float(count)


def test_a_gpus_grid_reaches_the_limits_of_its_workers() -> None:
    grid = StepGrid(**GPU_SIZES)
    limits = WorkerConfig(Path("model"), name="any").limits(on_cuda=True)
    assert max(grid.decode_batch) == limits.max_running_requests
    assert max(grid.prefill_tokens) == limits.max_batched_tokens


def test_medians_of_interleaved_rounds_without_the_first() -> None:
    timer = FakeTimer({PrefillPoint(32, 64)})
    rounds: list[int] = []
    seconds, left_out, stopped = measure_all(GRID, timer, rounds.append)
    assert stopped is None
    assert left_out == [PrefillPoint(32, 64)]
    assert rounds == [0, 1, 2, 3]
    assert set(seconds.values()) == {4.0}  # of 100, 3 and 4; the 1 of the warm-up is gone
    fitting = set(GRID.points()) - {PrefillPoint(32, 64)}
    count = len(fitting)
    each_round = [timer.order[at : at + count] for at in range(0, 4 * count, count)]
    assert all(set(one) == fitting for one in each_round)
    assert len({tuple(one) for one in each_round}) > 1


@pytest.mark.parametrize(("rounds", "kept"), [(1.5, False), (2.0, True), (2.5, True)])
def test_an_interrupt_keeps_the_medians_once_each_point_was_measured(
    rounds: float, kept: bool
) -> None:
    """Of the rounds the first one warms up."""
    count = len(GRID.points())

    class Interrupted(FakeTimer):
        def measure(self, point: StepPoint) -> float:
            if len(self.order) == rounds * count:
                raise KeyboardInterrupt
            return super().measure(point)

    timer = Interrupted(set())
    if not kept:
        with pytest.raises(KeyboardInterrupt):
            measure_all(GRID, timer)
        return
    seconds, _, stopped = measure_all(GRID, timer)
    assert isinstance(stopped, KeyboardInterrupt) and seconds.keys() == set(GRID.points())
    assert set(seconds.values()) == ({100.0} if rounds == 2.0 else {100.0, 51.5})


@pytest.mark.parametrize("measured", [0, 3, 20])
def test_a_failure_keeps_the_medians_of_what_was_measured(measured: int) -> None:
    count = len(GRID.points())

    class Failing(FakeTimer):
        def measure(self, point: StepPoint) -> float:
            if len(self.order) == count + measured:
                raise RunFailedError("out of memory")
            return super().measure(point)

    timer = Failing(set())
    if measured == 0:
        with pytest.raises(RunFailedError, match="out of memory"):
            measure_all(GRID, timer)
        return
    seconds, left_out, stopped = measure_all(GRID, timer)
    assert str(stopped) == "out of memory"
    assert (len(seconds), left_out) == (min(measured, count), [])


def test_prompts_that_fit_into_a_step_are_measured_beside_an_average_batch() -> None:
    assert GRID.beside == [BesidePoint(16, 1, 8)]  # 32 and a decode are more than a step has
    wide = StepGrid(prefill_tokens=(64, 512), decode_batch=(1, 16, 64, 128), decode_context=(900,))
    assert wide.beside == [BesidePoint(64, 16, 900)]
    assert StepGrid(decode_batch=(8,)).beside == []
    assert StepGrid(prefill_tokens=()).beside == []


def test_few_some_and_many_sequences_are_measured() -> None:
    assert StepGrid(decode_batch=(32, 1, 2, 4, 8)).few_some_many == (1, 4, 32)
    assert StepGrid(decode_batch=(8,)).few_some_many == (8,)
    assert StepGrid(decode_batch=()).few_some_many == ()


def test_tables_follow_the_schema() -> None:
    seconds: dict[StepPoint, float] = {
        PrefillPoint(256, 0): 0.5,
        BackToBackPoint(256, 0): 0.4,
        DecodePoint(8, 512): 0.02,
        BesidePoint(64, 8, 512): 0.003,
        TransferPoint(32): 0.001,
    }
    tables = step_tables(seconds, block_bytes=1000)
    assert tables == {
        "prefill": [{"tokens": 256, "context": 0, "seconds": 0.5}],
        "back_to_back": [{"tokens": 256, "context": 0, "seconds": 0.4}],
        "decode": [{"batch": 8, "context": 512, "seconds": 0.02}],
        "beside": [{"tokens": 64, "batch": 8, "context": 512, "seconds": 0.003}],
        "transfer": [{"blocks": 32, "bytes": 32_000, "seconds": 0.001}],
    }
    tables["launch"] = [{"batch": 8, "seconds": 0.001}]
    tables["lone"] = [{"tokens": 64, "batch": 8, "context": 90.4, "seconds": 0.02}]
    lines = {title: rows for title, _, rows in step_lines(tables)}
    assert lines["prefill step"] == [["256", "0", "500.00", "512"]]
    assert lines["prefill steps back to back"] == [["256", "0", "400.00", "640"]]
    assert lines["a prompt beside decodes adds"] == [["64", "8", "3.00"]]
    assert lines["launch of a step"] == [["8", "1.00"]]
    assert lines["a lone prompt beside decodes"] == [["64", "8", "90", "20.00"]]
    assert lines["KV transfer"] == [["32", "0.03", "1.00", "0.03"]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"repeat": 0}, "--repeat is 0"),
        ({"decode_batch": (1, 0)}, "--decode-batch has 0: use 1 or more"),
        ({"prefill_context": (-1,)}, "--prefill-context has -1: use 0 or more"),
    ],
)
def test_a_grid_out_of_range_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        StepGrid(**wrong)  # type: ignore[arg-type]
