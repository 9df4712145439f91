"""Folders as people have them: shards, other dtypes, missing and foreign tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged import Paged, Sequence
from safetensors.torch import load_file, save_file
from tiny import save

from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.loader import choose_dtype, load_model
from tasuki.models.spec_reader import read_spec
from tasuki.preflight.model_folder import model_checks

Tensors = dict[str, torch.Tensor]


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "one")
    save("qwen2", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    tokens = list(range(3, 20))
    one, many = (
        Paged(load_model(tmp_path / name, dtype=torch.float32)).step([(Sequence(tokens), 17)])
        for name in ("one", "many")
    )
    assert torch.equal(one, many)


@pytest.mark.parametrize("left", ["index", "shards"])
def test_one_file_wins_over_an_index_that_an_earlier_save_left(tmp_path: Path, left: str) -> None:
    """As in transformers, whose `save_pretrained` leaves the index."""
    save("qwen2", tmp_path, max_shard_size="40KB")
    if left == "index":
        for shard in tmp_path.glob("model-*.safetensors"):
            shard.unlink()
    save("qwen2", tmp_path / "later")
    edit(tmp_path / "later", lambda t: t["model.embed_tokens.weight"].mul_(2.0))
    (tmp_path / "later/model.safetensors").rename(tmp_path / "model.safetensors")
    (check,) = [c for c in model_checks(tmp_path) if c.name == "model weights"]
    assert check.status == "ok"
    tokens = list(range(3, 20))
    got = Paged(load_model(tmp_path, dtype=torch.float32)).step([(Sequence(tokens), 17)])
    (tmp_path / "model.safetensors").rename(tmp_path / "later/model.safetensors")
    later = load_model(tmp_path / "later", dtype=torch.float32)
    assert torch.equal(got, Paged(later).step([(Sequence(tokens), 17)]))


def test_weights_are_converted(tmp_path: Path) -> None:
    """bfloat16 on disk, float32 in use."""
    reference = save("llama", tmp_path)
    edit(tmp_path, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    tokens = list(range(3, 20))
    got = Paged(load_model(tmp_path, dtype=torch.float32)).step([(Sequence(tokens), 17)])
    with torch.inference_mode():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
        want = reference(torch.tensor([tokens])).logits[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_a_head_of_its_own_is_used_whatever_the_config_says(tmp_path: Path) -> None:
    """As transformers: a fine-tuned head beside `tie_word_embeddings`."""
    from transformers import AutoModelForCausalLM

    reference = save("qwen3", tmp_path)
    assert reference.config.tie_word_embeddings
    head = torch.randn(256, 48, generator=torch.Generator().manual_seed(0))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    tokens = list(range(3, 20))
    got = Paged(load_model(tmp_path, dtype=torch.float32)).step([(Sequence(tokens), 17)])
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([tokens])).logits[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_rotations_are_made_for_the_longest_sequence_only(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 1_000_000})
    )

    def positions(longest: int | None) -> int:
        return load_model(tmp_path, dtype=torch.float32, longest=longest).spec.max_position

    assert positions(None) == 1_000_000
    assert positions(9_000) == 9_000
    assert positions(10) == 4_096
    assert positions(2_000_000) == 1_000_000


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), "extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), "model.norm.weight is"),
        *(
            (
                lambda t, kind=kind: t.update({"model.norm.weight": torch.ones(48).to(kind)}),
                f"model.norm.weight is {str(kind).removeprefix('torch.')}, must be float32",
            )
            for kind in (torch.int8, torch.float8_e5m2)
        ),
    ],
    ids=["missing", "foreign", "shape", "integers", "fp8-without-scales"],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], named: str
) -> None:
    save("llama", tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=named):
        load_model(tmp_path, dtype=torch.float32)


def test_fallback_names_missing_tensors(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    edit(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("weights", ["{}", '{"weight_map": {"a": null}}', "[" * 100_000])
def test_an_index_that_is_none_is_named(tmp_path: Path, weights: str) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(weights)
    with pytest.raises(ModelError, match=r"index\.json is not a shard index: .*fetch the model"):
        load_model(tmp_path, dtype=torch.float32)


def test_no_safetensors_says_what_to_do(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert the weights to safetensors"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path, dtype=torch.float32)


def test_attention_sinks_are_refused_by_name(tmp_path: Path) -> None:
    """Its class declares support; only the trial run can tell."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"GptOssForCausalLM .* needs s_aux"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_model_that_ignores_positions_fails_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RotaryEmbedding

    save("olmo2", tmp_path)
    right = Olmo2RotaryEmbedding.forward

    def from_zero(
        self: Olmo2RotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor
    ) -> object:
        return right(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(Olmo2RotaryEmbedding, "forward", from_zero)
    with pytest.raises(UnsupportedModelError, match="differ from those of transformers"):
        load_model(tmp_path, dtype=torch.float32)


def test_choose_dtype_measures_and_says_why(tmp_path: Path) -> None:
    save("llama", tmp_path)
    dtype, reason = choose_dtype(read_spec(tmp_path), "cpu")
    assert dtype in (torch.float32, torch.bfloat16)
    assert reason.startswith(str(dtype).removeprefix("torch."))
    assert "at 256 rows" in reason and "\n" not in reason


def test_family_member_off_the_fast_path_goes_to_the_fallback(tmp_path: Path) -> None:
    save("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_act": "gelu"}))
    assert not read_spec(tmp_path).native
