"""States move with the KV of the attention layers, once, as they are at the prompt's end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from handoff_rig import LegEndReason, Rig, Worker, expected, spec

from tasuki.engine.cache_groups import CacheGroup

LENGTH = 64  # max_model_len of the rig's engines
GROUPS = (CacheGroup((0,)), CacheGroup((1,), state_bytes=8))
BLOCK = 4


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def hand_over(rig: Rig, name: str, prompt: list[int], prefill: Worker, decode: Worker) -> None:
    request = spec(name, prompt, max_tokens=10)
    rig.place(request, prefill, decode)
    rig.pump(lambda: name in decode.ended and name in prefill.ended)
    assert decode.tokens(name) == expected(request, 0, LENGTH, GROUPS)[0]
    assert prefill.ended[name].reason is LegEndReason.HANDED_OFF


@pytest.mark.parametrize("digest_one_in", [0, 1])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 45])
def test_a_split_request_gives_the_tokens_of_a_whole_one(
    rig: Rig, length: int, digest_one_in: int
) -> None:
    prefill = rig.worker(groups=GROUPS)
    decode = rig.worker(groups=GROUPS, digest_one_in=digest_one_in)
    hand_over(rig, "r.0", [(3 + 7 * i) % 40 for i in range(length)], prefill, decode)
    assert decode.engine.counters().prompt_tokens_computed == 0
    timings = decode.ended["r.0"].timings
    assert timings.transfer_blocks == -(-length // BLOCK) + 1
    assert timings.transfer_bytes == timings.transfer_blocks * decode.layout.block_bytes
    rig.pump_until_idle()
    assert prefill.engine.referenced_blocks == decode.engine.referenced_blocks == 0


def test_a_prefix_that_decode_holds_is_not_moved(rig: Rig) -> None:
    prefill, decode = rig.worker(groups=GROUPS), rig.worker(groups=GROUPS)
    first = [(3 + 7 * i) % 40 for i in range(22)]
    hand_over(rig, "r.0", first, prefill, decode)
    # The next turn: all but the last token of prompt and answer is cached where it was decoded.
    second = [*first, *decode.tokens("r.0"), 1, 2, 3]
    hand_over(rig, "r.1", second, prefill, decode)
    timings = decode.ended["r.1"].timings
    assert timings.prefix_blocks == (22 + 9) // BLOCK
    assert timings.transfer_blocks == -(-len(second) // BLOCK) - timings.prefix_blocks + 1
    rig.pump_until_idle()


def test_choices_and_resumed_tokens_go_on_from_one_state(rig: Rig) -> None:
    prefill, decode = rig.worker(groups=GROUPS), rig.worker(groups=GROUPS)
    prompt = [(3 + 7 * i) % 40 for i in range(22)]
    several = spec("r.0", prompt, choices=(0, 1, 2), max_tokens=9, temperature=1.0)
    whole, _ = expected(spec("r.1", prompt, max_tokens=9), 0, LENGTH, GROUPS)
    resumed = spec("r.1", prompt, resumed=whole[:4], max_tokens=9)
    for request in (several, resumed):
        rig.place(request, prefill, decode)
    rig.pump(lambda: {"r.0", "r.1"} <= set(decode.ended))
    for choice in several.choices:
        assert decode.tokens("r.0", choice) == expected(several, choice, LENGTH, GROUPS)[0]
    assert decode.tokens("r.1") == whole[4:]
    rig.pump_until_idle()


def test_a_dead_prefill_worker_leaves_nothing_behind(rig: Rig) -> None:
    prefill, decode = rig.worker(groups=GROUPS, lease_s=0.5), rig.worker(groups=GROUPS, lease_s=0.5)
    other = rig.worker(groups=GROUPS)
    decode.transport.hold.set()
    request = spec("r.0", list(range(24)), max_tokens=10)
    rig.place(request, prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0)
    rig.kill(prefill)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    decode.transport.hold.clear()
    hand_over(rig, "r.1", list(range(24)), other, decode)
    rig.pump_until_idle()
    assert decode.engine.referenced_blocks == decode.engine.load().quarantined_blocks == 0


def test_a_late_reader_gets_the_state_at_the_prompts_end(rig: Rig) -> None:
    """The prefill worker goes on with other work, in the pages beside, before the state is read."""
    prefill = rig.worker(groups=GROUPS, num_blocks=64)
    decode = rig.worker(groups=GROUPS)
    decode.transport.hold.set()
    request = spec("r.0", [(3 + 7 * i) % 40 for i in range(22)], max_tokens=10)
    rig.place(request, prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0 and "r.0" in prefill.outputs)
    for name in ("a", "b"):  # the same prompt, then another: the first goes on from its checkpoint
        prompt = request.prompt_tokens if name == "a" else [9] * 22
        prefill.engine.submit(spec(name, prompt, max_tokens=20))
        rig.pump(lambda name=name: name in prefill.ended)
    assert "r.0" not in decode.ended
    decode.transport.hold.clear()
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.tokens("r.0") == expected(request, 0, LENGTH, GROUPS)[0]
    rig.pump_until_idle()


def test_an_abort_in_mid_pull_quarantines_the_state_too(rig: Rig) -> None:
    prefill, decode = rig.worker(groups=GROUPS), rig.worker(groups=GROUPS)
    decode.transport.hold.set()
    rig.place(spec("r.0", list(range(24))), prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0 and "r.0" in prefill.outputs)
    rig.pump(lambda: not prefill.engine.has_work())
    decode.abort("r.0")
    prefill.abort("r.0")
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert decode.engine.load().quarantined_blocks > 0
    decode.transport.hold.clear()
    rig.pump_until_idle()
    assert decode.engine.referenced_blocks == decode.engine.load().quarantined_blocks == 0


@pytest.mark.parametrize(
    ("groups", "block_size", "words"),
    [
        (GROUPS, 8, "a state, which is not made of tokens; start both with --block-size 8"),
        (GROUPS[:1], 4, r"full \(1 layers\) here and full .*, state of 8 bytes \(1 layers\) at"),
        (
            (GROUPS[0], CacheGroup((1,), state_bytes=16)),
            4,
            r"state of 16 bytes .* here and .* state of 8 bytes",
        ),
    ],
)
def test_what_the_peer_has_not_alike_is_refused_by_name(
    rig: Rig, groups: tuple[CacheGroup, ...], block_size: int, words: str
) -> None:
    prefill = rig.worker(groups=GROUPS)
    decode = rig.worker(groups=groups, block_size=block_size)
    rig.place(spec("r.0", range(9)), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.FAILED
    assert re.search(words, decode.ended["r.0"].message)
