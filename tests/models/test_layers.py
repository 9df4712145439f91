"""GEMMs with a packed weight: right at every row count, and of few shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.execution.collective import Alone
from tasuki.models.layers import PlainLinear, SummedLinear, make_linear, padded_rows


def test_few_row_counts_reach_the_kernels() -> None:
    """Each costs about 1 MB and its compilation; decode batches are not padded."""
    assert [padded_rows(rows) for rows in range(1, 17)] == list(range(1, 17))
    counts = {padded_rows(rows) for rows in range(1, 513)}
    assert len(counts) == 44
    for rows in range(17, 5000):
        assert rows <= padded_rows(rows) <= (1.25 if rows <= 128 else 1.125) * rows


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 100, 257])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_a_plain_gemm(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator)
    bias = torch.randn(96, generator=generator) if with_bias else None
    x = torch.randn(rows, 64, generator=generator)
    with torch.inference_mode():
        result = make_linear(weight, bias)(x)
        torch.testing.assert_close(result, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
        assert result.shape == (rows, 96)


class Placed(Alone):
    """A collective with a place for sums of up to two rows; the other rank's part is ones."""

    size = 2

    def __init__(self) -> None:
        self.memory = torch.full((2, 3), float("nan"))
        self.placed: list[bool] = []

    def place(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        assert (width, dtype) == (3, torch.float32)
        return self.memory[:rows] if rows <= len(self.memory) else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.placed.append(x.data_ptr() == self.memory.data_ptr())
        return x + 1


@pytest.mark.parametrize("biased", [False, True])
def test_a_part_of_a_sum_is_written_where_the_ranks_read_it(biased: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 5)
    bias = torch.randn(3) if biased else None
    collective = Placed()
    gemm = SummedLinear(PlainLinear(weight, bias), collective)
    for rows in (1, 2, 4):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(gemm(x), F.linear(x, weight, bias) + 1)
    assert collective.placed == [True, True, False]
    packed = SummedLinear(lambda x: F.linear(x, weight, bias), collective)
    torch.testing.assert_close(packed(x), F.linear(x, weight, bias) + 1)
    assert collective.placed[-1] is False
