"""Records work into CUDA graphs.

All graphs share one memory pool: they run one after another on one stream. What
one leaves is used on that stream before another one runs, so it is not kept from
the graphs recorded after it (`unowned`): that of all together would take gigabytes.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)

_Recorded = TypeVar("_Recorded")

Outputs = tuple[torch.Tensor, torch.Tensor]
"""What a graph leaves; whoever records it says what they are."""

Replay = Callable[[], None]

WARM_UPS = 2  # runs before recording: kernels compile and libraries allocate in the first


class Recorder(Protocol):
    """Turns work into something that can be replayed."""

    def record(
        self, work: Callable[[], Outputs], warm_ups: int = WARM_UPS
    ) -> tuple[Replay, Outputs]:
        """Record `work`, run so often before: the replay and its outputs."""


class CudaRecorder:
    """`Recorder` with CUDA graphs."""

    def __init__(self) -> None:
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        gc.collect()  # what is freed during a capture may end it

    def record(
        self, work: Callable[[], Outputs], warm_ups: int = WARM_UPS
    ) -> tuple[Replay, Outputs]:
        """See `Recorder.record`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what the transport's threads do on the device is not our work.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            one, other = work()
        return graph.replay, (unowned(one), unowned(other))


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
