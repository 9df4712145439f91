"""Handoffs between workers whose blocks have different sizes: each byte lands where it must.

Random pairs of engines: block sizes, heads, degrees, layers, groups with windows, prefixes that
decode holds, chunks in which the prompt is announced. What is real: the decode worker's
account of announced blocks, the plan, its pieces, the copies. A slice of memory stands for what
a transport reads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support import searches

from tasuki.engine.api import Assignment, GroupBlocks
from tasuki.engine.cache_groups import CacheGroup
from tasuki.kv.decode_handoff import DecodeHandoff
from tasuki.kv.layout import CacheLayout
from tasuki.kv.pool_copies import PoolCopies, Rows
from tasuki.kv.repack import Repack
from tasuki.kv.transfer_plan import PairPlan, Run, TransferPlan, make_plans
from tasuki.v1 import kv_pb2 as pb

REGRESSIONS: tuple[int, ...] = ()
CASES = 400  # of a search
MAX_TOKENS = 150
UNWRITTEN = -1


@dataclass(frozen=True)
class Engine:
    """A block size, and for each rank a pool of int32 and its layout."""

    block_size: int
    layouts: list[CacheLayout]
    pools: list[torch.Tensor]
    tables: list[GroupBlocks]
    num_blocks: int

    def wires(self) -> list[pb.Layout]:
        return [
            layout.to_wire(pool.view(torch.float32), transport="copy")
            for layout, pool in zip(self.layouts, self.pools, strict=True)
        ]


@dataclass(frozen=True)
class Case:
    """What both engines share, and how the prompt goes over."""

    prefill: Engine
    decode: Engine
    groups: tuple[CacheGroup, ...]
    tokens: int
    prefix: int
    computed: list[int]  # after each chunk

    def values(self, layout: CacheLayout, group: int, tokens: range) -> torch.Tensor:
        """[head, layer, 2, token, dim]: no two elements of an engine are the same."""
        heads = torch.arange(layout.kv_heads, dtype=torch.int32) + layout.first_kv_head
        parts = (
            heads,
            torch.arange(layout.layers, dtype=torch.int32),
            torch.arange(2, dtype=torch.int32),
            torch.arange(tokens.start, tokens.stop, dtype=torch.int32),
            torch.arange(layout.head_dim, dtype=torch.int32),
        )
        value = torch.tensor(group, dtype=torch.int32)
        for index, (part, size) in enumerate(zip(parts, (8, 4, 2, 1 << 9, 4), strict=True)):
            value = value.unsqueeze(-1) * size + part.view([1] * index + [-1])
        return value.view([len(part) for part in parts])


def make_case(choose: random.Random) -> Case:
    heads = choose.choice((1, 2, 4))
    layers = choose.choice((1, 3))
    windows = choose.choice(([None], [None, choose.randint(1, 70)], [choose.randint(1, 70)]))
    groups = tuple(CacheGroup(tuple(range(layers)), window) for window in windows)
    sizes = [choose.randint(1, 64), choose.choice((1, 2, 4, 8, 16, 32, 64))]
    if choose.random() < 0.3:
        sizes[0] = choose.choice((8, 16, 32, 48))
    choose.shuffle(sizes)
    tokens = choose.randint(1, MAX_TOKENS)
    head_dim = choose.choice((1, 2, 3))
    engines = []
    for size in sizes:
        tables = []
        count = sum(-(-tokens // size) - g.first_block(tokens, size) for g in groups)
        num_blocks = count + choose.randint(1, 4)
        pages = choose.sample(range(num_blocks), count)
        for group, kept in enumerate(groups):
            first = kept.first_block(tokens, size)
            mine = [pages.pop() for _ in range(first, -(-tokens // size))]
            tables.append(GroupBlocks(group, first * size, mine, kept.first_needed(tokens)))
        degree = choose.choice((1, 2, 4))
        layouts = [
            CacheLayout(
                num_blocks=num_blocks,
                kv_heads=max(1, heads // degree),
                layers=layers,
                block_size=size,
                head_dim=head_dim,
                dtype=torch.float32,
                first_kv_head=rank * heads // degree,
                groups=groups,
            )
            for rank in range(degree)
        ]
        pools = [layout.allocate().view(torch.int32).fill_(UNWRITTEN) for layout in layouts]
        engines.append(Engine(size, layouts, pools, tables, num_blocks))
    prefill, decode = engines
    computed = sorted(choose.sample(range(1, tokens + 1), min(tokens, choose.randint(1, 5))))
    prefix = choose.choice((0, choose.randint(0, tokens - 1))) // decode.block_size
    case = Case(prefill, decode, groups, tokens, prefix * decode.block_size, [*computed, tokens])
    for layout, pool in zip(prefill.layouts, prefill.pools, strict=True):
        for table in prefill.tables:
            end = table.first_token + len(table.blocks) * layout.block_size
            values = case.values(layout, table.group, range(table.first_token, end))
            pool[list(table.blocks)] = values.unflatten(3, (-1, layout.block_size)).movedim(3, 0)
    return case


def announcements(case: Case) -> Iterator[pb.Announce]:
    """As the prefill engine makes them (engine/booking.py)."""
    size, announced = case.prefill.block_size, 0
    for computed in case.computed:
        final = computed if computed == case.tokens else computed // size * size
        if final <= announced:
            continue
        parts = []
        for table in case.prefill.tables:
            begin = max(table.first_token // size, announced // size)
            first = table.first_token // size
            if begin < -(-final // size):
                blocks = table.blocks[begin - first : -(-final // size) - first]
                parts.append(
                    pb.GroupBlocks(group=table.group, first_token=begin * size, blocks=blocks)
                )
        yield pb.Announce(
            request_id="r", first_token=announced, end_token=final, groups=parts, heard=1
        )
        announced = final


class Reader:
    """What a transport does: slices to staging memory, and the copies from there."""

    repack = Repack

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plans = make_plans(case.decode.wires(), case.prefill.wires())

    def read(self, pairs: Sequence[tuple[int, int]], max_bytes: int) -> None:
        for each in self.plans:
            for runs in each.plan.chunks(pairs, max_bytes):
                self._piece(each, runs, max_bytes)

    def _piece(self, each: PairPlan, runs: list[Run], max_bytes: int) -> None:
        plan, pool = each.plan, self.case.decode.pools[each.local]
        source = self.case.prefill.pools[each.remote].view(-1).view(torch.uint8)
        base = self.case.prefill.pools[each.remote].data_ptr()
        assert 0 < plan.piece_bytes(runs) <= max(max_bytes, plan.slice_bytes)
        copies = PoolCopies(pool)
        if plan.alike:
            for run in runs:
                begin = plan.remote.address - base + run.remote * plan.remote.stride_bytes
                at = plan.local.address + run.local * plan.local.stride_bytes
                size = run.count * plan.slice_bytes
                copies.start(source[begin : begin + size], [(at, size)], to_pool=True)
            return
        repack = self.repack.of(plan, copies.slot_bytes)
        assert repack.planes * repack.plane_bytes == plan.slice_bytes
        for block, of_block in repack.blocks(runs):
            begin = plan.remote.address - base + block * plan.remote.stride_bytes
            staged = source[begin : begin + plan.slice_bytes].clone()
            half = repack.planes // 2  # in two parts, as a small slot would force it
            for planes in (range(half), range(half, repack.planes)):
                at = planes.start * repack.plane_bytes
                copies.spread(staged, list(repack.rows(of_block, at, planes)))


def hand_over(case: Case, choose: random.Random, reader: Reader) -> DecodeHandoff:
    handoff = DecodeHandoff("r", "p", 0.0, True)
    size = case.decode.block_size
    place = Assignment(size, case.tokens, case.prefix, case.decode.tables)
    handoff.assigned(place, case.prefill.block_size)
    written: list[int] = []
    for announce in announcements(case):
        for _ in range(choose.choice((1, 1, 2))):  # some are repeated
            assert handoff.understands(announce)
            handoff.hear(announce)
            pairs, blocks, _ = handoff.take_unread()
            assert bool(pairs) == bool(blocks)
            if pairs:
                units = size // math.gcd(size, case.prefill.block_size)
                assert sorted({ours // units for _, ours in pairs}) == sorted(blocks)
                reader.read(pairs, choose.choice((1, 1_000, 1 << 20)))
                written += blocks
    assert handoff.posted == case.tokens
    assert len(written) == len(set(written)), "one pull for a block"
    return handoff


def check(case: Case, handoff: DecodeHandoff) -> None:
    """Every slot of every rank holds what it must."""
    size, tokens = case.decode.block_size, case.tokens
    unit = math.gcd(size, case.prefill.block_size)
    tail = -(-tokens // unit) * unit  # what lies beyond the prompt in its last unit may be read
    theirs = {table.group: table.first_token for table in case.prefill.tables}
    hollow = set()
    for layout, pool in zip(case.decode.layouts, case.decode.pools, strict=True):
        wanted = torch.full_like(pool, UNWRITTEN)
        for table in case.decode.tables:
            for block, page in enumerate(table.blocks):
                begin = table.first_token + block * size
                span = range(max(begin, case.prefix, theirs[table.group]), min(begin + size, tail))
                if begin < tokens and len(span) > 0:
                    at = slice(span.start - begin, span.stop - begin)
                    wanted[page, ..., at, :] = case.values(layout, table.group, span)
                end = min(begin + size, tokens)
                if begin >= case.prefix and max(begin, case.prefix) < theirs[table.group]:
                    hollow.add(table.group)
                    assert theirs[table.group] <= table.first_needed or end <= table.first_needed
                pool[page, ..., tokens - begin if tokens < begin + size else size :, :] = 0
                wanted[page, ..., tokens - begin if tokens < begin + size else size :, :] = 0
        assert torch.equal(pool, wanted)
    assert handoff.hollow == hollow


def run(seed: int, reader: type[Reader] = Reader) -> Case:
    choose = random.Random(seed)
    case = make_case(choose)
    check(case, hand_over(case, choose, reader(case)))
    return case


@pytest.mark.search
def test_every_byte_lands_where_it_must_and_no_other_is_written() -> None:
    for seed in searches.seeds(CASES, REGRESSIONS):
        with searches.case(seed):
            run(seed)


def test_the_cases_are_of_every_kind() -> None:
    seen: set[str] = set()
    for seed in range(CASES):
        case = make_case(random.Random(seed))
        ours, theirs = case.decode.block_size, case.prefill.block_size
        seen.add("alike" if ours == theirs else "larger" if ours > theirs else "smaller")
        seen.add("multiple" if not max(ours, theirs) % min(ours, theirs) else "crossing")
        seen.add("prefix inside" if case.prefix % theirs else "prefix at a block's beginning")
        seen.add(f"{len(case.prefill.pools)} to {len(case.decode.pools)}")
    assert len(seen) == 7 + 9, seen


class SlotOff(Repack):
    """A copy that begins one slot late."""

    def rows(self, runs: Sequence[Run], staged: int, planes: range) -> Iterator[Rows]:
        for each in super().rows(runs, staged, planes):
            yield replace(each, staged=max(0, each.staged - self.slot_bytes))


class PlaneOff(Repack):
    """A copy with the local plane's stride on both sides."""

    def rows(self, runs: Sequence[Run], staged: int, planes: range) -> Iterator[Rows]:
        for each in super().rows(runs, staged, planes):
            yield replace(each, staged_stride=min(each.staged_stride, each.local_stride))


class HeadOff(Repack):
    """A copy that leaves out the last plane."""

    def rows(self, runs: Sequence[Run], staged: int, planes: range) -> Iterator[Rows]:
        for each in super().rows(runs, staged, planes):
            yield replace(each, count=max(0, each.count - 1))


@pytest.mark.parametrize("defect", [SlotOff, PlaneOff, HeadOff])
def test_a_planted_defect_is_found(defect: type[Repack]) -> None:
    class Broken(Reader):
        repack = defect

    found = 0
    for seed in range(20):
        try:
            run(seed, Broken)
        except (AssertionError, RuntimeError):
            found += 1
    assert found >= 5


def test_pieces_have_whole_remote_blocks_and_no_run_crosses_a_block() -> None:
    choose = random.Random(7)
    for _ in range(100):
        theirs, ours = choose.sample(range(1, 40), 2)
        case = layouts_of(theirs, ours)
        [each] = make_plans(case[0], case[1])
        plan, (remote_units, local_units) = each.plan, each.plan.units
        count = choose.randint(1, 60)
        pairs = [(i + 3, i + 5) for i in range(count)]
        limit = choose.randint(1, 4)
        pieces = list(plan.chunks(pairs, limit * plan.slice_bytes + 5))
        flat = [(r.remote + i, r.local + i) for p in pieces for r in p for i in range(r.count)]
        assert flat == pairs
        blocks = [{r.remote // remote_units for r in piece} for piece in pieces]
        assert all(len(each) <= limit for each in blocks)
        assert sum(map(len, blocks)) == len(set().union(*blocks)), "each is read once"
        for run in (run for piece in pieces for run in piece):
            assert run.remote // remote_units == (run.remote + run.count - 1) // remote_units
            assert run.local // local_units == (run.local + run.count - 1) // local_units


def layouts_of(theirs: int, ours: int) -> tuple[list[pb.Layout], list[pb.Layout]]:
    wires = []
    for size in (ours, theirs):
        layout = CacheLayout(80, 1, 1, size, 2, torch.float32)
        wires.append([layout.to_wire(layout.allocate(), transport="copy")])
    return wires[0], wires[1]


def test_what_is_under_way_is_bounded_by_the_staging_memory() -> None:
    ours, theirs = layouts_of(32, 16)
    [each] = make_plans(ours, theirs)
    plan: TransferPlan = each.plan
    staged = plan.staged_slices * plan.slice_bytes
    assert plan.limit_bytes(1 << 40) <= staged
    assert plan.limit_bytes(1 << 10) == 1 << 10
    huge = replace(plan, slice_bytes=1 << 30)
    assert huge.staged_slices == 2
    assert huge.limit_bytes(1 << 40) == 2 << 30


@pytest.mark.parametrize(
    ("first", "blocks", "understood"),
    [(24, 7, True), (36, 6, True), (48, 5, False), (40, 6, False), (36, 5, False), (24, 0, False)],
)
def test_a_table_must_begin_with_a_block_that_holds_what_is_needed(
    first: int, blocks: int, understood: bool
) -> None:
    """Of 100 tokens those from 47 on are needed; here in blocks of 32, there of 12."""
    handoff = DecodeHandoff("r", "p", 0.0, True)
    handoff.assigned(Assignment(32, 100, 0, [GroupBlocks(0, 32, [5, 6, 7], 47)]), 12)
    part = pb.GroupBlocks(group=0, first_token=first, blocks=range(blocks))
    announce = pb.Announce(request_id="r", first_token=0, end_token=100, groups=[part])
    assert handoff.understands(announce) is understood
    if understood:
        handoff.hear(announce)
        pairs, local, _ = handoff.take_unread()
        assert local == [5, 6, 7]
        begin = max(first, 32)
        assert pairs[0] == ((begin - first) // 4, 5 * 8 + (begin - 32) // 4)
        assert len(pairs) == (100 - begin) // 4
        assert handoff.hollow == ({0} if begin > 32 else set())
