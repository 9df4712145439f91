"""Layers with windows keep their window, those with a state their last one; others keep all."""

from __future__ import annotations

import random

import pytest
from engine_fakes import VOCAB, expected, make_rig, spec

from tasuki.engine.api import Leg
from tasuki.engine.cache_groups import (
    CHECKPOINT_BLOCKS,
    BlockTable,
    CacheGroup,
    group_layers,
    layers_of_page,
    longest_blocks,
    pages_for,
)
from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import EngineConfigError

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


SHAPES = {
    "gpt-oss-20b": [128, None] * 12,
    "gemma-3-27b": [None if layer % 6 == 5 else 1024 for layer in range(62)],
}


@pytest.mark.parametrize(
    ("shape", "tokens", "share"),
    [("gpt-oss-20b", 4000, 0.52), ("gpt-oss-20b", 100, 1.0), ("gemma-3-27b", 4000, 0.41)],
)
def test_memory_and_transfers_fall_with_the_windows(shape: str, tokens: int, share: float):
    """What is kept after a prompt, which is what moves, beside all tokens of all layers."""
    windows, size = SHAPES[shape], 16
    groups = group_layers(windows)
    config = EngineConfig(100_000, 8192, VOCAB, block_size=size, groups=groups)
    blocks = -(-tokens // size)
    seen = [0 if window is None else max(0, tokens + 1 - window) for window in windows]
    needed = sum(blocks - first // size for first in seen)  # of single layers
    kept = config.pages_kept(tokens) * layers_of_page(groups)
    assert needed <= kept <= 1.12 * needed, "pages of the smaller groups have room to spare"
    assert kept / (len(windows) * blocks) == pytest.approx(share, abs=0.005)


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


STATE = (CacheGroup((0,)), CacheGroup((1,), state_bytes=8))


@pytest.mark.parametrize("begin", [0, 1, 7, 8, 20])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 10, 11, 40])
def test_a_prompt_has_checkpoints_and_the_blocks_between_share_a_page(begin: int, length: int):
    group, end = STATE[1], begin + length
    count = group.num_pages(begin, end)
    table = BlockTable(begin, repeats=True)
    table.fill(group, range(100, 100 + count), end)
    assert (table.end, list(table.held)) == (end, list(range(100, 100 + count)))
    owned = [block for block in range(begin, end) if table.owns(block)]
    regular = range(CHECKPOINT_BLOCKS - 1, end, CHECKPOINT_BLOCKS)
    assert owned == sorted({*regular, end - 2, end - 1} & set(range(begin, end)))
    assert pages_for(STATE, longest_blocks(STATE, 50)) <= 50
    assert pages_for(STATE, longest_blocks(STATE, 50) + 1) > 50
    gone: list[int] = []
    for first in range(begin, end + 1):
        gone += table.drop_before(first)
        assert not set(gone) & set(table.held), "a page that later blocks have is kept"
    assert gone == list(range(100, 100 + count))


def test_states_and_kv_are_in_groups_of_about_one_size():
    kv, *states = group_layers({2: None, 5: None}, state_bytes=dict.fromkeys([0, 1, 3, 4, 6], 512))
    assert (kv.layers, kv.kind) == ((2, 5), "full")
    assert [(group.layers, group.kind) for group in states] == [
        ((0,), "state"),
        ((1, 3), "state"),
        ((4, 6), "state"),
    ]
    assert layers_of_page([kv, *states]) == 2


def test_a_sequence_keeps_its_last_state_alone():
    rig = make_rig(groups=STATE, num_blocks=128, prefix_caching=False)
    request = spec("a", range(40), max_tokens=20)
    rig.engine.submit(request)
    most = 0
    while rig.engine.has_work():
        rig.step()
        if len(rig.tokens("a")) > 1 and "a" not in rig.ended:
            full = -(-(40 + len(rig.tokens("a"))) // BLOCK)
            most = max(most, rig.engine.referenced_blocks - full)
    assert rig.tokens("a") == expected(request, 0, 64, STATE)[0]
    assert 0 < most <= 2, "of ten blocks and more"


@pytest.mark.parametrize(
    ("shared", "cached"), [(20, 0), (31, 0), (32, 32), (35, 32), (36, 36), (39, 36), (40, 40)]
)
def test_a_prefix_is_reused_where_it_has_a_checkpoint(shared: int, cached: int):
    """Of 40 tokens in blocks of 4: after 32, 36 and 40."""
    rig = make_rig(groups=STATE, num_blocks=128)
    rig.engine.submit(spec("a", range(40), max_tokens=1))
    rig.drain()
    request = spec("b", [*range(shared), 47, 46, 45, 44, 43], max_tokens=8)
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("b") == expected(request, 0, 64, STATE)[0]
    assert rig.outputs["b", 0][0].cached_prompt_tokens == cached


def test_an_answer_can_be_gone_on_from():
    """Each block that is filled while decoding is a checkpoint: so a conversation's next turn."""
    rig = make_rig(groups=STATE, num_blocks=128)
    first = spec("a", range(10), max_tokens=20)
    rig.engine.submit(first)
    rig.drain()
    request = spec("b", [*range(10), *rig.tokens("a"), 5, 6], max_tokens=8)
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("b") == expected(request, 0, 64, STATE)[0]
    assert rig.outputs["b", 0][0].cached_prompt_tokens == 28, "the last token has no KV"


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_a_step_that_raises_is_computed_again_from_the_states_it_began_with(steps: int):
    rig = make_rig(groups=STATE, num_blocks=128)
    good = spec("good", range(9), max_tokens=12)
    rig.engine.submit(good)
    for _ in range(steps):
        rig.step()
    cursed = next(iter(set(range(VOCAB)) - {*range(9), *expected(good, 0, 64, STATE)[0]}))
    rig.model.cursed = {cursed}
    rig.engine.submit(spec("bad", [1, 2, cursed], max_tokens=2))
    rig.drain()
    assert rig.ended["bad"].failure is not None
    assert rig.tokens("good") == expected(good, 0, 64, STATE)[0]


def test_choices_go_on_from_copies_of_the_prompts_state():
    rig = make_rig(groups=STATE, num_blocks=128)
    request = spec("a", range(6), choices=(0, 1, 2), max_tokens=10, temperature=1.0)
    rig.engine.submit(request)
    rig.drain()
    for choice in request.choices:
        assert rig.tokens("a", choice) == expected(request, choice, 64, STATE)[0]


def test_drafts_and_states_are_refused_together():
    with pytest.raises(EngineConfigError, match="leave out --speculate"):
        make_rig(groups=STATE, num_blocks=128, draft_tokens=4, overlap=False)
