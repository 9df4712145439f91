"""Identity: equal for the same KV, different for any other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasuki.kv.identity import IdentityError, model_identity

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "hidden_size": 8, "use_cache": True}


def tensors(change: float = 0.0) -> dict[str, torch.Tensor]:
    values = {f"layer.{i}": torch.arange(600.0).reshape(20, 30) + i for i in range(3)}
    values["layer.1"][-1, -1] += change
    return values


def model(folder: Path, config: dict[str, object] | None = None, change: float = 0.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(tensors(change), folder / "model.safetensors")
    return folder


def identity(
    folder: Path, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype = torch.float32
) -> bytes:
    return model_identity(folder, dtype=dtype, kv_dtype=kv_dtype)


def test_the_same_model_has_the_same_identity_wherever_it_lies(tmp_path: Path) -> None:
    one = model(tmp_path / "a")
    cosmetic = {"transformers_version": "9", "_name_or_path": "x", "use_cache": False}
    two = model(tmp_path / "b", cosmetic)
    assert identity(one) == identity(two)
    assert len(identity(one)) == 16


def test_sharding_changes_nothing(tmp_path: Path) -> None:
    one, two = model(tmp_path / "a"), model(tmp_path / "b")
    (two / "model.safetensors").unlink()
    for index, (name, tensor) in enumerate(tensors().items()):
        save_file({name: tensor}, two / f"model-{index}.safetensors")
    assert identity(one) == identity(two)


def test_dummy_weights_are_one_for_a_config_and_no_others(tmp_path: Path) -> None:
    real = model(tmp_path / "a")
    dtypes = {"dtype": torch.float32, "kv_dtype": torch.float32}
    dummy = model_identity(real, **dtypes, weights="dummy")
    (real / "model.safetensors").unlink()
    assert model_identity(real, **dtypes, weights="dummy") == dummy
    other = model(tmp_path / "b", {"rope_theta": 500000.0})
    assert model_identity(other, **dtypes, weights="dummy") != dummy
    assert identity(model(tmp_path / "c")) != dummy


def test_config_weights_and_dtypes_count(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    found = {
        identity(base),
        identity(base, dtype=torch.bfloat16),
        identity(base, kv_dtype=torch.bfloat16),
        identity(model(tmp_path / "b", {"rope_theta": 500000.0})),
        identity(model(tmp_path / "c", change=1.0)),
    }
    assert len(found) == 5


def test_quantized_weights_count(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    int8 = model_identity(base, **dtypes, quantization="int8")
    assert int8 != identity(base, **dtypes)
    assert int8 == model_identity(base, **dtypes, quantization="int8")
    assert model_identity(base, **dtypes, quantization="none") == identity(base, **dtypes)


def test_scales_of_the_cache_count(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}
    scaled = model_identity(base, **dtypes, kv_scales=[(0, 1), (2, -1)])
    assert scaled == model_identity(base, **dtypes, kv_scales=[(0, 1), (2, -1)])
    others = [model_identity(base, **dtypes, kv_scales=s) for s in ([], [(0, 1), (1, -1)])]
    assert scaled not in others and others[0] == model_identity(base, **dtypes)


def test_what_states_are_counts(tmp_path: Path) -> None:
    base = model(tmp_path / "a")
    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    states = [["layer 0: (64, 3) torch.bfloat16"], ["layer 0: (64, 4) torch.bfloat16"], []]
    told = [model_identity(base, **dtypes, states=each) for each in states]
    assert len(set(told)) == 3 and told[2] == identity(base, **dtypes)


def test_damaged_folders_are_refused_by_file(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(IdentityError, match="partial"):
        identity(folder)
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(IdentityError, match="damaged"):
        identity(folder)
    weights.unlink()
    with pytest.raises(IdentityError, match=r"no \*\.safetensors"):
        identity(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(IdentityError, match=r"config\.json"):
        identity(folder)
