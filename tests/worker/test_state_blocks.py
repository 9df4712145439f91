"""Models with states get blocks that hold them; what cannot be is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.models.spec import ModelSpec, StateTensor
from tasuki.worker.config import ConfigError, Limits, WorkerConfig
from tasuki.worker.device import Dtypes
from tasuki.worker.state_blocks import fit_states

LIMITS = Limits(block_size=16, max_batched_tokens=64, max_running_requests=4)
RECURRENT = StateTensor(recurrent=True, index=0, shape=(8, 16, 16), float32=True)
CONVOLUTION = StateTensor(recurrent=False, index=0, shape=(160, 4), float32=False)
SPEC = ModelSpec(
    architecture="Hybrid",
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=512,
    max_position=4096,
    sliding_windows=(None,) * 3,
    native=False,
    states={0: (CONVOLUTION, RECURRENT), 2: (CONVOLUTION, RECURRENT)},
    no_kv=frozenset({0, 2}),
)
FULL, HALF = Dtypes(torch.float32, torch.float32), Dtypes(torch.bfloat16, torch.bfloat16)


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model=Path("/m"), **settings)


def test_blocks_are_as_large_as_the_states_ask_for() -> None:
    # A token takes 2 x 2 x 16 elements in a layer; a state 160 x 4 of them and 8 x 16 x 16 floats.
    assert fit_states(config(), LIMITS, SPEC, FULL).block_size == 48  # 42 tokens
    assert fit_states(config(), LIMITS, SPEC, HALF).block_size == 80  # 74 tokens
    assert fit_states(config(block_size=50), LIMITS, SPEC, FULL) is LIMITS
    small = replace(SPEC, states={0: (CONVOLUTION,), 2: (CONVOLUTION,)})
    assert fit_states(config(), LIMITS, small, FULL).block_size == 16


def test_models_without_states_are_left_alone() -> None:
    plain = replace(SPEC, states={}, no_kv=frozenset())
    assert fit_states(config(speculate="prompt-lookup"), LIMITS, plain, FULL) is LIMITS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 32}, "block-size is 32: .* state of 10752 bytes.* from 42 on, or leave it"),
        ({"speculate": "prompt-lookup"}, "Hybrid keep a state.* leave out --speculate"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_remedy(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        fit_states(config(**settings), LIMITS, SPEC, FULL)


def test_what_states_are_is_told_in_words_for_the_identity() -> None:
    told = SPEC.told_states(torch.bfloat16)
    assert told[1] == "layer 2: (160, 4) torch.bfloat16, (8, 16, 16) torch.float32"
    assert told != SPEC.told_states(torch.float32)
