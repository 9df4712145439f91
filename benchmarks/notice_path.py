"""From prefill's end to the decode worker's next step: how long each part of the way takes.

One prefill and one decode worker, real but for their device, which is a clock
(`paced_worker.py`): so it is about the workers' threads and their messages, on any machine.
Requests come at random times. Percentiles of each part, by the clock that all processes share:

    computed ─ collected ─ received ─ known ─ usable ─ planned ─ second ─ told
    on device   prefill's   by the     by its  KV is    its next  on       to the
                engine      decode     engine  there    step is   device   router
                thread      worker     thread           planned

The first line is paced like a GPU, the second like a CPU, where steps hold the engine thread:

    python benchmarks/notice_path.py --out benchmarks/results/notice_path.json
    python benchmarks/notice_path.py --on-host --rate 12 --prompt 512 --step-ms 8 --token-us 60 \\
        --prefill-launch-ms 0 --decode-launch-ms 0 \\
        --out benchmarks/results/notice_path_on_host.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tasuki.bench.header import header, write_result
from tasuki.kv.clock import now_s
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerStub

PARTS = (
    ("computed", "collected"),
    ("collected", "received"),
    ("received", "known"),
    ("known", "usable"),
    ("usable", "planned"),
    ("planned", "second"),
    ("second", "told"),
    ("computed", "known"),
    ("computed", "usable"),
    ("computed", "first"),
    ("first", "told"),
)
_DEADLINE_S = 60.0
_VOCABULARY = 1_000
_WARM_UP = 20  # requests that do not count


@dataclass
class Told:
    """What the router heard of requests, and when."""

    notes: list[tuple[str, str, float]] = field(default_factory=list)
    over: int = 0


class Worker:
    """A child process and the stream to it."""

    def __init__(self, role: str, folder: Path, pace: list[str]) -> None:
        self.role = role
        self.notes = folder / f"{role}.json"
        script = Path(__file__).with_name("paced_worker.py")
        command = [sys.executable, str(script), role, str(self.notes), *pace]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.queue: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self.peer = pb.Peer()
        self.waited_s = 0.0

    def wait_ready(self) -> str:
        """Its address, once it serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready "):
                return line.split()[1]
        raise SystemExit(f"the {self.role} worker did not start")

    async def listen(self, address: str, told: Told, ready: asyncio.Event) -> None:
        """Send what is queued, note what comes."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = WorkerStub
            async for message in stub(channel).Serve(self._outgoing()):
                if message.HasField("info"):
                    self.peer = pb.Peer(
                        engine_id=message.info.engine_id, kv_endpoint=message.info.kv_endpoint
                    )
                    ready.set()
                    continue
                at_s = now_s()
                for output in message.step.outputs:
                    if output.position == 0 and self.role == "prefill":
                        told.notes.append((output.request_id, "first", at_s))
                    if output.position == 1:
                        told.notes.append((output.request_id, "told", at_s))
                if self.role == "decode":
                    told.over += len(message.step.ended)

    async def _outgoing(self) -> AsyncIterator[pb.RouterMessage]:
        while True:
            yield await self.queue.get()

    def end(self) -> list[tuple[str, str, float]]:
        """Stop it; returns what it noted."""
        self.waited_s += _waited_s(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(_DEADLINE_S) == 0
        return [(name, what, at_s) for name, what, at_s in json.loads(self.notes.read_text())]


def _waited_s(pid: int) -> float:
    """How long a process's threads had something to do and no core to do it on."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[1]) for stat in stats) / 1e9


async def drive(workers: list[Worker], options: argparse.Namespace, told: Told) -> None:
    """Submit requests at random times until the time is over, and see them end."""
    addresses = [await asyncio.to_thread(worker.wait_ready) for worker in workers]
    events = [asyncio.Event() for _ in workers]
    tasks = [
        asyncio.create_task(worker.listen(address, told, ready))
        for worker, address, ready in zip(workers, addresses, events, strict=True)
    ]
    async with asyncio.timeout(_DEADLINE_S):
        for event in events:
            await event.wait()
    for worker in workers:
        worker.waited_s = -_waited_s(worker.process.pid)
    prefill, decode = workers
    draw = random.Random(options.seed)
    end_s, count = now_s() + options.seconds, 0
    while now_s() < end_s:
        prompt = [draw.randrange(_VOCABULARY) for _ in range(draw.randint(5, options.prompt))]
        sampling = pb.SamplingParams(
            seed=1, top_p=1.0, repetition_penalty=1.0, max_tokens=options.output
        )
        for worker, peer, leg in (
            (prefill, decode, pb.LEG_PREFILL),
            (decode, prefill, pb.LEG_DECODE),
        ):
            submit = pb.Submit(
                request_id=f"r{count}",
                leg=leg,
                peer=peer.peer,
                prompt_tokens=prompt,
                choices=[0],
                sampling=sampling,
            )
            worker.queue.put_nowait(pb.RouterMessage(submit=submit))
        count += 1
        await asyncio.sleep(draw.expovariate(options.rate))
    async with asyncio.timeout(_DEADLINE_S):
        while told.over < count:
            await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()


def parts_ms(notes: list[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """Percentiles of each part, in milliseconds; the first requests only warm up."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for name, what, at_s in notes:
        times[name].setdefault(what, at_s)
    result = {}
    for begin, end in PARTS:
        took_ms = sorted(
            1e3 * (at[end] - at[begin])
            for name, at in times.items()
            if int(name[1:]) >= _WARM_UP and begin in at and end in at
        )
        result[f"{begin} - {end}"] = {
            "p50": round(statistics.median(took_ms), 2),
            "mean": round(statistics.fmean(took_ms), 2),
            "p90": round(took_ms[int(0.9 * len(took_ms))], 2),
            "p99": round(took_ms[int(0.99 * len(took_ms))], 2),
            "count": len(took_ms),
        }
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--prompt", type=int, default=1_019, help="longest, tokens")
    parser.add_argument("--output", type=int, default=50, help="tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill-launch-ms", type=float, default=5.0)
    parser.add_argument("--decode-launch-ms", type=float, default=0.7)
    parser.add_argument("--step-ms", type=float, default=6.6)
    parser.add_argument("--token-us", type=float, default=12.0)
    parser.add_argument("--on-host", action="store_true", help="steps hold the engine thread")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = Told()
    with tempfile.TemporaryDirectory() as folder:
        rest = ["--step-ms", str(options.step_ms), "--token-us", str(options.token_us)]
        rest += ["--on-host"] * options.on_host
        workers = [
            Worker(role, Path(folder), ["--launch-ms", str(launch_ms), *rest])
            for role, launch_ms in (
                ("prefill", options.prefill_launch_ms),
                ("decode", options.decode_launch_ms),
            )
        ]
        try:
            asyncio.run(drive(workers, options, told))
            notes = told.notes + [note for worker in workers for note in worker.end()]
        finally:
            for worker in workers:
                worker.process.kill()
    parts = parts_ms(notes)
    waited = sum(worker.waited_s for worker in workers) / options.seconds
    print(f"waited for a core: {waited:.1%} of the time")
    for name, row in parts.items():
        print(f"{name:24s}" + "".join(f"  {key} {value:7.2f}" for key, value in row.items()))
    if options.out:
        result = header("notice_path", label="notice_path", topology=None, model="paced")
        settings = {k: v for k, v in vars(options).items() if k != "out"}
        write_result(options.out, result | {"settings": settings, "waited": waited, "ms": parts})


if __name__ == "__main__":
    main()
