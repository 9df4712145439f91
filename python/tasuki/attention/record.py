"""A call of FlashInfer's compiled functions, recorded, and repeated with other tensors.

Its Python checks and gathers many arguments, few of which change from call to call.
What changes is found in the record by object identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Record:
    """A call, and where in it its changing arguments are.

    Args:
        function: That was called.
        arguments: It was called with these.
        places: Of the changing ones.
    """

    def __init__(
        self, function: Callable[..., object], arguments: Sequence[Any], places: Sequence[int]
    ) -> None:
        self._function = function
        self._arguments = list(arguments)
        self._places = tuple(places)

    def repeat(self, *given: torch.Tensor) -> None:
        """Call again with these at the places, in their order."""
        for place, tensor in zip(self._places, given, strict=True):
            self._arguments[place] = tensor
        self._function(*self._arguments)


class Listener:
    """A module that notes how some of its functions are called.

    Args:
        module: Calls go to it.
        names: Of the functions.
    """

    def __init__(self, module: Any, names: Sequence[str]) -> None:
        self._module = module
        self._names = names
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in self._names:
            return function

        def call(*arguments: Any) -> object:
            self._calls.append((function, arguments))
            return function(*arguments)

        return call

    def record(self, given: Sequence[torch.Tensor]) -> Record | None:
        """What was called; None: not one call, or one that has not one place for each given."""
        if len(self._calls) != 1:
            return None
        [(function, arguments)] = self._calls
        places = [
            [at for at, argument in enumerate(arguments) if argument is tensor] for tensor in given
        ]
        if any(len(found) != 1 for found in places):
            return None
        return Record(function, arguments, [found[0] for found in places])
