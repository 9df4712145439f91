"""A model divided among processes computes what it computes whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, Sequence
from support.ranks import on_ranks
from tiny import EXPERTS, NATIVE, save

from tasuki.execution.collective import Collective
from tasuki.execution.sampler import JointLogits
from tasuki.models.base import CausalModel
from tasuki.models.errors import ModelError, UnsupportedModelError
from tasuki.models.loader import load_model
from tasuki.models.shard import Shard, check_ranks
from tasuki.models.spec import ModelSpec

TOLERANCE = 1e-4  # of the largest logit
# 8 heads over 2 KV heads: four ranks hold each KV head twice. 254 rows of the head: four
# ranks have 64, 64, 64 and 62.
SIZES = {"vocab_size": 254, "hidden_size": 64, "num_attention_heads": 8}
NAMES = (*NATIVE, *EXPERTS)


def run(collective: Collective, folders: dict[str, Path]) -> dict[str, list[Any]]:
    """Logits of several kinds of steps, of each folder's model and of one made up."""
    found = {}
    for name, folder in folders.items():
        weights = "dummy" if name == "dummy" else "auto"
        model = load_model(folder, dtype=torch.float32, weights=weights, collective=collective)
        found[name] = run_steps(model, collective)
    return found


def run_steps(model: CausalModel, collective: Collective) -> list[Any]:
    """Logits on the first rank: whole prompts, chunks, decodes, and a mixture."""
    draw = random.Random(1)
    prompt = [draw.randrange(3, 250) for _ in range(40)]
    paged = Paged(model)
    whole, chunked = Sequence(prompt), Sequence(prompt)
    steps = [paged.step([(whole, 33)])]
    steps += [paged.step([(chunked, count)], all_rows=False) for count in (5, 16)]
    steps.append(paged.step([(whole, 1), (chunked, 9)], all_rows=False))
    steps.append(paged.step([(whole, 1)]))
    joint = JointLogits(collective, model.spec.vocab_size)
    return [joint.whole(step).numpy() for step in steps]  # as tensors they would be shared memory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    saved = {name: base / name for name in NAMES}
    for name, folder in saved.items():
        save(name, folder, changes=SIZES)
    return saved | {"dummy": saved["qwen3"]}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[Any]]:
    from tasuki.execution.collective import ALONE

    return run(ALONE, folders)


@pytest.mark.system
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_rank(
    size: int, folders: dict[str, Path], alone: dict[str, list[Any]]
) -> None:
    first, *_ = on_ranks(size, run, folders)
    for name, steps in alone.items():
        assert_close(first[name], steps)


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        difference = float(abs(got - want).max() / abs(want).max())
        assert difference < TOLERANCE, difference


def spec(**changes: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 1,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 10,
        "max_position": 64,
        "sliding_windows": (None,),
    }
    return ModelSpec(**{**shape, **changes})


def test_what_does_not_divide_is_refused_with_what_would() -> None:
    check_ranks(spec(), 1)
    check_ranks(spec(), 3)
    with pytest.raises(
        ModelError,
        match=r"--tp is 2, but the model has 9 attention heads and 3 KV heads: use one of 1, 3",
    ):
        check_ranks(spec(), 2)
    with pytest.raises(ModelError, match="an inner layer of 1535 columns"):
        check_ranks(spec(intermediate_size=1535), 3)
    with pytest.raises(UnsupportedModelError, match="OtherForCausalLM runs through transformers"):
        check_ranks(spec(architecture="OtherForCausalLM", native=False), 2)
    check_ranks(spec(architecture="OtherForCausalLM", native=False), 1)


def test_every_row_of_every_weight_is_somebodys() -> None:
    whole = spec(num_heads=8, num_kv_heads=2, head_dim=16, vocab_size=10)
    shards = [Shard(whole, rank, 4) for rank in range(4)]
    assert {(s.local.num_heads, s.local.num_kv_heads) for s in shards} == {(2, 1)}
    assert [(p.begin, p.end) for p in (s.kv_rows() for s in shards)] == [
        (0, 16),
        (0, 16),
        (16, 32),
        (16, 32),
    ]
    rows = [(p.begin, p.end, padding) for p, padding in (s.vocab_rows() for s in shards)]
    assert rows == [(0, 3, 0), (3, 6, 0), (6, 9, 0), (9, 10, 2)]
    assert Shard(whole).local == whole


def test_a_vocabulary_smaller_than_the_ranks() -> None:
    rows = [Shard(spec(vocab_size=2), rank, 4).vocab_rows() for rank in range(4)]
    assert [(p.begin, p.end, padding) for p, padding in rows] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 2, 1),
        (2, 2, 1),
    ]
