"""Plans: who can read whom, and how pairs become runs and pieces."""

import random

import pytest
import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.transfer_plan import (
    BlockRangeError,
    LayoutMismatchError,
    Run,
    coalesce,
    make_plan,
)
from tasuki.v1 import kv_pb2


def wire(num_blocks: int = 64, tensor_parallel_size: int = 1, **sizes: int) -> kv_pb2.Layout:
    values = {"kv_heads": 1, "layers": 2, "block_size": 4, "head_dim": 8} | sizes
    layout = CacheLayout(num_blocks=num_blocks, dtype=torch.float32, **values)
    return layout.to_wire(
        layout.allocate(), transport="copy", tensor_parallel_size=tensor_parallel_size
    )


def expand(runs: list[Run]) -> list[tuple[int, int]]:
    return [(r.remote + i, r.local + i) for r in runs for i in range(r.count)]


def test_only_pairs_adjacent_on_both_sides_are_joined() -> None:
    pairs = [(7, 3), (8, 4), (12, 6), (9, 5), (13, 8)]
    assert coalesce(pairs) == [Run(7, 3, 3), Run(12, 6, 1), Run(13, 8, 1)]
    assert coalesce([]) == []


def test_pieces_hold_every_pair_once_and_stay_below_the_bound() -> None:
    choose = random.Random(3)
    plan = make_plan(wire(), wire())
    for _ in range(200):
        count = choose.randint(0, 40)
        pairs = list(
            zip(choose.sample(range(64), count), choose.sample(range(64), count), strict=True)
        )
        if choose.random() < 0.5:
            pairs = [(i, i + 3) for i in range(count)]
        limit_blocks = choose.randint(1, 9)
        pieces = list(plan.chunks(pairs, limit_blocks * plan.block_bytes + 7))
        assert sorted(p for piece in pieces for p in expand(piece)) == sorted(pairs)
        assert all(0 < len(expand(piece)) <= limit_blocks for piece in pieces)


def test_a_piece_has_a_block_however_small_the_bound() -> None:
    plan = make_plan(wire(), wire())
    assert list(plan.chunks([(1, 1), (2, 2)], 1)) == [[Run(1, 1, 1)], [Run(2, 2, 1)]]


@pytest.mark.parametrize("pair", [(64, 0), (0, 32), (-1, 0)])
def test_blocks_outside_a_pool_are_refused(pair: tuple[int, int]) -> None:
    plan = make_plan(wire(num_blocks=32), wire(num_blocks=64))
    with pytest.raises(BlockRangeError):
        list(plan.chunks([pair], 1 << 20))


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        (wire(block_size=8), "block_size is 4 here and 8 at"),
        (wire(tensor_parallel_size=2), "tensor_parallel_size is 1 here and 2 at"),
        (wire(layers=3), "of 2 layers here and .* of 3 layers at"),
        (wire(kv_heads=2), "a block is 512 bytes .* and 1024 bytes"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_both_values(
    remote: kv_pb2.Layout, said: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=said):
        make_plan(wire(), remote)


def test_further_cache_groups_are_refused_by_kind() -> None:
    remote = wire()
    remote.groups.add(kind="window")
    with pytest.raises(LayoutMismatchError, match=r"\['full', 'window'\]"):
        make_plan(wire(), remote)
