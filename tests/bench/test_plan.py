"""Names of loads and words of command lines."""

from __future__ import annotations

from tasuki.bench.arguments import words
from tasuki.bench.plan import spread


def test_one_load_for_every_combination() -> None:
    loads = spread("x", {"a": 1}, {"rate": [0.5, 1.0], "file": ["d/t.jsonl"]})
    assert [load.name for load in loads] == [
        "x-rate-0.5-file-d_t.jsonl",
        "x-rate-1-file-d_t.jsonl",
    ]
    assert loads[0].options == {"a": 1, "rate": 0.5, "file": "d/t.jsonl"}
    assert [load.name for load in spread("x", {}, {})] == ["x"]


def test_options_become_words() -> None:
    options = {"rate": 2.0, "max_len": 7, "on": True, "off": False, "no": None, "name": ["a", "b"]}
    assert words(options) == [
        *("--rate", "2", "--max-len", "7", "--on"),
        *("--name", "a", "--name", "b"),
    ]
    assert words({"rate": 0.1, "big": 1e6}) == ["--rate", "0.1", "--big", "1000000"]
