"""Settings that cannot work are refused with value, limit and remedy."""

from __future__ import annotations

import pytest

from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import EngineConfigError


def make(**settings: object) -> EngineConfig:
    values = {"num_blocks": 64, "max_model_len": 512, "vocab_size": 100} | settings
    return EngineConfig(**values)  # type: ignore[arg-type]


def test_pool_for_two_longest_requests_is_enough():
    assert make().min_blocks == 64
    assert make(max_model_len=510).max_request_blocks == 32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 63}, ["63", "64", "--kv-memory", "--max-model-len", "496"]),
        ({"max_model_len": 1}, ["1", "2"]),
        ({"block_size": 0}, ["block_size", "0"]),
        ({"vocab_size": 0}, ["vocab_size"]),
        ({"max_batched_tokens": 0}, ["max_batched_tokens"]),
        ({"max_running_requests": -3}, ["-3"]),
        ({"growth_headroom_tokens": -1}, ["-1"]),
        ({"identity": b"short"}, ["5 bytes", "16"]),
        ({"draft_tokens": 4, "overlap": True}, ["4", "overlap", "--speculate"]),
    ],
)
def test_refusals(settings, words):
    with pytest.raises(EngineConfigError) as caught:
        make(**settings)
    for word in words:
        assert word in str(caught.value)
