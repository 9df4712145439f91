"""The router's request log, `docs/request-log.md`: what was really served.

A log says when a request's first, second and last token came. Tokens between are spread evenly, so
inter-token latencies are means of each request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.run import Load, Request, Run, Stats

_KEY = "tasuki_request_log"
_VERSION = 1
_DONE = "done"
# Of a request's values, those that every line has, and those that are numbers where they are.
_NEEDED = ("t", "i", "o", "e")
_OPTIONAL = ("f", "g", "q")
# Of more tokens no times are made up.
_MOST_TOKENS = 2_000_000


def is_log(path: Path) -> bool:
    """Whether the file begins as a request log does."""
    with path.open("rb") as file:
        return file.read(len(_KEY) + 16).lstrip().startswith(b'{"' + _KEY.encode() + b'"')


def read(path: Path, label: str) -> Iterator[Run]:
    """The log as one run; lines that are cut off or have wrong values are left out.

    Args:
        path: The file.
        label: The line that the run belongs to.

    Raises:
        ResultFileError: It is of another version, or has no request.
    """
    first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = json.loads(first)[_KEY] if _parsed(first) else None
    if found != _VERSION:
        raise ResultFileError(
            path, f"is a request log of version {found}, this version reads {_VERSION}"
        )
    records = [record for line in lines if (record := _parsed(line)) and _is_record(record)]
    if not records:
        raise ResultFileError(path, "has no request: serve some with --request-log")
    records.sort(key=lambda record: record["t"])
    began = records[0]["t"]
    tokens = sum(record["o"] for record in records)
    requests = tuple(_request(record, began, tokens <= _MOST_TOKENS) for record in records)
    answered = [request for request in requests if request.measured]
    end_s = max((request.end_s or 0.0 for request in answered), default=0.0)
    total = sum(request.output_tokens or 0.0 for request in answered)
    prompts = sum(request.input_tokens or 0.0 for request in answered)

    def per_s(amount: float) -> float | None:
        return amount / end_s if end_s else None

    def stats(name: str) -> Stats:
        return Stats.of(request.latency_ms(name) for request in answered)

    yield Run(
        path=path,
        tool="tasuki",
        label=label,
        # As `tasuki simulate` calls a run of this log.
        workload=f"log, file={path.name}",
        load=Load(name="log"),
        duration_s=end_s,
        completed=len(answered),
        failed=len(requests) - len(answered),
        request_throughput=per_s(len(answered)),
        input_throughput=per_s(prompts),
        output_throughput=per_s(total),
        total_throughput=per_s(prompts + total),
        ttft=stats("ttft"),
        ttst=stats("ttst"),
        tpot=stats("tpot"),
        e2e=stats("e2e"),
        input_tokens_mean=prompts / len(answered) if answered else None,
        output_tokens_mean=total / len(answered) if answered else None,
        requests=requests,
        timed=True,
        ttft_from="due",
    )


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_record(value: dict[str, Any]) -> bool:
    numbers = [value.get(key) for key in _NEEDED]
    numbers += [value[key] for key in _OPTIONAL if key in value]
    handoff = value.get("h", [0, 0, 0])
    if not isinstance(handoff, list) or len(handoff) != 3:
        return False
    return all(type(number) in (int, float) for number in numbers + handoff)


def _request(record: dict[str, Any], began: float, spread: bool) -> Request:
    due_s = record["t"] - began

    def at(key: str) -> float | None:
        return due_s + record[key] / 1e3 if key in record else None

    outcome = record.get("z", _DONE)
    first_s, second_s, end_s = at("f"), at("g"), at("e")
    times = _token_times(first_s, second_s, end_s, record["o"]) if spread else ()
    phases = {"queue_ms": record["q"]} if "q" in record else {}
    if "h" in record:
        phases["transfer_exposed_ms"] = record["h"][2]
    return Request(
        due_s=due_s,
        sent_s=due_s,
        first_s=first_s,
        second_s=second_s,
        end_s=end_s,
        input_tokens=record["i"],
        output_tokens=record["o"],
        error=None if outcome == _DONE else outcome,
        chunk_s=times,
        chunk_tokens=(1.0,) * len(times),
        phases_ms=phases,
    )


def _token_times(
    first_s: float | None, second_s: float | None, end_s: float | None, tokens: int
) -> tuple[float, ...]:
    if first_s is None or end_s is None or tokens < 1:
        return ()
    if second_s is None or tokens < 2:
        return (first_s,)
    gaps = max(tokens - 2, 1)
    rest = (second_s + (end_s - second_s) * i / gaps for i in range(1, tokens - 1))
    return (first_s, second_s, *rest)
