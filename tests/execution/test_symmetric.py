"""Which kernel sums what, and that a sum is right wherever its parts lie.

torch's kernels need GPUs; in their place are gloo's sums with the same effects on memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric
from support.ranks import on_ranks

from tasuki.execution import symmetric
from tasuki.execution.collective import Collective
from tasuki.execution.distributed import Distributed
from tasuki.execution.symmetric import MAX_BYTES, SymmetricSum, make_symmetric_sum

WIDTH = 64
CPU = torch.device("cpu")
ROWS = {  # float32, and the kernel if the parts are anywhere, or in their place
    1: ("one copied", "one"),
    256: ("one copied", "one"),  # 64 KiB
    257: ("two", "two"),
    MAX_BYTES // 4 // WIDTH: ("two", "two"),
}


class Kernels:
    """`torch.ops.symm_mem` over gloo: keeps what ran; with `wrong` two shots are 1 off."""

    def __init__(self, wrong: bool = False) -> None:
        self.ran: list[str] = []
        self.wrong = wrong

    def one_shot_all_reduce(self, buffer: torch.Tensor, op: str, group: str) -> torch.Tensor:
        self.ran.append("one")
        return self._sum(buffer.clone())

    def one_shot_all_reduce_copy(
        self, buffer: torch.Tensor, x: torch.Tensor, op: str, group: str
    ) -> torch.Tensor:
        self.ran.append("one copied")
        assert x.data_ptr() != buffer.data_ptr()
        return self._sum(buffer.copy_(x).clone())

    def two_shot_all_reduce_(self, buffer: torch.Tensor, op: str, group: str) -> torch.Tensor:
        self.ran.append("two")
        return self._sum(buffer).add_(self.wrong)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous() and x.dim() == 1
        dist.all_reduce(x)
        return x


def in_place_of_torchs(kernels: Kernels) -> None:
    symmetric._ops = kernels
    torch_symmetric.empty = torch.empty  # type: ignore[assignment]
    torch_symmetric.rendezvous = lambda *_: None  # type: ignore[assignment]


def sum_up(collective: Collective) -> list[str]:
    """What is wrong on this rank, of two."""
    kernels = Kernels()
    in_place_of_torchs(kernels)
    found, how = make_symmetric_sum(CPU)
    assert isinstance(collective, Distributed) and found is not None
    wrong = [] if "up to 10240 KiB" in how else [how]
    if kernels.ran != ["one copied", "one", "two", "two"]:
        wrong.append(f"it proves itself by {kernels.ran}")
    collective._symmetric = found
    for rows, ways in ROWS.items():
        want = torch.full((rows, WIDTH), 3.0)
        kernels.ran.clear()
        ours = torch.full((rows, WIDTH), 1.0 + collective.rank)
        anywhere = collective.all_reduce(ours)
        place = collective.place(rows, WIDTH, torch.float32)
        assert place is not None and place.shape == ours.shape
        totals = [anywhere.clone(), collective.all_reduce(place.copy_(ours))]
        if kernels.ran != list(ways) or not all(torch.equal(total, want) for total in totals):
            wrong.append(f"{rows} rows, {kernels.ran}")
    kernels.ran.clear()
    others = [
        torch.ones(MAX_BYTES // 4 + 4),
        torch.ones(6),
        torch.ones(8, dtype=torch.float64),
        torch.ones(0),
    ]
    for x in others:
        if collective.place(1, x.numel(), x.dtype) is not None:
            wrong.append(f"a place for {x.numel()} of {x.dtype}")
        if not (collective.all_reduce(x) == 2).all():
            wrong.append(f"{x.numel()} of {x.dtype}")
    if kernels.ran:
        wrong.append(f"{kernels.ran} of what is not theirs")
    everyones = collective.all_gather(torch.full((2, 2), collective.rank - float("inf")))
    named = collective.all_gather(torch.full((2, 4), float(collective.rank)))
    if everyones.tolist() != [[[-float("inf")] * 2] * 2] * 2:
        wrong.append(f"all-gather of infinities gives {everyones}")
    if named[:, 1, 2].tolist() != [0, 1] or named.shape != (2, 2, 4):
        wrong.append(f"all-gather gives {named}")
    return wrong


def sum_wrongly(collective: Collective) -> str:
    """Why a sum is refused."""
    in_place_of_torchs(Kernels(wrong=collective.rank == 1))
    found, how = make_symmetric_sum(CPU)
    assert found is None
    return how


@pytest.mark.system
def test_every_sum_is_right_and_goes_its_way() -> None:
    assert on_ranks(2, sum_up) == [[]] * 2


@pytest.mark.system
def test_a_sum_that_is_wrong_on_one_rank_is_used_by_none() -> None:
    first, second = on_ranks(2, sum_wrongly)
    assert second == "NCCL; symmetric memory does not work here: its sum is wrong"
    assert first == "NCCL; symmetric memory does not work here: on another rank"


@pytest.mark.parametrize(("ranks", "kib"), [(2, 64), (3, 128), (4, 128), (8, 16)])
def test_what_goes_in_one_shot_depends_on_the_ranks(
    ranks: int, kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = type("Group", (), {"WORLD": type("World", (), {"group_name": "0"})})
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "group", group)
    monkeypatch.setattr(torch_symmetric, "empty", torch.empty)
    monkeypatch.setattr(torch_symmetric, "rendezvous", lambda *_: None)
    assert SymmetricSum(CPU).one_shot_bytes == kib << 10
