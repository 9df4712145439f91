"""Rotation tables against transformers' own, beyond what the parity tests reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasuki.models.errors import UnsupportedModelError
from tasuki.models.rope import read_rope, rope_table

HEAD_DIM, CONTEXT = 16, 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def reference(parameters: dict[str, Any], positions: int) -> torch.Tensor:
    """[positions, head_dim / 2, 2] cos and sin, position by position as decoding would."""

    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    rotary, x = LlamaRotaryEmbedding(config), torch.zeros(1)
    rows = []
    for position in range(positions):
        cos, sin = rotary(x, torch.tensor([[position]]))
        rows.append(torch.stack((cos[0, 0, : HEAD_DIM // 2], sin[0, 0, : HEAD_DIM // 2]), -1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    rope = read_rope({"rope_theta": 5000.0, "rope_parameters": SCALINGS[name]}, CONTEXT)
    positions = 200 if name == "dynamic" else CONTEXT
    table = rope_table(rope, HEAD_DIM, positions, torch.float32)
    half = HEAD_DIM // 2
    assert torch.equal(table[:, 0, :half], table[:, 0, half:])
    assert torch.equal(table[:, 1, :half], -table[:, 1, half:])
    got = torch.stack((table[:, 0, :half], table[:, 1, half:]), -1)
    torch.testing.assert_close(got, reference(SCALINGS[name], positions), atol=2e-5, rtol=1e-5)


def test_longer_dynamic_table_keeps_what_a_shorter_one_said() -> None:
    rope = read_rope({"rope_parameters": SCALINGS["dynamic"]}, CONTEXT)
    short, long = (rope_table(rope, HEAD_DIM, n, torch.float32) for n in (50, 300))
    assert torch.equal(short, long[:50])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "0.5"),
    ],
)
def test_unsupported_kinds_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_rope(config, CONTEXT)


def test_transformers_rotates_dynamically_only_beyond_the_context() -> None:
    """So a request of any length that the fallback admits leaves the others alone."""
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    )
    rotary = LlamaRotaryEmbedding(config)
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 32), torch.tensor([[63]]))
    assert torch.equal(rotary.inv_freq, before)
    rotary(torch.zeros(1, 1, 32), torch.tensor([[64]]))
    assert not torch.equal(rotary.inv_freq, before)
