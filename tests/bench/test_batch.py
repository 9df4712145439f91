"""Rows of the one-batch table against requests of known times."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.bench.batch import COLUMNS, BatchPoint, batch_points, batch_row, median_row
from tasuki.bench.errors import BenchError, RunFailedError


def result(firsts_s: list[float], gap_s: float, tokens: int, **changes: Any) -> dict[str, Any]:
    """Requests sent at 1.0 that get their tokens one by one, evenly."""
    times = [[1.0 + first + gap_s * n for n in range(tokens)] for first in firsts_s]
    requests: dict[str, Any] = {
        "sent_s": [1.0 + 0.001 * n for n in range(len(firsts_s))],
        "first_s": [one[0] for one in times],
        "end_s": [one[-1] for one in times],
        "output_tokens": [tokens] * len(times),
        "error": [None] * len(times),
        "chunk_s": times,
        "chunk_tokens": [[1] * tokens for _ in times],
    }
    return {"requests": {**requests, **changes}}


def test_a_row_is_what_the_batch_took() -> None:
    row = batch_row(BatchPoint(2, 100, 11), result([0.5, 1.0], 0.1, 11))
    assert row.latency_s == pytest.approx(2.0)
    assert row.ttft_s == pytest.approx(1.0)
    assert row.input_throughput == pytest.approx(200.0)
    assert row.output_throughput == pytest.approx(22 / 1.0)
    # In the second before the end the slower one got 10 tokens and the other one 5 or 6.
    assert row.last_token_throughput == pytest.approx(15.5, abs=0.6)
    assert len(row.cells()) == len(COLUMNS)


def test_the_last_rate_is_that_of_the_last_forty_tokens() -> None:
    slow = [1.0 + n for n in range(10)]
    times = slow + [slow[-1] + 0.01 * n for n in range(1, 51)]
    seen = result([0.0], 0.1, 60)
    seen["requests"] |= {"chunk_s": [times], "first_s": [times[0]], "end_s": [times[-1]]}
    seen["requests"]["sent_s"] = [0.5]
    row = batch_row(BatchPoint(1, 10, 60), seen)
    assert row.last_token_throughput == pytest.approx(100.0)


def test_several_tokens_in_a_chunk_count_as_many() -> None:
    seen = result([0.0], 1.0, 3)
    seen["requests"] |= {"output_tokens": [9], "chunk_tokens": [[1, 4, 4]], "sent_s": [0.0]}
    row = batch_row(BatchPoint(1, 10, 9), seen)
    assert row.last_token_throughput == pytest.approx(4.0)


def test_prefill_only_has_no_decode_rates() -> None:
    row = batch_row(BatchPoint(1, 64, 1), result([0.5], 0.1, 1))
    assert row.output_throughput is None
    assert row.last_token_throughput is None
    assert row.cells()[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"error": [None, "HTTP 500"]}, "HTTP 500"),
        ({"output_tokens": [11, 4]}, r"1 of 2 requests gave 11 tokens: output tokens are \[11, 4"),
    ],
)
def test_a_batch_that_was_not_answered_whole_gives_no_row(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(RunFailedError, match=says):
        batch_row(BatchPoint(2, 100, 11), result([0.5, 1.0], 0.1, 11, **changes))


def test_every_combination_and_a_seed_of_its_own() -> None:
    points = batch_points([1, 2], [8, 16], [4])
    assert [(p.batch, p.input_tokens) for p in points] == [(1, 8), (2, 8), (1, 16), (2, 16)]
    assert points[0].options(seed=5)["seed"] == 5
    with pytest.raises(BenchError, match="--batch has 0: use 1 or more"):
        batch_points([1, 0], [8], [4])
    with pytest.raises(BenchError, match="--output-tokens is empty"):
        batch_points([1], [8], [])


def test_the_median_run_is_kept_whole() -> None:
    rows = [batch_row(BatchPoint(1, 10, 3), result([first], 0.1, 3)) for first in (3.0, 1.0, 2.0)]
    assert median_row(rows) is rows[2]
    assert median_row(rows[:2]) is rows[1]
