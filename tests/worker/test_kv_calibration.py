"""Scales of an fp8 cache: measured and stored; the same logits in chunks, from a prefix, whole."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "models"))
from paged import Paged, Sequence
from tiny import save

from tasuki.attention.kv_scales import FP8, UNSCALED, KvScales
from tasuki.attention.sdpa import SdpaAttention
from tasuki.execution.collective import ALONE
from tasuki.models.base import CausalModel
from tasuki.models.errors import ModelError
from tasuki.models.loader import load_model
from tasuki.worker.kv_calibration import scales_for, stored_scales

F32, CPU = torch.float32, torch.device("cpu")
PROMPT = list(range(3, 63))


def load(folder: Path) -> CausalModel:
    return load_model(folder, dtype=F32, kv_dtype=FP8, quantization="fp8")


def paged(model: CausalModel, scales: KvScales) -> Paged:
    return Paged(model, FP8, attention=lambda pool: SdpaAttention(pool, F32, scales))


def test_measured_scales_hold_what_a_model_makes(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = load(tmp_path)
    scales = scales_for(model, tmp_path, F32, CPU, ALONE)
    assert scales == scales_for(load(tmp_path), None, F32, CPU, ALONE)
    assert len(scales.exponents) == model.spec.num_layers
    run = paged(model, scales)
    run.step([(Sequence(PROMPT), len(PROMPT))])
    largest = run.pool.float().abs().amax((0, 1, 4, 5))
    assert bool((largest <= 448).all()) and bool((largest > 28).all())


@pytest.mark.parametrize("chunks", [(60,), (25, 35), (1, 58, 1), (7,) * 8 + (4,)], ids=str)
def test_logits_do_not_depend_on_chunks_or_a_prefix(
    tmp_path: Path, chunks: tuple[int, ...]
) -> None:
    save("qwen3", tmp_path)
    model = load(tmp_path)
    scales = scales_for(model, tmp_path, F32, CPU, ALONE)
    run = paged(model, scales)
    want = run.step([(Sequence(PROMPT), len(PROMPT))])
    sequence = Sequence(PROMPT)
    got = torch.cat([run.step([(sequence, count)]) for count in chunks])
    # A number on the edge between two of fp8 may fall on either side.
    assert float((got - want).norm() / want.norm()) < 2e-2
    prefix = Sequence(PROMPT, cached=48, blocks=list(sequence.blocks))
    from_prefix = run.step([(prefix, 12)])
    assert float((from_prefix - want[48:]).norm() / want[48:].norm()) < 2e-2
    # Without fp8 the answer is another one: the cache is what was asked for.
    plain = Paged(model).step([(Sequence(PROMPT), len(PROMPT))])
    assert float((plain - want).norm() / want.norm()) > 2e-3


def store_scales(folder: Path, layers: int) -> tuple[Path, dict[str, torch.Tensor]]:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(layers):
        for name, scale in (("k", 0.3), ("v", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(tensors, file, metadata={"format": "pt"})
    return file, tensors


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3n"])
def test_scales_of_a_folder_are_not_for_latents_nor_several_groups(
    tmp_path: Path, name: str
) -> None:
    """A latent is key and value in one, and a group's attention does not know the layer."""
    save(name, tmp_path)
    model = load_model(tmp_path, dtype=F32, kv_dtype=FP8)
    store_scales(tmp_path, model.spec.num_layers)
    assert scales_for(model, tmp_path, F32, CPU, ALONE) == UNSCALED


def test_scales_of_the_folder_are_taken(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = load(tmp_path)
    file, tensors = store_scales(tmp_path, model.spec.num_layers)
    scales = scales_for(load(tmp_path), tmp_path, F32, CPU, ALONE)
    assert scales.exponents == ((-1, -2),) * model.spec.num_layers
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"1 of 6 scales .* missing \(layer 1, v_scale\)"):
        scales_for(model, tmp_path, F32, CPU, ALONE)


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        ([math.nan], "nan"),
        ([math.inf], "inf"),
        ([0.0], "0"),
        ([-1.0], "-1"),
        ([1.0, 2.0], "2 numbers"),
        ([], "0 numbers"),
    ],
)
def test_scales_of_the_folder_that_are_no_positive_number_are_refused(
    tmp_path: Path, stored: list[float], what: str
) -> None:
    name = "model.layers.0.self_attn.k_proj.k_scale"
    tensors = {name: torch.tensor(stored), name.replace("k_scale", "v_scale"): torch.tensor([0.5])}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"k_scale is {what}, must .* --kv-dtype auto"):
        stored_scales(tmp_path, 1)
