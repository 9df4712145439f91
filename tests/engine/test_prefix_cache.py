"""Content hashes to blocks, the order of eviction, and what routers are told of the content."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from engine_fakes import Rig, expected, make_rig, spec
from engine_relay import Relay
from support import searches
from test_engine_random import MAX_LEN, random_spec

from tasuki.engine import prefix_cache
from tasuki.engine.api import RequestSpec
from tasuki.engine.block_hash import extend_hashes, root_hash, token_array
from tasuki.engine.cache_groups import CacheGroup
from tasuki.engine.prefix_cache import HeldChunks, PrefixCache, blocks_of_chunk, chunk_name

BLOCK_SIZE = 4
CHUNK_BLOCKS = 2


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


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_chunk_is_the_fewest_blocks_of_128_tokens():
    assert [blocks_of_chunk(size) for size in (1, 16, 32, 100, 1_024)] == [128, 8, 4, 2, 1]


def test_the_last_state_of_a_chunk_counts():
    chunks = HeldChunks()
    for number in (1, 2, 3):
        chunks.stored(digest(number))
    chunks.dropped(digest(2))
    chunks.dropped(digest(9))  # no chunk's last block
    assert chunks.take_changes() == {1: True, 2: False, 3: True}
    assert chunks.take_changes() == {}
    assert len(chunks) == 2


def test_changes_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_cache, "MOST_CHANGES", 10)
    chunks = HeldChunks()
    for number in range(1_000):
        chunks.stored(digest(number))
        if number >= 5:
            chunks.dropped(digest(number - 5))
    assert chunks.take_changes() is None
    chunks.stored(digest(7))
    assert chunks.take_changes() == {7: True}


def test_names_come_the_last_used_first():
    cache = PrefixCache()
    for block in range(6):
        cache.insert(digest(block), block, ends_chunk=block != 3)
    for block in (2, 1, 0, 3):
        cache.park(block)
    assert cache.chunk_names(10) == [4, 5, 0, 1, 2]
    assert cache.chunk_names(3) == [4, 5, 0]


def test_forgotten_and_evicted_chunks_are_dropped():
    cache = PrefixCache()
    for block in range(3):
        cache.insert(digest(block), block, ends_chunk=True)
    cache.park(2)
    cache.chunks.take_changes()
    cache.forget(0)
    cache.evict()
    assert cache.chunks.take_changes() == {0: False, 2: False}
    assert cache.chunk_names(10) == [1]
    cache.clear()
    assert cache.chunks.take_changes() == {1: False}


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_is_told_once_however_many_groups_keep_it():
    groups = (CacheGroup((0,)), CacheGroup((1,), 64))
    rig = make_rig(groups=groups)
    rig.engine.submit(spec("a", range(4 * CHUNK_BLOCKS * BLOCK_SIZE), max_tokens=1))
    rig.drain()
    chunks = rig.engine.cache.chunks
    assert (len(chunks), len(chunks.take_changes() or ())) == (4, 4)


class Listener:
    """Follows one engine's changes, as a router does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.held: set[int] = set()
        self.dropped = 0

    def listen(self) -> None:
        changes = self.rig.engine.cache.chunks.take_changes()
        assert changes is not None
        for name, held in changes.items():
            (self.held.add if held else self.held.discard)(name)
            self.dropped += not held


def chunk_digests(requests: Iterable[RequestSpec]) -> set[bytes]:
    """The last block of every chunk that these requests can have."""
    found = set()
    for request in requests:
        for choice in request.choices:
            tokens, _ = expected(request, choice, MAX_LEN)
            whole = token_array([*request.prompt_tokens, *request.resumed_tokens, *tokens])
            hashes: list[bytes] = []
            root = root_hash(bytes(16), request.tenant)
            extend_hashes(hashes, root, whole, BLOCK_SIZE, len(whole) // BLOCK_SIZE)
            found |= set(hashes[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS])
    return found


def check(listener: Listener, digests: set[bytes]) -> None:
    cache = listener.rig.engine.cache
    content = {chunk_name(digest) for digest in digests if cache.match([digest])}
    assert listener.held == content
    assert sorted(listener.held) == sorted(cache.chunk_names(1_000))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "CHUNK_TOKENS", CHUNK_BLOCKS * BLOCK_SIZE)


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(30))
@pytest.mark.usefixtures("small_chunks")
def test_events_are_the_content_of_the_cache(seed: int):
    with searches.case(seed):
        rng = random.Random(seed)
        listener = Listener(make_rig(num_blocks=rng.randint(20, 40), max_model_len=MAX_LEN))
        engine = listener.rig.engine
        requests = [random_spec(rng, f"r{i}") for i in range(14)]
        digests = chunk_digests(requests)
        waiting = requests.copy()
        while waiting or engine.has_work():
            if waiting and rng.random() < 0.4:
                engine.submit(waiting.pop())
            if rng.random() < 0.06:
                engine.abort(rng.choice(requests).request_id)
            listener.rig.step()
            listener.listen()
            check(listener, digests)
        assert listener.held and listener.dropped, "nothing was cached, or nothing evicted"


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(30))
@pytest.mark.usefixtures("small_chunks")
def test_events_of_workers_that_hand_over_are_the_content_of_their_caches(seed: int):
    with searches.case(seed):
        rng = random.Random(seed)
        rigs = [make_rig(num_blocks=rng.randint(24, 40), max_model_len=MAX_LEN) for _ in range(2)]
        listeners = [Listener(rig) for rig in rigs]
        relay = Relay(rigs, seed)
        requests = [random_spec(rng, f"r{i}") for i in range(10)]
        digests = chunk_digests(requests)
        waiting = requests.copy()
        for _ in range(200_000):
            if waiting and rng.random() < 0.2:
                relay.submit(waiting.pop(), source=0, target=1)
            elif rng.random() < 0.005:
                relay.abort(rng.choice(requests).request_id)
            elif not relay.turn() and not waiting:
                break
            for listener in listeners:
                listener.listen()
        else:
            raise AssertionError(f"something never ends: {relay.handoffs}")
        for listener in listeners:
            listener.listen()
            check(listener, digests)
        assert all(listener.held for listener in listeners), "decode workers cache what they pull"
