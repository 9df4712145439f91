"""Decode steps as CUDA graphs: one launch instead of several hundred.

A graph is recorded for each of a few batch sizes, the buckets; a batch runs in
the smallest that holds it, padded (engine/batch.py says how). In the graph are
the taking of input tokens, the model's forward and the greedy choice:

    staging ──one copy──▶ slab | tokens sources positions slots | tables |
                                   ▼        ▼                       │ plan (outside)
    sampled tokens of the step before ──▶ forward ──▶ logits, best ◀┘

All graphs share the slab and one memory pool: they run one after another on one
stream, and what they leave is used on that stream before the next one runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.engine.collective import Collective
from tasuki.engine.forward import ForwardModel, input_tokens
from tasuki.engine.host_buffers import Staging, lay_out
from tasuki.engine.inputs import Places, Wanted
from tasuki.engine.sampler import greedy
from tasuki.engine.step_builder import pad
from tasuki.engine.step_header import StepHeader, slab_parts

log = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, torch.Tensor]
"""Logits [bucket, V] float32, and what `greedy` says of them."""

_WARM_UPS = 2  # runs before recording: kernels compile and libraries allocate in the first


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded bucket; tensors are those that its kernels read and write."""

    replay: Callable[[], None]
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, positions, slots
    outputs: Outputs


class _Memory:
    """A tensor's place on the device, which it does not keep."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int64: "<i8"}[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, not kept from others."""
    if not tensor.is_cuda or not tensor.numel():
        return tensor
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device)


class CudaRecorder:
    """Records work into CUDA graphs that share their memory.

    What a graph leaves is not kept from the graphs recorded after it: the
    logits of all buckets would take more than a gigabyte.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run `work` a few times, then record it; returns the replay and its outputs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what the transport's threads do on the device is not our work.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits, best = work()
        return graph.replay, (_unowned(logits), _unowned(best))


Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]


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
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampled = sampled
        self._buckets = buckets_up_to(max_rows)
        self._collective = collective
        self._width = max_width
        self._graphs: dict[int, _Graph] = {}
        size = lay_out(slab_parts(max_rows, max_rows, max_width, 0))[1]
        self._slab = torch.zeros(size, dtype=torch.uint8, device=sampled.device)
        self._all_rows = torch.arange(max_rows, device=sampled.device)

    def capture(self, staging: Staging, recorder: Recorder) -> None:
        """Record every bucket, the largest first: the others fit into its memory."""
        begin_s = time.monotonic()
        for done, bucket in enumerate(reversed(self._buckets), 1):
            self._graphs[bucket] = self._record(bucket, staging, recorder)
            log.info(
                "CUDA graphs: %d of %d recorded (batches of %d), %.1f s",
                done,
                len(self._buckets),
                bucket,
                time.monotonic() - begin_s,
            )

    def bucket_for(self, wanted: Wanted) -> int | None:
        """The bucket for a step that samples so; None: it does not run in a graph."""
        if not wanted.decodes:
            return None
        rows = len(wanted.draws)
        return next((bucket for bucket in self._buckets if bucket >= rows), None)

    def run(self, header: StepHeader, staging: Staging) -> Outputs:
        """Run the decode batch that `staging` holds: logits [rows, V], and `greedy` of them."""
        bucket, count = header.rows, header.num_decodes
        graph = self._graphs[bucket]
        tables = staging.send(self._slab)[4].view(bucket, header.width)
        self._attention.plan(self._batch(bucket, graph.inputs, tables, header.context_lens))
        graph.replay()
        logits, best = graph.outputs
        return logits[:count], best[:count]

    def _record(self, bucket: int, staging: Staging, recorder: Recorder) -> _Graph:
        """Record one bucket over a batch whose every row is padding of one token."""
        *arrays, _ = staging.take(*slab_parts(bucket, bucket, self._width, 0))
        pad(Places.over(arrays, bucket), 0)
        tokens, sources, positions, slots, tables, _ = staging.send(self._slab)
        taken = torch.zeros_like(tokens)
        batch = self._batch(
            bucket,
            (taken, positions, slots),
            tables.view(bucket, self._width),
            [1] * bucket,
        )
        self._attention.plan(batch)

        def work() -> Outputs:
            known = input_tokens(tokens, sources, self._sampled)
            taken.copy_(self._collective.from_first(known))
            logits = self._model.forward(batch, self._attention)
            return logits, greedy(logits)

        replay, outputs = recorder(work)
        return _Graph(replay, (taken, positions, slots), outputs)

    def _batch(
        self,
        bucket: int,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        contexts: list[int],
    ) -> Batch:
        tokens, positions, slots = inputs
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            block_tables=tables,
            query_lens=[1] * len(contexts),
            context_lens=contexts,
            logits_rows=self._all_rows[:bucket],
            num_decodes=len(contexts),
            bucket=bucket,
        )
