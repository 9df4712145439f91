"""What a planned wrapper's kernel is called with, layer after layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasuki.attention.quick_call import QuickCall


class Wrapper:
    """Gathers a kernel's arguments as FlashInfer's wrappers do, and counts how often."""

    def __init__(self, kernel: str, *, copies: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.runs = 0
        self._name, self._copies = kernel, copies
        self._workspace = torch.zeros(1)
        self._cached_module = SimpleNamespace(**{kernel: self._kernel, "plan": len})

    def _kernel(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        out = arguments[5]
        out.copy_(arguments[1] + arguments[2] * arguments[3])

    def run(self, query: torch.Tensor, *cache: Any, out: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        keys, values = cache[0] if isinstance(cache[0], tuple) else cache
        if self._copies:
            query = query.clone()
        kernel = getattr(self._cached_module, self._name)
        kernel(self._workspace, query, keys, values, 7, out, None, 0.5)
        return out


def layers(count: int) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return [tuple(torch.randn(4) for _ in range(3)) for _ in range(count)]


@pytest.mark.parametrize(("kernel", "paged"), [("paged_run", True), ("ragged_run", False)])
def test_all_layers_but_the_first_go_straight_to_the_kernel(kernel: str, paged: bool) -> None:
    wrapper = Wrapper(kernel)
    module = wrapper._cached_module
    call = QuickCall(wrapper, paged=paged)
    for query, keys, values in layers(4):
        out = torch.empty(4)
        call.run(query, keys, values, out)
        assert torch.equal(out, query + keys * values)
    assert wrapper.runs == 1
    assert len(wrapper.calls) == 4
    assert wrapper._cached_module is module
    for arguments in wrapper.calls:
        assert arguments[0] is wrapper._workspace
        assert arguments[4] == 7
        assert arguments[6:] == (None, 0.5)


def test_where_the_places_are_not_clear_every_layer_goes_through_run() -> None:
    wrapper = Wrapper("paged_run", copies=True)
    call = QuickCall(wrapper, paged=True)
    for query, keys, values in layers(3):
        out = torch.empty(4)
        call.run(query, keys, values, out)
        assert torch.equal(out, query + keys * values)
    assert wrapper.runs == 3


def test_what_run_raises_leaves_the_wrapper_as_it_was() -> None:
    wrapper = Wrapper("paged_run")
    module = wrapper._cached_module
    with pytest.raises(RuntimeError):
        QuickCall(wrapper, paged=True).run(*layers(1)[0], torch.empty(3))
    assert wrapper._cached_module is module
