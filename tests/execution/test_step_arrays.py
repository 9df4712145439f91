"""The slabs that a step's arrays are built in."""

from __future__ import annotations

import numpy as np
import torch

from tasuki.execution.step_arrays import Staging


def test_arrays_of_a_step_in_flight_are_not_written_to() -> None:
    staging = Staging(torch.device("cpu"))
    [first] = staging.take((4, torch.int64))
    first[:] = 7
    [sent] = staging.send()
    [second] = staging.take((4, torch.int64))
    second[:] = 9
    assert not np.shares_memory(first, second)
    assert sent.tolist() == [7] * 4


def test_a_slab_grows_with_the_arrays() -> None:
    staging = Staging(torch.device("cpu"))
    for count in (10, 500, 2_000):
        tokens, tables = staging.take((count, torch.int64), (count, torch.int32))
        assert (len(tokens), len(tables)) == (count, count)
        tokens[:], tables[:] = 1, 2
        assert [part.tolist() for part in staging.send()] == [[1] * count, [2] * count]
