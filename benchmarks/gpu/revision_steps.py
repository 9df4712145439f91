"""One tree's part in `revisions.py`: its decode steps, run when asked to.

    python -P revision_steps.py FD FOLDER        PYTHONPATH begins with FOLDER's own modules

A process of its own: Tasuki, and what benchmarks/gpu has for a step, are those of
the tree in FOLDER. Questions come over the connection at the descriptor FD, first
what `Steps` is made of, then (method, arguments); each of these is answered by
(result, None) or (None, traceback).
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shapes import write_model
from step_bench import Bench, Work

import tasuki
from tasuki.attention.base import AttentionBackend
from tasuki.models.base import CausalModel
from tasuki.models.dummy import DummyTensors
from tasuki.models.loader import load_model

try:
    from tasuki.attention.batch import Batch
    from tasuki.execution.recorder import CudaRecorder, Outputs
    from tasuki.execution.sampler import greedy
except ImportError:  # an older revision
    from tasuki.engine.batch import Batch
    from tasuki.engine.recorder import CudaRecorder, Outputs
    from tasuki.engine.sampler import greedy

BLOCK_SIZE = 32


class UnevenTensors(DummyTensors):
    """Dummy weights with norms that are not all 1, so that one left out shows in the logits."""

    def tensor(self, name: str, *arguments: Any) -> torch.Tensor:
        """See `DummyTensors.tensor`."""
        made = super().tensor(name, *arguments)
        if name.endswith("norm.weight"):
            made += 0.3 * torch.randn_like(made)
        return made


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step; `run` runs it again, on CUDA as a graph, and gives its logits."""

    run: Callable[[], torch.Tensor]
    attention: AttentionBackend
    batch: Batch


class Steps:
    """Decode steps of the tree's model, by their number of rows."""

    def __init__(
        self,
        device: str,
        config: dict[str, Any],
        context_tokens: int,
        most_rows: int,
        quantization: str,
    ) -> None:
        """Load the model, fill its cache with random numbers; the same ones in every tree."""
        self._context_tokens = context_tokens
        self._model = _model(torch.device(device), config, quantization)
        torch.manual_seed(2)
        blocks = most_rows * -(-context_tokens // BLOCK_SIZE)
        self._bench = Bench(self._model, torch.device(device), blocks * BLOCK_SIZE)
        self._steps: dict[int, Step] = {}

    def prepare(self, rows: int) -> None:
        """Make the step of so many rows: kernels are compiled, the graph is recorded."""
        work = Work(f"{rows} x {self._context_tokens}", (self._context_tokens,) * rows)
        attention = self._bench.attention(BLOCK_SIZE)
        batch = self._bench.batch(work, BLOCK_SIZE, graph=True)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._model.forward(batch, attention)
            return logits, greedy(logits)

        with torch.inference_mode():
            attention.plan(batch)
            run = _recorded(forward) if self._bench.on_cuda else lambda: forward()[0]
        self._steps[rows] = Step(run, attention, batch)

    def logits(self, rows: int, replays: int) -> dict[str, Any]:
        """What the step leaves: float32 [rows, vocabulary], and how many replays left these bits.

        On CUDA beside those of cuBLAS with kernels between, launched one by one.
        """
        step = self._steps[rows]
        with torch.inference_mode():
            step.attention.plan(step.batch)
            found = [step.run().clone() for _ in range(replays)]
        return {
            "logits": found[0].float().cpu().numpy(),
            "exact": self._exact(step) if self._bench.on_cuda else None,
            "same_replays": sum(torch.equal(each, found[0]) for each in found),
        }

    def ms(self, rows: int, repeats: int) -> float:
        """Median of the device's time for the step."""
        step = self._steps[rows]
        with torch.inference_mode():
            step.attention.plan(step.batch)
            return self._bench.device_ms(step.run, repeats)

    def _exact(self, step: Step) -> Any:
        try:
            from tasuki.models.gemms import FewRows
        except ImportError:  # an older revision
            from tasuki.models.products import FewRows

        with torch.inference_mode(), patch.object(FewRows, "takes", lambda *_: False):
            step.attention.plan(step.batch)
            return self._model.forward(step.batch, step.attention).float().cpu().numpy()


def _model(device: torch.device, config: dict[str, Any], quantization: str) -> CausalModel:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("tasuki.models.loader.DummyTensors", UnevenTensors),
    ):
        path = write_model(Path(folder), config)
        # Older revisions know no quantization.
        more = {} if quantization == "none" else {"quantization": quantization}
        return load_model(path, dtype=dtype, device=device, weights="dummy", **more)


def _recorded(forward: Callable[[], Outputs]) -> Callable[[], torch.Tensor]:
    replay, (logits, _) = CudaRecorder().record(forward)

    def run() -> torch.Tensor:
        replay()
        return logits

    return run


def main() -> None:
    """Answer until the connection ends."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    if not Path(tasuki.__file__).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"Tasuki comes from {tasuki.__file__}, not from {folder}: is it complete?")
    steps = Steps(**connection.recv())
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(steps, method)(*arguments), None))
        except Exception:
            connection.send((None, traceback.format_exc()))


if __name__ == "__main__":
    main()
