"""Products of few rows with what surrounds them, against PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support.kernels import DEVICE

from tasuki.models import products
from tasuki.models.layers import PlainLinear

SIZE, OUT = 1024, 48
EPS = 1e-5


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with DEVICE:
        yield


def linear(out: int, biased: bool = False) -> PlainLinear:
    return PlainLinear(torch.randn(out, SIZE) * SIZE**-0.5, torch.randn(out) if biased else None)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_normed(rows: int, biased: bool) -> None:
    product, norm = linear(OUT, biased), torch.randn(SIZE)
    x = 3 * torch.randn(rows, SIZE + 16)[:, :SIZE]  # rows that lie apart
    want = product(torch.rms_norm(x, (SIZE,), norm, EPS))
    check(products.normed(product, x, norm, EPS), want)


@pytest.mark.parametrize("rows", [1, 3])
def test_gated(rows: int) -> None:
    product, norm = linear(2 * OUT), torch.randn(SIZE)
    x = 3 * torch.randn(rows, SIZE)
    gate, up = product(torch.rms_norm(x, (SIZE,), norm, EPS)).chunk(2, -1)
    check(products.gated(product, x, norm, EPS), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_add_touches_its_rows_only(rows: int, biased: bool) -> None:
    product, x = linear(OUT, biased), torch.randn(rows, SIZE)
    below = torch.randn(rows + 1, OUT)
    want = below.clone()
    want[:rows] += product(x)
    products.add(product, x, below[:rows])
    check(below, want)


def test_sixteen_bits_are_rounded_once() -> None:
    """As near to the exact sum as the format allows, also where the residual is large."""
    weight = torch.randn(OUT, SIZE).bfloat16()
    x, hidden = torch.randn(2, SIZE).bfloat16(), (100 * torch.randn(2, OUT)).bfloat16()
    want = hidden.double() + x.double() @ weight.double().t()
    products.add(PlainLinear(weight, None), x, hidden)
    # The interpreter cuts what the device rounds.
    error = 2**-8 if DEVICE.type == "cuda" else 2**-7
    assert bool(((hidden.double() - want).abs() <= error * 1.01 * want.abs() + 1e-3).all())


def test_what_is_not_taken() -> None:
    product = linear(OUT)
    assert products.takes(product, products.MAX_ROWS)
    assert not products.takes(product, products.MAX_ROWS + 1)
    assert not products.takes(product.__call__, 1)
    assert not products.takes(PlainLinear(torch.zeros(OUT, SIZE - 16), None), 1)
    assert not products.takes(PlainLinear(torch.zeros(OUT - 8, SIZE), None), 1)
