"""What follows a step's last attention as CUDA graphs, to the greedy choice of the rows wanted.

The graphs of the model's body (mixed_graphs.py) leave their outputs at an address of their
own each. The rows wanted are copied from there to fixed buffers, which all graphs here read:

    body ──rows wanted──▶ buffers ──▶ finish, greedy choice ──▶ part, best

A graph is recorded for each of a few numbers of rows, the buckets, and padded at the end.
Padding holds rows of earlier steps: nothing reads what is computed of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.execution.collective import Collective
from tasuki.execution.forward import Body, DivisibleModel
from tasuki.execution.recorder import Outputs, Recorder, Replay, record_all
from tasuki.execution.sampler import JointLogits


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded bucket."""

    replay: Replay
    outputs: Outputs  # as of `run`, of the whole bucket


def buckets_up_to(max_rows: int) -> list[int]:
    """Numbers of rows to record: the powers of two below the largest, and the largest itself.

    Each adds some 50 ms to a worker's start, so they are fewer than those of decodes. Padding
    at most doubles the rows, and passes through the end of one layer and the head only.
    """
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


class FinishGraphs:
    """The graphs of one model.

    Args:
        model: Its `finish` must be capturable.
        collective: Joins the ranks, which record and replay alike.
        max_rows: Wanted of a step; more are computed without a graph.
    """

    def __init__(self, model: DivisibleModel, collective: Collective, max_rows: int) -> None:
        self._model = model
        self._joint = JointLogits(collective, model.spec.vocab_size)
        self._buckets = buckets_up_to(max_rows)
        self._buffers: list[torch.Tensor] = []  # as `Body`, of the rows of the largest bucket
        self._graphs: dict[int, _Graph] = {}

    def capture(self, body: Body, recorder: Recorder) -> None:
        """Record every bucket, the largest first: the others fit into its memory.

        Args:
            body: Tells the buffers' widths, dtypes and device.
            recorder: Its memory may be `body`'s too.
        """
        self._buffers = [x.new_zeros(self._buckets[-1], x.shape[1]) for x in body]
        self._graphs = record_all(
            self._buckets, lambda bucket: self._record(bucket, recorder), "rows wanted:"
        )

    def run(self, body: Body, rows: torch.Tensor) -> Outputs:
        """Compute what is wanted of a body's outputs.

        Args:
            body: The graphs may overwrite it.
            rows: [R] int64, at least one.

        Returns:
            This rank's part of the logits, [R, w] float32, and `greedy` of all of them.
        """
        count = rows.shape[0]
        bucket = next((bucket for bucket in self._buckets if bucket >= count), None)
        if bucket is None:
            return self._outputs(body, rows)
        for source, target in zip(body, self._buffers, strict=True):
            torch.index_select(source, 0, rows, out=target[:count])
        graph = self._graphs[bucket]
        graph.replay()
        part, best = graph.outputs
        return part[:count], best[:count]

    def _record(self, bucket: int, recorder: Recorder) -> _Graph:
        hidden, attended = (buffer[:bucket] for buffer in self._buffers)

        def work() -> Outputs:
            # A copy, which is overwritten: padding would else grow with every step.
            return self._outputs((hidden.clone(), attended), None)

        return _Graph(*recorder.record(work, warm_ups=1))  # decodes were recorded before

    def _outputs(self, body: Body, rows: torch.Tensor | None) -> Outputs:
        part = self._model.finish(body, rows)
        return part, self._joint.best(part)
