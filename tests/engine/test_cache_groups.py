"""Layers with windows keep their window; those without keep all."""

from __future__ import annotations

import random

import pytest
from engine_fakes import VOCAB, expected, make_rig, spec

from tasuki.engine.api import Leg
from tasuki.engine.cache_groups import CacheGroup, group_layers, layers_of_page

BLOCK = 4
WINDOW = 8
MIXED = (CacheGroup((0,)), CacheGroup((1,), WINDOW))


def test_layers_of_one_kind_are_in_groups_of_about_one_size():
    gemma_3 = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    groups = group_layers(gemma_3)
    assert [group.window for group in groups] == [None] + [1024] * 6
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))
    assert layers_of_page(groups) == 10
    gpt_oss = group_layers([128, None] * 12)
    assert [(group.window, len(group.layers)) for group in gpt_oss] == [(None, 12), (128, 12)]
    [all_alike] = group_layers([4096] * 5)
    assert (all_alike.kind, all_alike.layers) == ("window", (0, 1, 2, 3, 4))


@pytest.mark.parametrize("tokens", range(1, 40))
def test_a_window_begins_with_the_first_token_that_the_next_query_sees(tokens: int):
    first = CacheGroup((0,), WINDOW).first_block(tokens, BLOCK)
    seen = range(max(0, tokens - WINDOW + 1), tokens + 1)  # the token at `tokens` is the next
    assert first == seen[0] // BLOCK


def test_pages_that_leave_the_window_are_free_while_the_sequence_runs():
    rig = make_rig(groups=MIXED, num_blocks=128, prefix_caching=False)
    request = spec("a", range(40), max_tokens=20)
    rig.engine.submit(request)
    most = 0
    while rig.engine.has_work():
        rig.step()
        tokens = 40 + len(rig.tokens("a"))
        if len(rig.tokens("a")) > 1 and "a" not in rig.ended:
            full = -(-tokens // BLOCK)
            most = max(most, rig.engine.referenced_blocks - full)
    assert rig.tokens("a") == expected(request, 0, 64, MIXED)[0]
    assert 0 < most <= WINDOW // BLOCK + 2, "of ten blocks and more"


@pytest.mark.parametrize("cached", [7, 8, 9, 16, 31])
def test_a_prefix_is_reused_where_its_last_window_is_held(cached: int):
    """A window's older pages may be evicted: the prefix is of use without them."""
    rig = make_rig(groups=MIXED, num_blocks=128)
    shared = [random.Random(cached).randrange(VOCAB) for _ in range(cached)]
    for name in ("first", "second"):
        request = spec(name, [*shared, 1, 2, 3, 4, 5] if name == "second" else shared, max_tokens=2)
        rig.engine.submit(request)
        rig.drain()
        assert rig.tokens(name) == expected(request, 0, 64, MIXED)[0]
    assert rig.outputs["second", 0][0].cached_prompt_tokens == cached // BLOCK * BLOCK


def test_a_prefix_without_its_last_window_is_not_reused():
    rig = make_rig(groups=MIXED, num_blocks=128)
    rig.engine.submit(spec("a", range(40), max_tokens=2))
    rig.drain()
    cache, hashes = rig.engine.cache, []
    pool = rig.engine._pool
    hashes = [digest for digest in cache._block_of if len(digest) > 16]  # of the window's group
    for digest in hashes[4:]:
        cache.forget(block := cache._block_of[digest])
        pool._free.append(block)
    again = spec("b", range(40), max_tokens=2)
    rig.engine.submit(again)
    rig.drain()
    assert rig.tokens("b") == expected(again, 0, 64, MIXED)[0]
    assert rig.outputs["b", 0][0].cached_prompt_tokens == 4 * BLOCK


def test_a_decode_leg_gets_no_place_for_what_it_will_not_read():
    rig = make_rig(groups=MIXED, num_blocks=128)
    rig.engine.submit(spec("a", range(40), leg=Leg.DECODE))
    assert rig.engine.may_credit("a")
    assignment = rig.engine.assign("a")
    assert assignment is not None
    assert [(part.first_token, len(part.blocks)) for part in assignment.parts] == [(0, 10), (32, 2)]
    assert rig.engine.referenced_blocks == 12
