"""Reference counts, eviction, quarantine and the integrity check."""

from __future__ import annotations

import random

import pytest

from tasuki.engine.block_pool import BlockPool
from tasuki.engine.errors import OutOfBlocksError, PoolImbalanceError
from tasuki.engine.prefix_cache import PrefixCache


def make_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache())


def test_neighbours_are_handed_out_together_and_again_after_release():
    pool = make_pool()
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1, 2])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_more_than_available_is_refused_whole():
    pool = make_pool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match=r"2 blocks wanted, 1 of 4"):
        pool.allocate(2)
    assert pool.available == 1


def test_a_block_is_free_when_its_last_holder_leaves():
    pool = make_pool()
    blocks = pool.allocate(2)
    pool.retain(blocks)
    pool.release(blocks)
    assert pool.num_referenced == 2
    pool.release(blocks)
    assert (pool.num_referenced, pool.available) == (0, 8)
    with pytest.raises(PoolImbalanceError, match="nobody holds"):
        pool.release(blocks)


def test_cached_blocks_stay_until_room_is_needed_tail_first():
    pool = make_pool(4)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.cache.insert(bytes([index]), block)
    pool.release(blocks)
    assert pool.available == 4
    assert pool.allocate(2) == [3, 2]
    assert pool.cache.match([b"\0", b"\1", b"\2"]) == [0, 1]


def test_a_cached_block_comes_back_with_its_content():
    pool = make_pool(2)
    [block] = pool.allocate(1)
    pool.cache.insert(b"x", block)
    pool.release([block])
    assert pool.unreferenced([block]) == 1
    pool.retain(pool.cache.match([b"x"]))
    assert pool.references(block) == 1
    assert pool.allocate(1) == [1]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_a_flushed_cache_has_nothing_and_holders_keep_their_blocks():
    pool = make_pool(4)
    kept, left = pool.allocate(2), pool.allocate(1)
    for block in (*kept, *left):
        pool.cache.insert(bytes([block]), block)
    pool.release(left)
    pool.flush_cache()
    assert (len(pool.cache), pool.available, pool.num_referenced) == (0, 2, 2)
    assert pool.cache.match([b"\0"]) == []
    assert sorted(pool.allocate(2)) == [2, 3]
    pool.release(kept)
    assert pool.available == 2
    pool.check([[2], [3]])


def test_quarantined_blocks_are_nobodys_and_not_available():
    pool = make_pool()
    blocks = pool.allocate(3)
    pool.cache.insert(b"x", blocks[0])
    pool.quarantine(blocks[:2])
    assert (pool.num_quarantined, pool.available) == (2, 5)
    assert pool.cache.match([b"x"]) == []
    pool.check([blocks[2:]])
    pool.free_quarantined(blocks[:2])
    assert (pool.num_quarantined, pool.available) == (0, 7)
    with pytest.raises(PoolImbalanceError, match="not quarantined"):
        pool.free_quarantined([blocks[0]])


def test_a_shared_block_cannot_be_quarantined():
    pool = make_pool()
    blocks = pool.allocate(1)
    pool.retain(blocks)
    with pytest.raises(PoolImbalanceError, match="2 holders"):
        pool.quarantine(blocks)


def test_check_names_the_imbalance():
    pool = make_pool()
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(PoolImbalanceError, match="block 1 counts 1 references, 0 are held"):
        pool.check([blocks[:1]])
    with pytest.raises(PoolImbalanceError, match="block 0 counts 1 references, 2 are held"):
        pool.check([blocks, blocks[:1]])
    pool._free.append(blocks[0])
    with pytest.raises(PoolImbalanceError, match="block 0 is in 2 states"):
        pool.check([blocks])


@pytest.mark.parametrize("seed", range(10))
def test_random_use_stays_balanced(seed: int):
    rng = random.Random(seed)
    pool = make_pool(20)
    held: list[list[int]] = []
    quarantined: list[int] = []
    for number in range(500):
        action = rng.randrange(5)
        if rng.random() < 0.02:
            pool.flush_cache()
        if action == 0 and pool.available:
            blocks = pool.allocate(rng.randint(1, min(4, pool.available)))
            held.append(blocks)
            for block in blocks:
                if rng.random() < 0.5:
                    pool.cache.insert(f"{number}.{block}".encode(), block)
        elif action == 1 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == 2 and held:
            shared = rng.choice(held)
            pool.retain(shared)
            held.append(shared)
        elif action == 3 and held:
            own = held.pop(rng.randrange(len(held)))
            single = [block for block in own if pool.references(block) == 1]
            pool.quarantine(single)
            quarantined += single
            pool.release([block for block in own if block not in single])
        elif quarantined:
            pool.free_quarantined([quarantined.pop()])
        pool.check(held)
    assert pool.num_quarantined == len(quarantined)
