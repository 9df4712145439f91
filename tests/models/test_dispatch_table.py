"""Measured dispatch without a model: decision, table, timer."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from tasuki.models.dispatch.decide import choose
from tasuki.models.dispatch.table import Choice, DispatchError, Table, bucket_of
from tasuki.models.dispatch.timer import Work, take_turns, timed_run

ADDMM = Choice("addmm", "linear")


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ([9.6, 9.6, 9.6], "ours"),  # 4% faster in every turn
        ([9.8, 9.8, 9.8], "default"),  # 2%
        ([5.0, 5.0, 9.9], "default"),  # not in the last turn
        ([11.0, 11.0, 11.0], "default"),
    ],
)
def test_a_candidate_must_be_clearly_faster_every_time(other: list[float], chosen: str) -> None:
    assert choose({"default": [10.0, 10.0, 10.0], "ours": other}, "default") == chosen


def test_the_fastest_of_several_candidates_by_the_median() -> None:
    times = {
        "default": [10.0] * 3,
        "a": [8.0, 8.0, 2.0],
        "b": [7.0, 7.0, 9.0],
        "c": [1.0, 1.0, 9.8],
    }
    assert choose(times, "default") == "b"
    assert choose(times, "default", margin=0.5) == "default"


def test_a_table_survives_its_file_and_has_a_choice_for_all_rows_of_a_bucket() -> None:
    table = Table()
    table.set("mlp", 16, ADDMM)
    again = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert [again.choice("mlp", rows) for rows in (8, 9, 16, 17)] == [None, ADDMM, ADDMM, None]
    assert again.choice("attention", 16) is None
    assert [bucket_of(rows) for rows in (1, 3, 128, 129)] == [1, 4, 128, 0]


@pytest.mark.parametrize(
    "given", [[1], {"mlp": 3}, {"mlp": {"x": "ours/ours"}}, {"mlp": {"1": "?"}}]
)
def test_what_is_no_table_is_refused(given: Any) -> None:
    with pytest.raises(DispatchError, match="--dispatch measured"):
        Table.from_json(given)


def test_turns_alternate_and_real_work_is_timed() -> None:
    order: list[str] = []

    def work(name: str, seconds: float) -> Work:
        return lambda: (order.append(name), time.sleep(seconds))

    cpu = torch.device("cpu")
    runs = {name: timed_run(work(name, s), cpu) for name, s in (("a", 0.001), ("b", 0.02))}
    order.clear()
    times = take_turns(runs, turns=3)
    assert order == ["a", "b"] * 4  # one turn that does not count
    assert all(len(own) == 3 for own in times.values())
    assert min(times["b"]) >= 0.02 and min(times["a"]) >= 0.001
