"""Weights of GEMMs in fp8: rounding, parts, joining, folders with fp8 blocks, ranks."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from paged import Paged, Sequence
from safetensors.torch import load_file, save_file
from tiny import save

from tasuki.models.checkpoint import Checkpoint
from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.llama import linear_of
from tasuki.models.llama_tensors import MlpTensors, read_llama
from tasuki.models.loader import load_model
from tasuki.models.shard import Shard, Slice
from tasuki.models.spec_reader import read_spec
from tasuki.models.weights import FP8, DenseWeight, Fp8Weight, Source, join, quantize

F32 = torch.float32
CPU = torch.device("cpu")
PROMPT = list(range(3, 40))


def blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as folders have it: fp8, and what blocks of 128 x 128 are multiplied by."""
    out, size = weight.shape
    scales = torch.empty(-(-out // 128), -(-size // 128))
    values = torch.empty(out, size, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scales[i, j]).to(FP8)
    return values, scales


def save_blocks(name: str, folder: Path, **changes: object) -> dict[str, torch.Tensor]:
    """A model whose layers' GEMMs are in fp8 blocks; gives what these stand for."""
    save(name, folder)
    tensors = load_file(folder / "model.safetensors")
    dense = dict(tensors)
    for key, weight in list(tensors.items()):
        if ".layers." in key and key.endswith("proj.weight"):
            values, scales = blocks(weight)
            tensors[key], tensors[f"{key}_scale_inv"] = values, scales
            dense[key] = Fp8Weight(values, scales, 128, 128, F32).dense()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    described = {"quant_method": "fp8", "weight_block_size": [128, 128], **changes}
    config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
    return dense


def logits(folder: Path, quantization: str = "none") -> torch.Tensor:
    model = load_model(folder, dtype=F32, quantization=quantization)
    return Paged(model).step([(Sequence(PROMPT), len(PROMPT))])


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (5, 3), (1, 129), (576, 576)], ids=str)
def test_rounding_to_fp8_keeps_four_bits_of_each_number(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[0] = 0.0
    fp8 = quantize(weight)
    assert fp8.values.dtype == FP8 and fp8.scales.shape == (shape[0], -(-shape[1] // 128))
    least = weight.abs().max() / 448 * 2**-8
    assert bool(((fp8.dense() - weight).abs() <= weight.abs() * 2**-4 + least).all())
    assert torch.equal(fp8.dense()[0], weight[0])


def test_no_scale_is_worse_than_the_least() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    least = weight.view(64, 2, 128).abs().amax(2) / 448
    values = (weight.view(64, 2, 128) / least[:, :, None]).to(FP8)
    plain = Fp8Weight(values.view(64, 256), least, 1, 128, F32).dense()
    error, other = ((each - weight).square().sum() for each in (quantize(weight).dense(), plain))
    assert error < 0.8 * other


@pytest.mark.parametrize("cuts", [(64,), (100,), (128, 129), (1, 50, 190)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_have_the_numbers_of_the_whole(cuts: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    whole = Fp8Weight(*blocks(torch.randn(300, 300)), 128, 128, F32)
    edges = [0, *cuts, 300]
    parts = [whole.part(Slice(dim, a, b)) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat([part.dense() for part in parts], dim), whole.dense())
    if dim == 0:
        joined = join(parts)
        assert isinstance(joined, Fp8Weight)
        assert torch.equal(joined.dense(), whole.dense())
        mixed = join([*parts[:-1], DenseWeight(parts[-1].dense())])
        assert isinstance(mixed, DenseWeight)
        assert torch.equal(mixed.dense(), whole.dense())
    x = torch.randn(4, 300)
    torch.testing.assert_close(linear_of(whole)(x), x @ whole.dense().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "phi3-window", "qwen3", "qwen3-moe"])
def test_a_folder_of_fp8_blocks_is_what_its_numbers_stand_for(tmp_path: Path, name: str) -> None:
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    dense = save_blocks(name, folder)
    assert read_spec(folder).fp8_blocks
    save(name, plain)
    save_file(dense, plain / "model.safetensors")
    assert torch.equal(logits(folder), logits(plain))
    if name != "qwen3-moe":
        assert torch.equal(logits(folder, "fp8"), logits(plain))  # there is nothing to round


def test_rounded_weights_are_close_and_not_the_same(tmp_path: Path) -> None:
    save("llama", tmp_path)
    exact, fp8 = logits(tmp_path), logits(tmp_path, "fp8")
    assert 1e-3 < float((fp8 - exact).norm() / exact.norm()) < 0.2


@pytest.mark.parametrize("name", ["llama", "phi3-window"])
@pytest.mark.parametrize("stored", [False, True], ids=["rounded", "stored"])
def test_ranks_have_parts_of_the_same_numbers(tmp_path: Path, stored: bool, name: str) -> None:
    """Heads of 8 and an inner layer of 80 in two: parts that cut blocks."""
    (save_blocks if stored else save)(name, tmp_path)
    spec = read_spec(tmp_path)

    def read(rank: int, size: int) -> list[torch.Tensor]:
        source = Source(Checkpoint(tmp_path, F32, CPU), quantized=not stored)
        layer = next(iter(read_llama(Shard(spec, rank, size), source).layers))
        mlp = layer.mlp
        assert isinstance(mlp, MlpTensors) and isinstance(layer.qkv, Fp8Weight)
        query, key, value = layer.qkv.dense().split(
            [n * spec.head_dim // size for n in (spec.num_heads, *(spec.num_kv_heads,) * 2)]
        )
        rows = [query, key, value, mlp.gate.dense(), mlp.up.dense()]
        return [*rows, layer.output.dense(), mlp.down.dense()]

    whole, first, second = read(0, 1), read(0, 2), read(1, 2)
    for index, want in enumerate(whole):
        got = torch.cat([first[index], second[index]], 0 if index < 5 else 1)
        assert torch.equal(got, want)


def test_a_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    save_blocks("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {**tensors, f"{name}_scale_inv": torch.ones(3, 3)}
    save_file(wrong, file)
    with pytest.raises(ModelError, match=r"up_proj.weight is .* with scales \(3, 3\), config.json"):
        load_model(tmp_path, dtype=F32)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"up_proj.weight is float8_e4m3fn: fp8 is supported for"):
        load_model(tmp_path, dtype=F32)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -0.01])
def test_a_scale_that_cannot_be_is_refused(tmp_path: Path, scale: float) -> None:
    save_blocks("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name][0, 0] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"1 of 1 scales in {name} are NaN.*fetch the model"):
        load_model(tmp_path, dtype=F32)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": [64, 64]},
        {"weight_block_size": None},
        {"activation_scheme": "static"},
        {"quant_method": "gptq"},
    ],
    ids=str,
)
def test_other_quantized_folders_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    save_blocks("llama", tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=r"fp8 with weight_block_size \[128, 128\]"):
        load_model(tmp_path, dtype=F32)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-neox"])
def test_rounding_is_refused_where_weights_are_not_read_so(tmp_path: Path, name: str) -> None:
    save(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match="fp8 weights require the Llama family"):
        load_model(tmp_path, dtype=F32, quantization="fp8")
