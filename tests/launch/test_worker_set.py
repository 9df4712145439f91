"""Which workers start and which end when a role gets another number."""

from __future__ import annotations

from tasuki.launch.worker_set import Change, plan_change

NAMES = ["prefill-0", "decode-0", "decode-2", "mixed-0"]


def test_new_workers_take_the_lowest_free_numbers() -> None:
    assert plan_change(NAMES, "decode", 4) == Change(("decode-1", "decode-3"), ())
    assert plan_change([], "mixed", 2) == Change(("mixed-0", "mixed-1"), ())


def test_the_highest_numbers_go_first() -> None:
    assert plan_change(NAMES, "decode", 1) == Change((), ("decode-2",))
    many = [f"decode-{n}" for n in range(12)]
    assert plan_change(many, "decode", 9).stop == ("decode-9", "decode-10", "decode-11")


def test_nothing_changes_where_the_number_is_right() -> None:
    assert plan_change(NAMES, "decode", 2) == Change((), ())
