"""A planned FlashInfer wrapper, called for one layer after another.

`run` checks its arguments and gathers forty of the kernel's, which takes the host
longer than the launch. Between two plans only four of them change from layer to
layer: the query, the keys, the values and the result. So the first layer goes through
`run`, while the kernel's arguments are recorded; for the other layers those four are
replaced in the record.

The four are found in the record by object identity. If one of them is not found exactly
once, every layer goes through `run`. This file owns no state beyond a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        self._kernel: Callable[..., object] | None = None
        self._arguments: list[Any] = []
        self._places: tuple[int, ...] = ()

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend, as the wrapper is planned; shapes and dtypes as in the plan's first call."""
        given = (query, keys, values, out)
        if self._kernel is not None:
            for place, tensor in zip(self._places, given, strict=True):
                self._arguments[place] = tensor
            self._kernel(*self._arguments)
        elif self._known or not hasattr(self.wrapper, _MODULE):
            self._run(query, keys, values, out)
        else:
            self._learn(given)

    def _run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        cache = ((keys, values),) if self.paged else (keys, values)
        self.wrapper.run(query, *cache, out=out)

    def _learn(self, given: tuple[torch.Tensor, ...]) -> None:
        self._known = True
        module = getattr(self.wrapper, _MODULE)
        listener = _Listener(module)
        setattr(self.wrapper, _MODULE, listener)
        try:
            self._run(*given)
        finally:
            setattr(self.wrapper, _MODULE, module)
        if len(listener.calls) != 1:
            return
        [(kernel, arguments)] = listener.calls
        places = [
            [at for at, argument in enumerate(arguments) if argument is tensor] for tensor in given
        ]
        if all(len(found) == 1 for found in places):
            self._kernel, self._arguments = kernel, list(arguments)
            self._places = tuple(found[0] for found in places)


class _Listener:
    """A module that notes how its kernels are called."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._module, name)
        if name not in _CALLED:
            return kernel

        def call(*arguments: Any) -> object:
            self.calls.append((kernel, arguments))
            return kernel(*arguments)

        return call
