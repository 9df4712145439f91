"""A planned FlashInfer wrapper, called for one layer after another.

`run` checks its arguments and gathers forty of the kernel's, which takes the host
longer than the launch. Between two plans only four of them change from layer to
layer: the query, the keys, the values and the result. So the first layer goes through
`run`, while the kernel's arguments are recorded; for the other layers those four are
replaced in the record (record.py). If they are not found there, every layer goes through
`run`. This file owns no state beyond a step.
"""

from __future__ import annotations

from typing import Any

import torch

from tasuki.attention.record import Listener, Record

_MODULE = "_cached_module"  # of a wrapper: where its kernels are
_CALLED = ("paged_run", "ragged_run", "run")


class QuickCall:
    """One plan of one wrapper.

    Args:
        wrapper: Planned; not planned again while this is used.
        paged: Whether `run` takes keys and values as a pair.
    """

    def __init__(self, wrapper: Any, *, paged: bool) -> None:
        self.paged = paged
        self.wrapper = wrapper
        self._known = False
        self._record: Record | None = None

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend, as the wrapper is planned; shapes and dtypes as in the plan's first call."""
        if self._record is not None:
            self._record.repeat(query, keys, values, out)
        elif self._known or not hasattr(self.wrapper, _MODULE):
            self._run(query, keys, values, out)
        else:
            self._learn(query, keys, values, out)

    def _run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        cache = ((keys, values),) if self.paged else (keys, values)
        self.wrapper.run(query, *cache, out=out)

    def _learn(self, *given: torch.Tensor) -> None:
        self._known = True
        module = getattr(self.wrapper, _MODULE)
        listener = Listener(module, _CALLED)
        setattr(self.wrapper, _MODULE, listener)
        try:
            self._run(*given)
        finally:
            setattr(self.wrapper, _MODULE, module)
        self._record = listener.record(given)
