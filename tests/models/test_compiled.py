"""The fallback under torch.compile: few graphs, whatever the batches, and the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import Paged, Sequence
from tiny import save
from torch._dynamo.testing import CompileCounter

from tasuki.models.fallback import FallbackModel
from tasuki.models.loader import load_model


def run(model: FallbackModel) -> torch.Tensor:
    """Chunks, decodes and mixed steps of many sizes."""
    paged = Paged(model)
    a, b, c = (Sequence(list(range(n, n + 60))) for n in (3, 60, 130))
    steps = [
        [(a, 30)],
        [(b, 20)],
        [(c, 5)],
        [(b, 1), (c, 1), (a, 7)],
        [(a, 1)],
        [(b, 1), (c, 1)],
        [(b, 1), (a, 9)],
    ]
    return torch.cat([paged.step(step) for step in steps])


@pytest.mark.parametrize("name", ["olmo2", "gemma", "starcoder2-window"])
def test_one_graph_serves_all_batches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(name, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert isinstance(model, FallbackModel)
    want = run(model)
    torch.compiler.reset()
    counter = CompileCounter()
    model.compile(counter)
    got = run(model)
    assert counter.frame_count <= 2, "one for any number of tokens, one for a single token"
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_two_models_do_not_meet(tmp_path: Path) -> None:
    """Each finds the backend of its own step."""
    torch.compiler.reset()
    models = []
    for name in ("olmo2", "gemma"):
        save(name, tmp_path / name)
        model = load_model(tmp_path / name, dtype=torch.float32)
        assert isinstance(model, FallbackModel)
        models.append((model, run(model)))
        model.compile(CompileCounter())
    for model, want in models:
        assert float((run(model) - want).abs().max() / want.abs().max()) < 1e-5
