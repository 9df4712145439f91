"""Result files of `vllm bench serve` (JSON) and of SGLang's `bench_serving` (JSONL).

The two descend from one script and share most names; what differs is in `_Tool`.
Both measure from sending, after any wait for a free slot in the client.

Source: vllm/benchmarks/serve.py (0.26), sglang/benchmark/serving.py (0.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import MOST_TOKENS, Fields, divide
from tasuki.plot.run import Load, Request, Run, Stats


@dataclass(frozen=True, slots=True)
class _Tool:
    """Names that differ between the two."""

    name: str
    total_throughput: str
    e2e: str
    label: str
    model: str


_VLLM = _Tool("vllm", "total_token_throughput", "e2el", "label", "model_id")
_SGLANG = _Tool("sglang", "total_throughput", "e2e_latency", "tag", "")


_GOODPUT = "request_goodput"  # earlier versions of vLLM have a colon after it


def _tool(first: dict[str, Any]) -> _Tool | None:
    if "mean_ttft_ms" not in first:
        return None
    if "total_token_throughput" in first:
        return _VLLM
    if "total_throughput" in first and "mean_e2e_latency_ms" in first:
        return _SGLANG
    return None


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is one of theirs."""
    return _tool(first) is not None


def read(path: Path, objects: list[dict[str, Any]], label: str) -> Iterator[Run]:
    """One run for each object: both tools can append to a file.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: Used where an object has no label of its own.
    """
    for data in objects:
        tool = _tool(data)
        if tool is None:
            raise ResultFileError(path, "some of its objects are results of a run, others are not")
        yield _run(Fields(path, data), tool, label)


def _run(fields: Fields, tool: _Tool, label: str) -> Run:
    duration_s = fields.need("duration")
    completed = fields.count("completed")
    sent = fields.count("num_prompts")
    failed = fields.count("failed")
    if failed is None and sent is not None and completed is not None:
        failed = sent - completed
    timed = bool(fields.column("start_times"))
    requests = tuple(_requests(fields))

    def stats(name: str, pattern: str = "") -> Stats:
        """The file's own; from its requests where it has none."""
        said = fields.stats(pattern) if pattern else Stats()
        mine = (request.latency_ms(name) for request in requests if request.measured)
        return Stats.of(mine) if said.mean is None else said

    return Run(
        path=fields.path,
        tool=tool.name,
        label=fields.text(tool.label) or label,
        workload=_workload(fields),
        model=fields.text(tool.model) if tool.model else _sglang_model(fields),
        load=_load(fields),
        duration_s=duration_s,
        completed=completed,
        failed=failed,
        request_throughput=fields.number("request_throughput"),
        input_throughput=divide(fields.number("total_input_tokens"), duration_s),
        output_throughput=fields.need("output_throughput"),
        total_throughput=fields.number(tool.total_throughput),
        goodput=fields.number(_GOODPUT if _GOODPUT in fields.data else _GOODPUT + ":"),
        ttft=fields.stats("{}_ttft_ms"),
        ttst=stats("ttst"),
        tpot=fields.stats("{}_tpot_ms"),
        itl=fields.stats("{}_itl_ms"),
        e2e=stats("e2e", f"{{}}_{tool.e2e}_ms"),
        input_tokens_mean=divide(fields.number("total_input_tokens"), completed),
        output_tokens_mean=divide(fields.number("total_output_tokens"), completed),
        requests=requests,
        timed=timed,
    )


def _load(fields: Fields) -> Load:
    rate = fields.data.get("request_rate")
    return Load(
        rate=None if isinstance(rate, str) else fields.number("request_rate"),
        concurrency=fields.count("max_concurrency"),
        name=rate if isinstance(rate, str) and rate != "inf" else "all at once",
    )


def _workload(fields: Fields) -> str:
    """SGLang says what it sent, vLLM does not."""
    kind = fields.text("dataset_name")
    if not kind.startswith("random"):
        return kind
    lengths = fields.count("random_input_len"), fields.count("random_output_len")
    ratio = fields.number("random_range_ratio")
    return f"{kind} {lengths[0]}:{lengths[1]}" + (
        f", range_ratio={ratio:g}, range_convention=sglang" if ratio else ""
    )


def _sglang_model(fields: Fields) -> str:
    server = fields.inner("server_info")
    return server.text("served_model_name") or server.text("model_path")


def _requests(fields: Fields) -> Iterator[Request]:
    """Present with `--save-detailed` (vLLM) or `--output-details` (SGLang) only.

    Neither tells how many tokens a chunk carried, so the tokens are spread evenly.
    """
    ttfts = fields.numbers("ttfts")
    count = len(ttfts)
    gaps, errors = fields.number_lists("itls", count), fields.column("errors", count)
    starts = fields.numbers("start_times", count)
    inputs = fields.numbers("input_lens", count)
    outputs = fields.numbers("output_lens", count, MOST_TOKENS)
    begin = min((start for start in starts if start is not None), default=0.0)
    for i, ttft in enumerate(ttfts):
        sent_s = 0.0 if starts[i] is None else starts[i] - begin
        if errors[i] or not ttft:
            error = str(errors[i] or "no token")
            yield Request(due_s=sent_s, sent_s=sent_s, input_tokens=inputs[i], error=error)
            continue
        chunk_s = tuple(accumulate(gaps[i], initial=sent_s + ttft))
        tokens = outputs[i] if outputs[i] is not None else len(chunk_s)
        yield Request(
            due_s=sent_s,
            sent_s=sent_s,
            first_s=chunk_s[0],
            second_s=chunk_s[1] if len(chunk_s) > 1 else None,
            end_s=chunk_s[-1],
            input_tokens=inputs[i],
            output_tokens=tokens,
            chunk_s=chunk_s,
            chunk_tokens=(tokens / len(chunk_s),) * len(chunk_s),
        )
