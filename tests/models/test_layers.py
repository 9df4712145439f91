"""Products with a packed weight: right at every row count, and of few shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.models.layers import make_linear, padded_rows


def test_few_row_counts_reach_the_kernels() -> None:
    """Each costs about 1 MB and its compilation; decode batches are not padded."""
    assert [padded_rows(rows) for rows in range(1, 17)] == list(range(1, 17))
    counts = {padded_rows(rows) for rows in range(1, 513)}
    assert len(counts) == 44
    for rows in range(17, 5000):
        assert rows <= padded_rows(rows) <= (1.25 if rows <= 128 else 1.125) * rows


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 100, 257])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_a_plain_product(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator)
    bias = torch.randn(96, generator=generator) if with_bias else None
    x = torch.randn(rows, 64, generator=generator)
    with torch.inference_mode():
        result = make_linear(weight, bias)(x)
        torch.testing.assert_close(result, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
        assert result.shape == (rows, 96)
