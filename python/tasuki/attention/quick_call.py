"""FlashInfer's compiled functions, called without the Python around them.

Its wrappers check and gather their arguments anew each time, which takes the host longer than
what they do with them. So one call goes through the wrapper, while the arguments of the
compiled function are recorded; later calls replace in the record what changes, and go straight
to the function.

    QuickCall   `run`, some forty arguments: from layer to layer of a step, the query, the keys,
                the values and the result change
    QuickPlan   `plan` for CUDA graphs, sequences looked at one by one: from step to step its
                arrays change, and they are copied to the device at once

What changes is found in the record by object identity. If it is not found there exactly once,
all calls go through the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tasuki.attention.parts import Chunks

# Of a wrapper: where its functions are, which `plan` sets from the second if there is one.
_MODULE, _GIVEN_MODULE = "_cached_module", "_jit_module"
_INDICES = "_paged_kv_indices_buf"
_RUNS = ("paged_run", "ragged_run", "run")


class QuickCall:
    """The layers of one plan of one wrapper; the first goes through `run`.

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
        listener = Listener(module, _RUNS)
        setattr(self.wrapper, _MODULE, listener)
        try:
            self._run(*given)
        finally:
            setattr(self.wrapper, _MODULE, module)
        self._record = listener.record(given)


class QuickPlan:
    """The plans of one wrapper for graphs.

    The first of each number of tokens goes through `plan`: a graph of that many is captured
    behind it, and `run` takes no other.

    Args:
        wrapper: With `arrays` as its buffers.
        arrays: Where `Chunks.arrays` go, on the device.
    """

    def __init__(self, wrapper: Any, arrays: torch.Tensor) -> None:
        self._wrapper = wrapper
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
        indices = getattr(self._wrapper, _INDICES)[: len(chunks.indices)]
        indices.copy_(chunks.indices, non_blocking=True)

    def _learn(self, given: tuple[torch.Tensor, ...], in_full: Callable[[], None]) -> None:
        module = getattr(self._wrapper, _MODULE, None)  # none before the first plan
        if module is None or self._record is not None or not hasattr(self._wrapper, _GIVEN_MODULE):
            in_full()
            return
        listener = Listener(module, ("plan",))
        setattr(self._wrapper, _GIVEN_MODULE, listener)
        try:
            in_full()
        finally:
            setattr(self._wrapper, _GIVEN_MODULE, None)
            setattr(self._wrapper, _MODULE, module)
        self._record = listener.record(given)


class Record:
    """A call of a compiled function, and where in it its changing arguments are.

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
