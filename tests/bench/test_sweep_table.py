"""Results as text."""

from __future__ import annotations

from bench_fakes import serve_result

from tasuki.bench.sweep_table import goodput_table, one_line, sweep_table, table


def test_a_row_for_every_run_with_a_dash_for_what_is_unknown() -> None:
    unknown = serve_result("2m")
    unknown["metrics"] |= {"ttst_ms": None, "attainment": None}
    lines = sweep_table([("chat", serve_result("1p1d")), ("chat", unknown)]).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words == [
        "topology load req/s out tok/s TTFT p50 p99 TTST p50 TPOT p50 p99 failed met SLO",
        "1p1d chat 1.00 1.0 12 12 12 12.5 12.5 0 100.0%",
        "2m chat 1.00 1.0 12 12 - 12.5 12.5 0 -",
    ]
    assert len({len(line) for line in lines[:2]}) == 1


def test_one_line_tells_the_share_only_with_objectives() -> None:
    result = serve_result()
    assert one_line(result).endswith("100.0% met the SLO")
    result["metrics"]["attainment"] = None
    assert "SLO" not in one_line(result)


def test_a_search_without_an_upper_end_shows_none() -> None:
    found = [
        {"label": "1p1d", "interval": [2.0, 2.828], "confidence": 0.95},
        {"label": "2m", "interval": [0.0, None], "confidence": 0.9},
    ]
    assert [line.split() for line in goodput_table(found).splitlines()[1:]] == [
        ["1p1d", "2.00", "2.83", "95%"],
        ["2m", "0.00", "-", "90%"],
    ]


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert table(["a", "bb"], [["ccc", "d"]], left=1) == "a    bb\nccc   d"
