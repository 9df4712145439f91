"""Plans of a FlashInfer wrapper for CUDA graphs, from the second of a size on.

`plan` looks at sequences one by one in Python and copies each array to the device by itself,
which takes the host longer than the division of the work. From plan to plan only the arrays
of the step change. So one plan goes through `plan` while the arguments of the kernels' own
planner are recorded; later ones replace the arrays in the record (record.py), and copy them
at once. If they are not found there, every plan goes through `plan`. So does the first of
each number of tokens: a graph of that many is captured behind it, and `run` takes no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tasuki.attention.parts import Chunks
from tasuki.attention.record import Listener, Record

_MODULE, _GIVEN_MODULE = "_cached_module", "_jit_module"  # of a wrapper; `plan` prefers the second
_INDICES = "_paged_kv_indices_buf"


class QuickPlan:
    """The plans of one wrapper.

    Args:
        wrapper: For graphs, with `arrays` as its buffers.
        arrays: Where `Chunks.arrays` go, on the device.
    """

    def __init__(self, wrapper: Any, arrays: torch.Tensor) -> None:
        self.wrapper = wrapper
        self._arrays = arrays
        self._sizes: set[int] = set()  # numbers of tokens that went through `plan`
        self._record: Record | None = None

    def plan(self, chunks: Chunks, pinned: torch.Tensor, in_full: Callable[[], None]) -> None:
        """Divide a step's work.

        Args:
            chunks: Of the step; all its tokens are `chunks.rows`.
            pinned: The wrapper's integer workspace on the host, this time.
            in_full: Calls the wrapper's `plan` with the same.
        """
        given = (chunks.queries, chunks.blocks, chunks.lengths, pinned)
        tokens = chunks.rows.stop
        if self._record is None or tokens not in self._sizes:
            self._sizes.add(tokens)
            self._learn(given, in_full)
            return
        self._record.repeat(*given)
        self._arrays.copy_(chunks.arrays, non_blocking=True)
        indices = getattr(self.wrapper, _INDICES)[: len(chunks.indices)]
        indices.copy_(chunks.indices, non_blocking=True)

    def _learn(self, given: tuple[torch.Tensor, ...], in_full: Callable[[], None]) -> None:
        module = getattr(self.wrapper, _MODULE, None)  # none before the first plan
        if module is None or self._record is not None or not hasattr(self.wrapper, _GIVEN_MODULE):
            in_full()
            return
        listener = Listener(module, ("plan",))
        setattr(self.wrapper, _GIVEN_MODULE, listener)
        try:
            in_full()
        finally:
            setattr(self.wrapper, _GIVEN_MODULE, None)
            setattr(self.wrapper, _MODULE, module)
        self._record = listener.record(given)
