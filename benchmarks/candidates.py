"""Topologies that are measured against each other, the loads they get, and what counts.

`plan_regret.py` measures and simulates them; other benchmarks take its loads and its calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.arguments import words
from tasuki.bench.errors import RunFailedError
from tasuki.launch.config import Topology

TASUKI = (sys.executable, "-m", "tasuki")
Load = Mapping[str, Any]

GPU_LOADS: dict[str, Load] = {
    "w1": {"input-tokens": 512, "output-tokens": 512, "range-ratio": 0.99},
    "w2": {"input-tokens": 5_000, "output-tokens": 250, "range-ratio": 0.5},
    "chat": {"input-tokens": 2_000, "output-tokens": 300, "range-ratio": 0.5},
    "answers": {"input-tokens": 250, "output-tokens": 1_000, "range-ratio": 0.5},
}
CPU_LOADS: dict[str, Load] = {
    "w1": {"input-tokens": 96, "output-tokens": 64, "range-ratio": 0.9},
    "w2": {"input-tokens": 640, "output-tokens": 16, "range-ratio": 0.5},
    "chat": {"input-tokens": 256, "output-tokens": 32, "range-ratio": 0.5},
    "answers": {"input-tokens": 32, "output-tokens": 96, "range-ratio": 0.5},
}
# TTFT, TPOT in seconds. TTFT is short against a run, within which an overload is to show.
GPU_OBJECTIVES = {"tight": (0.4, 0.012), "loose": (0.8, 0.025)}
CPU_OBJECTIVES = {"tight": (1.0, 0.06), "loose": (2.0, 0.15)}
CPU_GRID = {
    "prefill-tokens": "16,64,256,512",
    "prefill-context": "0,512",
    "decode-batch": "1,2,4,8,16",
    "decode-context": "128,512",
    "transfer-blocks": "1,16,64",
    "repeat": 3,
}


@dataclass(frozen=True, slots=True)
class Design:
    """Workers, ranks of each, whether roles are strict, tokens of a step; `None`: the default.

    `prefill_chunk` is that of prefill workers, where it differs; `itl_ms` how long a step that
    decodes may take with prompts in it.
    """

    prefill: int
    decode: int
    mixed: int
    ranks: int = 1
    strict: bool = False
    chunk: int | None = None
    prefill_chunk: int | None = None
    itl_ms: float | None = None

    @property
    def name(self) -> str:
        counts = ((self.prefill, "p"), (self.decode, "d"), (self.mixed, "m"))
        parts = ["".join(f"{count}{role}" for count, role in counts if count)]
        parts += [f"tp{self.ranks}"] if self.ranks > 1 else []
        parts += ["strict"] if self.strict else []
        sizes = (self.prefill_chunk, self.chunk)
        parts += ["/".join(str(size) for size in sizes if size)] if any(sizes) else []
        parts += [f"{self.itl_ms:g}ms"] if self.itl_ms is not None else []
        return " ".join(parts)

    @property
    def is_simulated(self) -> bool:
        """Whether one worker's steps, as they are measured, are those of its workers."""
        return self.ranks == 1 and self.prefill_chunk is None

    @property
    def said(self) -> dict[str, Any]:
        """Options that `tasuki serve` and `tasuki simulate` have in common."""
        strict = {"strict-roles": True} if self.strict else {}
        steps = {"max-batched-tokens": self.chunk, "itl-target-ms": self.itl_ms}
        return strict | {name: value for name, value in steps.items() if value is not None}

    @property
    def serve(self) -> dict[str, Any]:
        roles = ("prefill", "decode", "mixed")
        tp = {f"tp-{role}": self.ranks for role in roles if getattr(self, role)}
        own = {"prefill-option": f"max-batched-tokens={self.prefill_chunk}"}
        return self.said | (tp if self.ranks > 1 else {}) | (own if self.prefill_chunk else {})

    @property
    def topology(self) -> Topology:
        return Topology(self.prefill, self.decode, self.mixed)


def designs(workers: int, chunks: Sequence[int], *, parallel: bool) -> list[Design]:
    """All mixed, every strict split, one soft one, by prompt tokens a step; tensor parallelism."""
    found = []
    for chunk in chunks or (None,):
        found.append(Design(0, 0, workers, chunk=chunk))
        found += [Design(n, workers - n, 0, 1, True, chunk) for n in range(1, workers)]
        found.append(Design(0, 1, workers - 1, chunk=chunk))
        if parallel:
            degrees = (2**n for n in range(1, workers.bit_length()) if workers % 2**n == 0)
            found += [Design(0, 0, workers // n, n, chunk=chunk) for n in degrees]
    return found


def bench(url: str, load: Load) -> dict[str, Any]:
    """One run of `tasuki bench serve`; its result."""
    return output_of([*TASUKI, "bench", "serve", "--base-url", url, "--quiet", *words(load)])


def simulate(design: Design, steps: Path, load: Load) -> dict[str, Any]:
    """The same before workers that are simulated."""
    load = {name: value for name, value in load.items() if name != "temperature"}
    roles = {role: getattr(design, role) for role in ("prefill", "decode", "mixed")}
    said = {**roles, **design.said, "steps": steps}
    return output_of([*TASUKI, "simulate", *words({**said, **load})])


def output_of(command: Sequence[str]) -> dict[str, Any]:
    """What a command of `tasuki` writes to its `--output`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        done = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RunFailedError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return dict(json.loads(output.read_text()))


def goodput(
    result: Mapping[str, Any], ttft_s: float, tpot_s: float, from_s: float = 0.0
) -> tuple[float, float]:
    """Requests a second that meet the objectives, of those due after `from_s`; and their share."""
    requests, sent, met = result["requests"], 0, 0
    fields = (requests[key] for key in ("error", "due_s", "first_s", "end_s", "output_tokens"))
    for error, due, first, end, tokens in zip(*fields, strict=True):
        if due < from_s:
            continue
        sent += 1
        if error or first is None:
            continue
        tpot = (end - first) / max(tokens - 1, 1)
        met += first - due <= ttft_s and tpot <= tpot_s
    return met / max(requests["due_s"][-1] - from_s, 1e-9), met / max(sent, 1)
