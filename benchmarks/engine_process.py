"""One engine of engine_vs_peers.py in a process of its own, and what is measured of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUIET_CORES = 0.15


@dataclass(frozen=True)
class Scenario:
    """Requests of one shape, submitted at once."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int


SINGLE = Scenario("one at a time", 1, 128, 64)
EIGHT = Scenario("8 at a time", 8, 128, 32)
PREFILL = Scenario("prompt of 512", 1, 512, 2)
SCENARIOS = (SINGLE, EIGHT, PREFILL)
RATES = ((SINGLE, "decode_tok_s"), (EIGHT, "output_tok_s"), (PREFILL, "prompt_tok_s"))


@dataclass(frozen=True)
class Measured:
    """One engine in one round of one scenario."""

    decode_tok_s: float  # of one request, first token to last
    output_tok_s: float  # of all, submission to last token
    prompt_tok_s: float  # of all, submission to the last request's first token
    ttft_ms: float  # mean over requests
    tpot_ms: float  # mean over requests
    other_cores: float  # used by other processes meanwhile


@dataclass
class Candidate:
    """One engine with its settings, in a process of its own."""

    engine: str
    dtype: str
    threads: int
    process: subprocess.Popen[str]
    kernels: str = ""
    versions: str = ""
    rounds: dict[str, list[Measured]] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        kernels = f" ({self.kernels})" if self.kernels else ""
        return f"{self.engine} {self.dtype} {self.threads} threads{kernels}"

    def read(self) -> dict[str, Any]:
        """Next answer; the process has died if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _other_cpu_s(self) -> float:
        """Processor seconds that all processes but this one have used so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal
        total = [int(t) for t in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (sum(total) - total[3] - total[4] - int(stat[11]) - int(stat[12])) / ticks

    def quietest(self, scenario: Scenario, prompts: list[list[int]], tries: int) -> Measured:
        """`run`, again while others are busy."""
        best = self.run(scenario, prompts)
        for _ in range(tries - 1):
            if best.other_cores <= QUIET_CORES:
                break
            time.sleep(1.0)
            best = min(best, self.run(scenario, prompts), key=lambda m: m.other_cores)
        return best

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Measured:
        assert self.process.stdin is not None
        request = {"prompts": prompts, "output_tokens": scenario.output_tokens}
        clock, others = time.monotonic(), self._other_cpu_s()
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.read()
        others = (self._other_cpu_s() - others) / (time.monotonic() - clock)
        times, self.tokens = answer["times"], answer["tokens"]
        if any(len(t) != scenario.output_tokens for t in self.tokens):
            raise RuntimeError(f"{self.name} answered {[len(t) for t in self.tokens]} tokens")
        spans = [(t[-1] - t[0]) / (len(t) - 1) for t in times]
        return Measured(
            decode_tok_s=1 / statistics.mean(spans),
            output_tok_s=sum(map(len, times)) / max(t[-1] for t in times),
            prompt_tok_s=sum(map(len, prompts)) / max(t[0] for t in times),
            ttft_ms=1e3 * statistics.mean(t[0] for t in times),
            tpot_ms=1e3 * statistics.mean(spans),
            other_cores=max(0.0, others),
        )
