"""GEMMs of one input made one, in modules of others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tasuki.models.packing import pack


class Attention(nn.Module):
    """Has what is packed, in an order of its own; `bias`: of which GEMMs."""

    def __init__(self, bias: str) -> None:
        super().__init__()
        for name, columns in (("q", 12), ("k", 4), ("v", 4)):
            setattr(self, f"{name}_proj", nn.Linear(8, columns, bias=name in bias))
        self.o_proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, order: str) -> list[torch.Tensor]:
        return [getattr(self, f"{name}_proj")(x) for name in order]


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of every GEMM that is computed."""
    seen: list[int] = []
    plain = nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
        seen.append(weight.shape[0])
        return plain(x, weight, bias)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.functional, "linear", counted)
    return seen


@pytest.mark.parametrize("bias", ["", "qkv"])
@pytest.mark.parametrize("order", ["qkv", "kvq", "vqk", "qvk"])
def test_parts_are_those_of_the_single_gemms(order: str, bias: str, gemms: list[int]) -> None:
    module = nn.ModuleList([Attention(bias), Attention(bias)])
    x, y = torch.randn(2, 1, 5, 8)
    want = [m(z, order) for m in module for z in (x, y)]
    gemms.clear()
    undo = pack(module)
    assert not gemms, "packing computes nothing"
    got = [m(z, order) for m in module for z in (x, y)]
    for parts, expected in zip(got, want, strict=True):
        for a, b in zip(parts, expected, strict=True):
            torch.testing.assert_close(a, b)
    if order == "qkv":
        assert gemms == [20] * 4, "one GEMM of all columns for each module and input"
    undo()
    assert type(module[0].q_proj) is nn.Linear
    torch.testing.assert_close(module[0](x, "v")[0], want[0][order.index("v")])


def test_a_changed_input_is_not_mistaken_for_the_last(gemms: list[int]) -> None:
    module = Attention("")
    x = torch.randn(3, 8)
    want = module(x, "qkv")
    pack(module)
    module(torch.randn(3, 8), "q")  # leaves parts untaken
    for a, b in zip(module(x, "qkv"), want, strict=True):
        torch.testing.assert_close(a, b)


def test_what_differs_is_left_alone() -> None:
    some_biases, other = Attention("q"), Attention("")
    other.v_proj = nn.Sequential(nn.Linear(8, 4))  # type: ignore[assignment]
    module = nn.ModuleList([some_biases, other])
    pack(module)
    assert type(some_biases.q_proj) is nn.Linear
    assert type(other.q_proj) is nn.Linear
