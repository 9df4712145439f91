"""Plans: who can read whom, which rank reads what from which, how pairs become pieces."""

import itertools
import random

import pytest
import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.transfer_plan import (
    BlockRangeError,
    LayoutMismatchError,
    Run,
    TransferPlan,
    coalesce,
    make_plans,
)
from tasuki.v1 import kv_pb2

HEADS = 4


def layout(num_blocks: int = 64, **sizes: int) -> CacheLayout:
    values = {"kv_heads": 1, "layers": 2, "block_size": 4, "head_dim": 8} | sizes
    return CacheLayout(num_blocks=num_blocks, dtype=torch.float32, **values)


def wire(num_blocks: int = 64, **sizes: int) -> kv_pb2.Layout:
    shape = layout(num_blocks, **sizes)
    return shape.to_wire(shape.allocate(), transport="copy")


def one_plan(local: kv_pb2.Layout, remote: kv_pb2.Layout) -> TransferPlan:
    [pair] = make_plans([local], [remote])
    assert (pair.local, pair.remote) == (0, 0)
    return pair.plan


def expand(runs: list[Run]) -> list[tuple[int, int]]:
    return [(r.remote + i, r.local + i) for r in runs for i in range(r.count)]


def ranks(degree: int, heads: int = HEADS, num_blocks: int = 6) -> list[CacheLayout]:
    """The pools of an engine of `degree` ranks; with more ranks than heads each has one."""
    held = max(1, heads // degree)
    return [
        layout(num_blocks, kv_heads=held, first_kv_head=rank * heads // degree)
        for rank in range(degree)
    ]


def filled(layouts: list[CacheLayout]) -> list[torch.Tensor]:
    """Pools in which every element tells its block, head and place."""
    pools = []
    for shape in layouts:
        pool = shape.allocate()
        for block, head in itertools.product(range(shape.num_blocks), range(shape.kv_heads)):
            place = torch.arange(pool[0, 0].numel()).view(pool[0, 0].shape)
            pool[block, head] = 10_000 * block + 1_000 * (shape.first_kv_head + head) + place
        pools.append(pool)
    return pools


def read(plan: TransferPlan, local: torch.Tensor, remote: torch.Tensor, runs: list[Run]) -> int:
    """Do as a transport does, with the addresses of the plan alone. Returns the bytes."""
    moved = 0
    for run in runs:
        spans = []
        for pool, region, block in (
            (local, plan.local, run.local),
            (remote, plan.remote, run.remote),
        ):
            start = region.address - pool.data_ptr() + block * region.stride_bytes
            assert start >= 0
            length = run.count * plan.slice_bytes
            spans.append(pool.view(-1).view(torch.uint8)[start : start + length])
        assert len(spans[0]) == len(spans[1]) > 0
        spans[0].copy_(spans[1])
        moved += len(spans[0])
    return moved


@pytest.mark.parametrize("heads", [4, 2, 1], ids=["heads4", "heads2", "heads1"])
@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_every_rank_gets_its_heads_of_the_blocks(prefill: int, decode: int, heads: int) -> None:
    theirs, ours = ranks(prefill, heads), ranks(decode, heads, num_blocks=8)
    sources, targets = filled(theirs), [shape.allocate() for shape in ours]
    plans = make_plans(
        [shape.to_wire(pool, transport="copy") for shape, pool in zip(ours, targets, strict=True)],
        [
            shape.to_wire(pool, transport="copy")
            for shape, pool in zip(theirs, sources, strict=True)
        ],
    )
    pairs = [(0, 3), (1, 4), (5, 0), (3, 7)]
    moved = 0
    for each in plans:
        for runs in each.plan.chunks(pairs, 1 << 20):
            moved += read(each.plan, targets[each.local], sources[each.remote], runs)
    blocks = {local: remote for remote, local in pairs}
    everything = filled([layout(6, kv_heads=heads)])[0]
    for shape, pool in zip(ours, targets, strict=True):
        held = slice(shape.first_kv_head, shape.first_kv_head + shape.kv_heads)
        for block in range(shape.num_blocks):
            if block in blocks:
                assert torch.equal(pool[block], everything[blocks[block], held])
            else:
                assert not pool[block].any()
    assert moved == len(pairs) * sum(shape.block_bytes for shape in ours)
    assert len(plans) == max(decode, min(prefill, heads))
    for each in plans:
        assert each.plan.readers == sum(other.remote == each.remote for other in plans)


def test_replicas_take_turns_at_being_read() -> None:
    wires = [[s.to_wire(s.allocate(), transport="copy") for s in ranks(4, 2)] for _ in range(2)]
    assert [(p.local, p.remote) for p in make_plans(*wires)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    one = wire(kv_heads=2)
    assert [(p.local, p.remote) for p in make_plans([one], wires[0])] == [(0, 0), (0, 2)]


def test_only_slices_that_are_whole_blocks_on_both_sides_are_joined() -> None:
    pairs = [(1, 1), (2, 2), (3, 3)]
    whole, half = wire(kv_heads=2), [wire(first_kv_head=head) for head in range(2)]
    assert list(one_plan(whole, whole).chunks(pairs, 1 << 20)) == [[Run(1, 1, 3)]]
    alone = [Run(1, 1, 1), Run(2, 2, 1), Run(3, 3, 1)]
    for each in (*make_plans([whole], half), *make_plans(half, [whole])):
        assert list(each.plan.chunks(pairs, 1 << 20)) == [alone]
    for each in make_plans(half, half):
        assert list(each.plan.chunks(pairs, 1 << 20)) == [[Run(1, 1, 3)]]


def test_only_pairs_adjacent_on_both_sides_are_joined() -> None:
    pairs = [(7, 3), (8, 4), (12, 6), (9, 5), (13, 8)]
    assert coalesce(pairs) == [Run(7, 3, 3), Run(12, 6, 1), Run(13, 8, 1)]
    assert coalesce([]) == []


@pytest.mark.parametrize("remote_heads", [2, 1], ids=["whole", "slices"])
def test_pieces_hold_every_pair_once_and_stay_below_the_bound(remote_heads: int) -> None:
    choose = random.Random(3)
    remote = [wire(kv_heads=remote_heads, first_kv_head=h) for h in range(0, 2, remote_heads)]
    plan = make_plans([wire(kv_heads=2)], remote)[-1].plan
    for _ in range(200):
        count = choose.randint(0, 40)
        pairs = list(
            zip(choose.sample(range(64), count), choose.sample(range(64), count), strict=True)
        )
        if choose.random() < 0.5:
            pairs = [(i, i + 3) for i in range(count)]
        limit_blocks = choose.randint(1, 9)
        pieces = list(plan.chunks(pairs, limit_blocks * plan.slice_bytes + 7))
        assert sorted(p for piece in pieces for p in expand(piece)) == sorted(pairs)
        assert all(0 < len(expand(piece)) <= limit_blocks for piece in pieces)


def test_a_piece_has_a_block_however_small_the_bound() -> None:
    plan = one_plan(wire(), wire())
    assert list(plan.chunks([(1, 1), (2, 2)], 1)) == [[Run(1, 1, 1)], [Run(2, 2, 1)]]


@pytest.mark.parametrize("pair", [(64, 0), (0, 32), (-1, 0)])
def test_blocks_outside_a_pool_are_refused(pair: tuple[int, int]) -> None:
    plan = one_plan(wire(num_blocks=32), wire(num_blocks=64))
    with pytest.raises(BlockRangeError):
        list(plan.chunks([pair], 1 << 20))


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ([wire(layers=3)], r"full \(2 layers\) here and full \(3 layers\) at"),
        ([wire(head_dim=16)], "a head of a block is 512 bytes for 4 tokens here and 1024 bytes"),
        ([wire(block_size=8, head_dim=16)], "512 bytes for 4 tokens here and 2048 bytes for 8"),
        ([wire(kv_heads=2)], "has 1 KV heads here and 2 at the prefill worker"),
        ([wire(), wire(block_size=8)], "block_size is 4 on one rank .* and 8 on another"),
        ([], "tells of no KV pool"),
        ([kv_pb2.Layout(transport="copy", block_size=4, groups=wire().groups)], "has 0 KV"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_both_values(
    remote: list[kv_pb2.Layout], said: str
) -> None:
    with pytest.raises(LayoutMismatchError, match=said):
        make_plans([wire()], remote)


def test_a_head_that_no_rank_holds_is_named() -> None:
    remote = [wire(), wire(kv_heads=2, first_kv_head=2)]
    with pytest.raises(LayoutMismatchError, match="KV head 1 is held by no rank"):
        make_plans([wire(kv_heads=4)], remote)


def test_a_pool_ends_within_64_bits_of_addresses() -> None:
    remote = wire()
    remote.pool.base_address = 2**64 - 1
    with pytest.raises(LayoutMismatchError, match="behind 64 bits of addresses"):
        make_plans([wire()], [remote])


def test_further_cache_groups_are_refused_by_kind() -> None:
    remote = wire()
    remote.groups.add(kind="state", layers=[2])
    said = r"full \(2 layers\) here and full \(2 layers\), state \(1 layers\) at"
    with pytest.raises(LayoutMismatchError, match=said):
        make_plans([wire()], [remote])
