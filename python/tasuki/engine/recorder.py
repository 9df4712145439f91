"""Records work into CUDA graphs: whole, or in pieces with attention between them.

    whole     | forward, greedy |                                  one graph
    pieces    | piece | attend | piece | attend | .. | piece | attend     a graph a piece

A forward is cut while it runs: the model is given an attention that ends the
piece under way and begins the next one. So attention may look at the batch's
lists, on the host, whenever the pieces are replayed; what lies between must not.

All graphs share one memory pool: they run one after another on one stream, and
what one leaves is used on that stream before another one runs. Nothing they
leave is kept from the graphs recorded after them: the logits and the queries of
all of them would take gigabytes.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.engine.forward import Body

log = logging.getLogger(__name__)

_Recorded = TypeVar("_Recorded")

Outputs = tuple[torch.Tensor, torch.Tensor]
"""This rank's part of the logits, [bucket, w] float32, and `greedy` of all of them."""

Replay = Callable[[], None]

_WARM_UPS = 2  # runs before recording: kernels compile and libraries allocate in the first


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention between two pieces; its tensors lie where the pieces expect them."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    sliding_window: int | None
    written: bool
    out: torch.Tensor

    def run(self, attention: AttentionBackend) -> None:
        """Attend, as `attention` is planned."""
        attention.forward(
            self.layer,
            self.query,
            self.key,
            self.value,
            scale=self.scale,
            sliding_window=self.sliding_window,
            written=self.written,
            out=self.out,
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    """A recorded body: pieces, each with the attention that follows it, and what they leave."""

    parts: tuple[tuple[Replay, AttentionCall], ...]
    body: Body

    def run(self, attention: AttentionBackend) -> Body:
        """Run it all; the result is overwritten by the next graph."""
        for replay, call in self.parts:
            replay()
            call.run(attention)
        return self.body


class Recorder(Protocol):
    """Turns work into something that can be replayed."""

    def whole(self, work: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        """Record `work`: the replay and its outputs."""

    def pieces(
        self, work: Callable[[AttentionBackend], Body], attention: AttentionBackend
    ) -> Pieces:
        """Record `work`, a model's body, cut at each call of attention's `forward`.

        Args:
            work: Calls the `forward` of what it is given once for each layer in
                the pool, and launches nothing after the last one.
            attention: Planned for what `work` computes.
        """


class CudaRecorder:
    """`Recorder` with CUDA graphs."""

    def __init__(self) -> None:
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        gc.collect()  # what is freed during a capture may end it

    def whole(self, work: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        """Run `work` a few times, then record it; see `Recorder.whole`."""
        self._warm_up(work, _WARM_UPS)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what the transport's threads do on the device is not our work.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            part, best = work()
        return graph.replay, (unowned(part), unowned(best))

    def pieces(
        self, work: Callable[[AttentionBackend], Body], attention: AttentionBackend
    ) -> Pieces:
        """Run `work` once, then record it; see `Recorder.pieces`."""
        self._warm_up(lambda: work(attention), 1)
        with torch.cuda.stream(self._stream):
            cutter = _Cutter(attention, self._memory)
            hidden, attended = work(cutter)
        torch.cuda.current_stream().wait_stream(self._stream)
        return Pieces(tuple(cutter.parts), (unowned(hidden), unowned(attended)))

    def _warm_up(self, work: Callable[[], object], times: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)


class _Cutter:
    """Attention for a body that is recorded: cuts it instead of attending. Records at once."""

    capturable = True

    def __init__(self, attention: AttentionBackend, memory: Any) -> None:
        self.pool = attention.pool
        self.parts: list[tuple[Replay, AttentionCall]] = []
        self._memory = memory  # of the graphs
        self._begin()

    def plan(self, batch: Batch) -> None:
        """Nothing is computed: nothing to prepare."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """End a piece; begin the next one, unless this was the last layer."""
        if out is None:  # memory of the graphs: they are still recording
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._graph.capture_end()
        call = AttentionCall(
            layer,
            unowned(query),
            unowned(key),
            unowned(value),
            scale,
            sliding_window,
            written,
            unowned(out),
        )
        self.parts.append((self._graph.replay, call))
        if len(self.parts) < self.pool.shape[2]:
            self._begin()
        return out

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")


class _Memory:
    """Bytes on the device, which it does not keep."""

    def __init__(self, begin: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (begin, False),
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, not kept from others."""
    if not tensor.is_cuda or not tensor.numel():
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    memory = _Memory(tensor.data_ptr(), elements * tensor.itemsize)
    raw = torch.as_tensor(memory, device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def record_all(
    sizes: Sequence[int], record: Callable[[int], _Recorded], name: str
) -> dict[int, _Recorded]:
    """Record every size, given in rising order, the largest first: the others fit into its memory.

    Args:
        sizes: Of the graphs.
        record: Records one.
        name: What a size is, for the log.
    """
    begin_s = time.monotonic()
    recorded = {}
    for done, size in enumerate(reversed(sizes), 1):
        recorded[size] = record(size)
        took_s = time.monotonic() - begin_s
        log.info(
            "CUDA graphs: %d of %d recorded (%s %d), %.1f s", done, len(sizes), name, size, took_s
        )
    return recorded
