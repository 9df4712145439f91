"""Steps with prompts in them on one GPU, in CUDA graphs and launched one by one.

    python benchmarks/gpu/mixed_steps.py                        about 40 s
    python benchmarks/gpu/mixed_steps.py --device cpu --tiny    the same code on any machine

Random weights in the shape of Qwen3-4B, a cache full of random numbers. A step goes from
its arrays on the host to its logits, as in the engine, without what comes before and
after. `host ms` is what that takes the host, of it `plan ms` to plan attention and
`finish ms` to launch what follows the last one (in graphs: with the greedy choice);
`gpu ms` what the device takes for it while the host is ahead. Medians. `off` is the
largest difference of the graph's logits from the others', as a share of the largest logit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dummy import dummy_model
from step_bench import Bench, Work

from tasuki.bench.header import header, write_result
from tasuki.execution.executor import Executor
from tasuki.execution.inputs import Places, pad
from tasuki.execution.step_arrays import StepHeader

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_mixed_steps.json"
BLOCK_SIZE = 32
ROWS, LONGEST, MOST_TOKENS = 128, 6144, 2048
WORKS = (
    Work("50 decodes, 28 of a prompt", (800,) * 50, ((400, 28),)),
    Work("50 decodes, 14 prompts of 33", (800,) * 50, ((0, 33),) * 14),
    Work("50 decodes, 462 of a prompt", (800,) * 50, ((300, 462),)),
    Work("50 decodes, a prompt of 462", (800,) * 50, ((0, 462),)),
    Work("24 decodes at 5,100, 488 after 2,000", (5100,) * 24, ((2000, 488),)),
    Work("prompts of 500, 300 and 224", chunks=((0, 500), (0, 300), (0, 224))),
    Work("4 prompts of 512", chunks=((0, 512),) * 4),
    Work("2,048 after 3,072", chunks=((3072, 2048),)),
)
TINY_WORKS = (Work("tiny", (40, 7), ((16, 20),)), Work("tiny prompts", chunks=((0, 30), (0, 9))))


class Steps:
    """An executor with graphs, and the host's time for its parts."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._attention = bench.attention(BLOCK_SIZE)
        self._times_s = {"plan": 0.0, "finish": 0.0}
        self._executor = Executor(bench.model, self._attention, bench.pool(BLOCK_SIZE))
        self.capture_s = 0.0
        if bench.on_cuda:
            begin_s = time.perf_counter()
            with torch.inference_mode():
                self._executor.capture(ROWS, LONGEST, MOST_TOKENS)
            bench.wait()
            self.capture_s = time.perf_counter() - begin_s
        self._time(self._attention, "plan")
        self._time(bench.model, "finish")
        if (mixed := self._executor._mixed) is not None:
            self._time(mixed._finish, "run", "finish")

    def measure(self, work: Work, repeats: int) -> list[dict[str, Any]]:
        """One step both ways."""
        batch = self._bench.batch(work, BLOCK_SIZE)
        plain = StepHeader(
            batch.query_lens,
            batch.context_lens,
            batch.num_decodes,
            batch.block_tables.shape[1],
            len(batch.logits_rows),
        )
        arrays = [
            x.cpu().numpy().reshape(-1)
            for x in (batch.tokens, batch.positions, batch.slots, batch.block_tables)
        ]
        rows, logits = [], []
        for padded in (self._executor.padded(plain, False), plain):
            if rows and padded == rows[0]["header"]:
                continue  # there is no graph
            row = self._measure(padded, arrays, batch.logits_rows.cpu().numpy(), repeats)
            logits.append(row.pop("logits"))
            rows.append(row)
        if len(rows) == 2:
            rows[0]["off"] = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
        for row in rows:
            row |= {"step": work.name, "graph": row.pop("header").room is not None}
        return rows

    @torch.inference_mode()
    def _measure(
        self, header: StepHeader, arrays: list[Any], wanted: Any, repeats: int
    ) -> dict[str, Any]:
        executor, on_cuda = self._executor, self._bench.on_cuda
        found: dict[str, list[float]] = {name: [] for name in ("host", "plan", "finish", "gpu")}
        for _ in range(repeats + 1):
            *places, logits_rows = executor.staging.take(*header.parts())
            tokens, sources, positions, slots, tables = places
            count = len(arrays[0])
            for target, source in zip((tokens, positions, slots), arrays, strict=False):
                target[:count] = source
            sources[:], tables[:], logits_rows[:] = -1, arrays[3], wanted
            pad(Places.over(places, header.rows), count)
            self._bench.wait()
            if on_cuda:
                torch.cuda._sleep(30_000_000)  # about 17 ms: the host gets ahead
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
            self._times_s = dict.fromkeys(self._times_s, 0.0)
            for mark in marks[:1]:
                mark.record()
            begin_s = time.perf_counter()
            logits, _ = executor.run(header)
            found["host"].append(time.perf_counter() - begin_s)
            for mark in marks[1:]:
                mark.record()
            self._bench.wait()
            for name, took_s in self._times_s.items():
                found[name].append(took_s)
            found["gpu"].append(marks[0].elapsed_time(marks[1]) / 1e3 if on_cuda else 0.0)
        result = {f"{name}_ms": 1e3 * statistics.median(all_s[1:]) for name, all_s in found.items()}
        return {"header": header, "logits": logits.float().clone(), **result}

    def _time(self, owner: Any, name: str, part: str | None = None) -> None:
        """Note how long calls of a method take the host, as a part's time."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            result = method(*arguments, **options)
            self._times_s[part or name] += time.perf_counter() - begin_s
            return result

        setattr(owner, name, timed)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    parts = f"plan {row['plan_ms']:.2f}, finish {row['finish_ms']:.2f}"
    return (
        f"{row['step']:38} {'graph' if row['graph'] else 'eager'}: host {row['host_ms']:6.2f} ms"
        f" ({parts}), gpu {row['gpu_ms']:7.3f}"
        + (f", off {row['off']:.4f}" if "off" in row else "")
    )


def main() -> None:
    """Measure, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-tokens", type=int, default=196_608)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and steps")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    device = torch.device(args.device)
    model = dummy_model(device, args.tiny)
    steps = Steps(Bench(model, device, 1024 if args.tiny else args.pool_tokens))
    print(f"graphs recorded in {steps.capture_s:.1f} s", file=sys.stderr, flush=True)
    rows = []
    for work in TINY_WORKS if args.tiny else WORKS:
        for row in steps.measure(work, args.repeats):
            rows.append(row)
            print(line(row), flush=True)
    described = header(
        "gpu_mixed_steps",
        label="mixed steps",
        topology=None,
        model="Qwen3-4B shape",
    )
    write_result(args.output, described | {"capture_s": steps.capture_s, "steps": rows})


if __name__ == "__main__":
    main()
