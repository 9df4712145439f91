"""Decode steps as CUDA graphs: one launch instead of several hundred.

A graph is recorded for each of a few batch sizes, the buckets; a batch runs in
the smallest that holds it, padded (attention/batch.py says how). In the graph are
the taking of input tokens, the model's forward and the greedy choice, over all ranks:

    staging ──one copy──▶ slab | tokens sources positions slots | tables |
                                   ▼        ▼                       │ plan (outside)
    sampled tokens of the step before ──▶ forward ──▶ part, best ◀──┘

All graphs share the slab: they run one after another on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch, groups_of
from tasuki.execution.collective import Collective
from tasuki.execution.forward import ForwardModel, input_tokens
from tasuki.execution.inputs import Places, pad
from tasuki.execution.recorder import Outputs, Recorder, Replay, record_all
from tasuki.execution.sampler import JointLogits
from tasuki.execution.step_arrays import Staging, StepHeader, lay_out, slab_parts


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded bucket; tensors are those that its kernels read and write."""

    replay: Replay
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, positions, slots
    outputs: Outputs  # as of `run`, of the whole bucket


def buckets_up_to(max_rows: int) -> list[int]:
    """Batch sizes to record: powers of two to 16, then steps of 16, and the largest itself."""
    sizes = [1, 2, 4, 8, *range(16, max_rows, 16)]
    return [*(size for size in sizes if size < max_rows), max_rows]


class DecodeGraphs:
    """The graphs of one model on one pool.

    Args:
        model: Its forward must be capturable.
        attention: Planned here, outside of the graphs.
        sampled: Tokens of the step before; stays where it is.
        collective: Joins the ranks, which record and replay alike.
        max_rows: The largest batch.
        max_width: Blocks of the longest sequence.
        groups: Cache groups.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        sampled: torch.Tensor,
        collective: Collective,
        *,
        max_rows: int,
        max_width: int,
        groups: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampled = sampled
        self.buckets = buckets_up_to(max_rows)
        self._collective = collective
        self._joint = JointLogits(collective, model.spec.vocab_size)
        self._width = max_width
        self._groups = groups
        self._graphs: dict[int, _Graph] = {}
        size = lay_out(slab_parts(max_rows, max_rows, max_width, 0, groups))[1]
        self._slab = torch.zeros(size, dtype=torch.uint8, device=sampled.device)
        self._all_rows = torch.arange(max_rows, device=sampled.device)

    def capture(self, staging: Staging, recorder: Recorder) -> None:
        """Record every bucket, the largest first: the others fit into its memory."""
        self._graphs = record_all(
            self.buckets,
            lambda bucket: self._record(bucket, staging, recorder),
            "rows in a batch:",
        )

    def bucket_for(self, rows: int) -> int | None:
        """The bucket for so many decodes; None: they are too many."""
        return next((bucket for bucket in self.buckets if bucket >= rows), None)

    def run(self, header: StepHeader, staging: Staging) -> Outputs:
        """Run the decode batch that `staging` holds.

        Returns:
            This rank's part of the logits, [R, w] float32, and `greedy` of all of them.
        """
        bucket, count = header.rows, header.num_decodes
        graph = self._graphs[bucket]
        tables = staging.send(self._slab)[4]
        self._attention.plan(self._batch(bucket, graph.inputs, tables, header.context_lens))
        graph.replay()
        part, best = graph.outputs
        return part[:count], best[:count]

    def _record(self, bucket: int, staging: Staging, recorder: Recorder) -> _Graph:
        """Record one bucket over a batch whose every row is padding of one token."""
        *arrays, _ = staging.take(*slab_parts(bucket, bucket, self._width, 0, self._groups))
        pad(Places.over(arrays, bucket), 0)
        tokens, sources, positions, slots, tables, _ = staging.send(self._slab)
        taken = torch.zeros_like(tokens)
        batch = self._batch(
            bucket,
            (taken, positions, slots),
            tables,
            [1] * bucket,
        )
        self._attention.plan(batch)

        def work() -> Outputs:
            known = input_tokens(tokens, sources, self._sampled)
            taken.copy_(self._collective.from_first(known))
            part = self._model.forward(batch, self._attention)
            return part, self._joint.best(part)

        replay, outputs = recorder.record(work)
        return _Graph(replay, (taken, positions, slots), outputs)

    def _batch(
        self,
        bucket: int,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        contexts: list[int],
    ) -> Batch:
        tokens, positions, all_slots = inputs
        (slots, block_tables), *more = groups_of(all_slots, tables, bucket, bucket)
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            query_lens=[1] * len(contexts),
            context_lens=contexts,
            logits_rows=self._all_rows[:bucket],
            num_decodes=len(contexts),
            bucket=bucket,
            more_groups=tuple(more),
        )
