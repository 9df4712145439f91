"""Reading config.json: both ages of it, defaults, windows, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.spec_reader import read_spec

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return path


def test_defaults(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path))
    assert (spec.num_kv_heads, spec.head_dim, spec.max_position) == (4, 8, 128)
    assert spec.native and not spec.tied_head and not spec.attention_bias and not spec.qk_norm
    assert spec.sliding_windows == (None,) * 4
    assert spec.rope is not None and spec.rope.kind == "default"


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 32,
            },
        },
        {
            "rope_parameters": {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["before-5", "5"],
)
def test_rope_of_both_ages(tmp_path: Path, changes: dict[str, Any]) -> None:
    rope = read_spec(folder(tmp_path, **changes)).rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 5e5, 8)
    assert rope.original_max_position == 32


def test_rotations_of_both_ages_must_agree(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    same = folder(tmp_path, rope_scaling=yarn, rope_parameters=yarn)
    assert read_spec(same).rope == read_spec(folder(tmp_path, rope_scaling=yarn)).rope
    with pytest.raises(ModelError, match=r"rope_scaling \{.*yarn.*rope_parameters \{.*default"):
        read_spec(folder(tmp_path, rope_scaling=yarn, rope_parameters=plain))


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_context_after_stretching(tmp_path: Path, rope: dict[str, Any], context: int) -> None:
    assert read_spec(folder(tmp_path, rope_scaling=rope)).max_position == context


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 9, None, 9),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": False,
            },
            (None,) * 4,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 9, None, 9),
        ),
        *(
            (
                {
                    "architectures": [architecture],
                    "use_sliding_window": True,
                    "max_window_layers": 3,
                },
                (None, None, None, 4096),
            )
            for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 0}, (None,) * 4),
        ({"architectures": ["Phi3ForCausalLM"]}, (None,) * 4),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 9}, (9,) * 4),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    changes = {**changes, "num_key_value_heads": 2}
    assert read_spec(folder(tmp_path, **changes)).sliding_windows == windows


def test_generation_config_decides_what_ends(tmp_path: Path) -> None:
    folder(tmp_path)
    assert read_spec(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_spec(tmp_path).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"eos_token_id": [7, 2', "is not valid JSON"),
        ("[7, 2]", "holds a list, must be an object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', must be a token id"),
        ('{"eos_token_id": [7, true]}', "must be a token id"),
    ],
)
def test_a_broken_generation_config_is_refused_by_name(
    tmp_path: Path, text: str, named: str
) -> None:
    folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError) as raised:
        read_spec(tmp_path)
    assert named in str(raised.value)
    assert "generation_config.json" in str(raised.value)


OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "T5ForConditionalGeneration",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"architectures": ["NoSuchModel"], "model_type": "no-such"}, "NoSuchModel"),
        (
            {
                "architectures": ["DeepseekV32ForCausalLM"],
                "model_type": "deepseek_v32",
                "index_topk": 64,
            },
            "index_topk",
        ),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "attn_logit_softcapping": 50.0,
            },
            "attn_logit_softcapping 50.0",
        ),
        (
            {
                "architectures": ["Llama4ForCausalLM"],
                "model_type": "llama4_text",
                "layer_types": ["chunked_attention"] * 4,
            },
            "chunked_attention",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"},
            "layers differ in head_dim",
        ),
        ({**OLMO2, "hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ({**OLMO2, "num_attention_heads": 0}, "num_attention_heads"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_spec(folder(tmp_path, **changes))


@pytest.mark.parametrize("kind", ["longrope", "yarn"])  # which its class takes for the same
def test_context_ends_where_longrope_would_turn_the_whole_batch(tmp_path: Path, kind: str) -> None:
    factors = [1.0] * 4
    spec = read_spec(
        folder(
            tmp_path,
            architectures=["Phi3ForCausalLM"],
            model_type="phi3",
            pad_token_id=0,
            original_max_position_embeddings=32,
            rope_scaling={"type": kind, "short_factor": factors, "long_factor": factors},
        )
    )
    assert spec.max_position == 32 and not spec.native


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "a list"),
        ('{"architectures": []}', "0 architectures"),
        (json.dumps({**BASE, "hidden_size": 0}), "hidden_size is 0"),
        (json.dumps({**BASE, "num_key_value_heads": 3}), "3 KV heads"),
    ],
)
def test_broken_folders(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=named):
        read_spec(tmp_path)


MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 4,
    "use_sliding_window": True,
    "sliding_window": 16,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"rms_norm_eps": value}, "rms_norm_eps is") for value in (None, math.nan, -1, "x", [])),
        *(({"rope_theta": value}, "rope_theta is") for value in (math.nan, -1.0, math.inf, [1])),
        *(({"rope_scaling": value}, "rope_scaling is") for value in ("linear", 4, [1, 2])),
        *(
            ({"rope_scaling": {"type": "linear", "factor": value}}, "factor is")
            for value in ("x", -2.0, math.nan)
        ),
        *(
            ({"max_position_embeddings": value}, "max_position_embeddings is")
            for value in ("abc", -1, 1.5, math.nan, True)
        ),
        *(
            ({**of, "sliding_window": value}, "sliding_window is")
            for of in (MISTRAL, QWEN2)
            for value in (0, -1, 1.5, "8", math.inf)
        ),
        ({**QWEN2, "layer_types": ["sliding_attention"]}, "layer_types is .*, must be a list of 4"),
        *(
            ({**of, "layer_types": [kind] * 4}, "layer_types is .*, must be a list of 4")
            for of in (MISTRAL, QWEN2)
            for kind in ("chunked_attention", 1, [])
        ),
        ({**QWEN2, "max_window_layers": "x"}, "not supported between"),
        ({"architectures": 5}, "architectures is 5"),
        ({"architectures": {"a": 1}}, "architectures is"),
    ],
    ids=str,
)
def test_odd_values_are_refused_with_the_file(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=rf"config.json.*{said}"):
        read_spec(folder(tmp_path, **changes))


MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_layers_with_experts_and_without(tmp_path: Path) -> None:
    experts = read_spec(folder(tmp_path, **MOE, decoder_sparse_step=2, mlp_only_layers=[1])).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.inner_size) == (8, 2, 16)
    assert experts.dense_layers == {0, 1, 2}, "every second layer has experts, but not this one"
    assert not experts.renormalise


def test_more_experts_for_a_token_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_experts_per_tok is 9, the model has 8 experts"):
        read_spec(folder(tmp_path, **MOE | {"num_experts_per_tok": 9}))


@pytest.mark.parametrize("value", ["ab", 5])
def test_layers_without_experts_must_be_a_list(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match=r"config.json.*mlp_only_layers is"):
        read_spec(folder(tmp_path, **MOE, mlp_only_layers=value))


def test_windows_of_every_layer_beside_experts_take_the_other_path(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path, **MOE, use_sliding_window=True, sliding_window=16))
    assert not spec.native
