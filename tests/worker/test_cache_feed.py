"""A router that applies a feed's messages knows the cache; messages and memory are bounded."""

from __future__ import annotations

import random

import pytest
from support import searches

from tasuki.v1 import worker_pb2 as pb
from tasuki.worker import cache_feed
from tasuki.worker.cache_feed import CacheFeed


class Router:
    """Applies messages; knows nothing before a reset and nothing after a gap."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.number = 0

    def take(self, events: pb.KvEvents) -> None:
        assert events.number == self.number + 1
        self.number = events.number
        assert events.reset or self.number > 1, "the first message begins with a reset"
        if events.reset:
            self.held.clear()
        assert not set(events.stored) & set(events.dropped)
        self.held -= set(events.dropped)
        self.held |= {*events.stored, *events.held}


def drain(feed: CacheFeed, router: Router) -> None:
    while (events := feed.take()) is not None:
        assert len(events.stored) + len(events.dropped) + len(events.held) <= (
            cache_feed.MOST_A_REPORT
        )
        router.take(events)
    assert not feed.is_behind


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(200))
def test_a_drained_feed_has_told_the_cache(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_feed, "MOST_A_REPORT", 7)
    with searches.case(seed):
        rng = random.Random(seed)
        cache: set[int] = set(rng.sample(range(60), 20))
        feed, router = CacheFeed(), Router()
        feed.reset(cache)
        for _ in range(rng.randint(1, 80)):
            happening = rng.random()
            if happening < 0.5:
                changes = {rng.randrange(60): rng.random() < 0.6 for _ in range(rng.randint(1, 9))}
                for name, held in changes.items():
                    (cache.add if held else cache.discard)(name)
                feed.change(changes)
            elif happening < 0.9:
                if (events := feed.take()) is not None:
                    router.take(events)
            elif happening < 0.95:
                feed.reset(cache)
        drain(feed, router)
        assert router.held == cache


def test_changes_come_before_what_was_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_feed, "MOST_A_REPORT", 3)
    feed = CacheFeed()
    feed.reset([5, 6, 7, 8])
    feed.change({9: True, 6: False})
    first, second = feed.take(), feed.take()
    assert first is not None and second is not None
    assert (first.reset, first.stored, first.dropped, first.held) == (True, [9], [6], [5])
    assert (second.number, second.reset, second.held) == (2, False, [7, 8])
    assert feed.take() is None


def test_a_feed_that_is_not_taken_asks_for_a_reset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_feed, "MOST_PENDING", 10)
    feed = CacheFeed()
    feed.reset([])
    feed.change(dict.fromkeys(range(10), True))
    assert not feed.overflows
    feed.change({10: True})
    assert feed.overflows
    feed.reset([1])
    assert not feed.overflows
