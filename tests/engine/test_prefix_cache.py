"""Content hashes to blocks, and the order of eviction."""

from __future__ import annotations

import pytest

from tasuki.engine.prefix_cache import PrefixCache


def test_match_stops_at_the_first_gap():
    cache = PrefixCache()
    for block, digest in enumerate((b"a", b"b", b"d")):
        assert cache.insert(digest, block)
    assert cache.match([b"a", b"b", b"c", b"d"]) == [0, 1]
    assert cache.match([b"x", b"a"]) == []


def test_first_block_with_a_content_wins():
    cache = PrefixCache()
    assert cache.insert(b"a", 1)
    assert not cache.insert(b"a", 2)
    assert not cache.insert(b"b", 1)
    assert cache.match([b"a"]) == [1]
    assert (cache.holds(1), cache.holds(2)) == (True, False)
    assert cache.check() is None


def test_eviction_takes_what_was_released_longest_ago():
    cache = PrefixCache()
    for block in range(3):
        cache.insert(bytes([block]), block)
        cache.park(block)
    cache.unpark(0)
    cache.park(0)
    assert [cache.evict() for _ in range(3)] == [1, 2, 0]
    assert len(cache) == 0
    with pytest.raises(KeyError):
        cache.evict()


def test_forgotten_blocks_are_not_found():
    cache = PrefixCache()
    cache.insert(b"a", 1)
    cache.park(1)
    cache.forget(1)
    cache.forget(1)
    assert cache.match([b"a"]) == []
    assert cache.num_evictable == 0


def test_disabled_cache_remembers_nothing():
    cache = PrefixCache(enabled=False)
    assert not cache.insert(b"a", 1)
    assert cache.match([b"a"]) == []
