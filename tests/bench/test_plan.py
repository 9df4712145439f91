"""Names of loads and words of command lines."""

from __future__ import annotations

from tasuki.bench.arguments import secrets_apart, words
from tasuki.bench.plan import Load, Plan, Point, spread
from tasuki.bench.topologies import Target, parse_topology


def test_one_load_for_every_combination() -> None:
    loads = spread("x", {"a": 1}, {"rate": [0.5, 1.0], "file": ["d/t.jsonl"]})
    assert [load.name for load in loads] == [
        "x-rate-0.5-file-d_t.jsonl",
        "x-rate-1-file-d_t.jsonl",
    ]
    assert loads[0].options == {"a": 1, "rate": 0.5, "file": "d/t.jsonl"}
    assert [load.name for load in spread("x", {}, {})] == ["x"]


def test_keys_and_headers_are_in_no_name_of_a_file() -> None:
    loads = spread("x", {}, {"api-key": ["sk-a", "sk-b"], "header": ["X: 1"], "seed": [7]})
    assert [load.name for load in loads] == [
        "x-api-key-1-header-1-seed-7",
        "x-api-key-2-header-1-seed-7",
    ]
    assert loads[1].options == {"api-key": "sk-b", "header": "X: 1", "seed": 7}


def test_a_new_key_measures_the_same_and_another_header_does_not() -> None:
    target = Target("1m", parse_topology("1m"))

    def of(**options: str) -> str:
        load = Load("x", {name.replace("_", "-"): value for name, value in options.items()})
        return Plan("model", (target,), (load,)).fingerprint(Point(target, "x", load))

    assert of(api_key="old", header="X: 1") == of(api_key="new", header="X: 1")
    assert of(api_key="old", header="X: 1") != of(api_key="old", header="X: 2")


def test_options_become_words() -> None:
    options = {"rate": 2.0, "max_len": 7, "on": True, "off": False, "no": None, "name": ["a", "b"]}
    assert words(options) == [
        *("--rate", "2", "--max-len", "7", "--on"),
        *("--name", "a", "--name", "b"),
    ]
    assert words({"rate": 0.1, "big": 1e6}) == ["--rate", "0.1", "--big", "1000000"]
    assert words({"seed": -1, "each": ["-a", "b"]}) == ["--seed=-1", "--each=-a", "--each", "b"]
    assert secrets_apart({"api-key": "-k"}) == ({}, {"OPENAI_API_KEY": "-k"})
