"""Host memory that batches are built in, reused from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(slots=True)
class HostArray:
    """A growing one-dimensional array: numpy to write, torch to read, one memory."""

    dtype: torch.dtype
    pinned: bool
    tensor: torch.Tensor = field(init=False)
    array: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._allocate(256)

    def reserve(self, size: int) -> NDArray[Any]:
        """The first `size` elements to write; what they held is lost when the array grows."""
        if size > self.array.shape[0]:
            self._allocate(size * 3 // 2)
        return self.array[:size]

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """The first `size` elements on the device; on the CPU without a copy."""
        view = self.tensor[:size]
        return view if device.type == "cpu" else view.to(device, non_blocking=True)

    def _allocate(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=self.dtype, pin_memory=self.pinned)
        self.array = self.tensor.numpy()


class HostBuffers:
    """One array for each tensor of a batch; pinned when the device is not the CPU."""

    def __init__(self, pinned: bool) -> None:
        self.tokens = HostArray(torch.int64, pinned)
        self.positions = HostArray(torch.int64, pinned)
        self.slots = HostArray(torch.int64, pinned)
        self.block_tables = HostArray(torch.int32, pinned)
        self.logits_rows = HostArray(torch.int64, pinned)


def write_tables(buffer: HostArray, tables: list[Any], width: int) -> None:
    """Fill `[len(tables), width]` with block tables (int32 buffers).

    What a table does not fill repeats its first block: whatever a kernel reads
    there is the sequence's own.
    """
    rows = buffer.reserve(len(tables) * width).reshape(len(tables), width)
    for row, table in zip(rows, tables, strict=True):
        used = min(len(table), width)
        row[:used] = np.frombuffer(table, dtype=np.int32, count=used)
        if used < width:
            row[used:] = table[0]
