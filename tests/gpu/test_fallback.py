"""A model without a fast path on CUDA: compiled once, right at every batch size, served.

In bfloat16 the compiled layers round elsewhere than those of transformers: errors
are relative, |got - want| / |want| over all logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import save_model, serving
from paged import Paged, Sequence

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="FlashInfer is not installed (optional: tasuki[gpu])")

from torch._dynamo.utils import counters

from tasuki.attention.flashinfer import FlashInferAttention
from tasuki.launch.config import Topology
from tasuki.models.fallback import FallbackModel
from tasuki.models.fallback_compile import compile_layers
from tasuki.models.loader import load_model

ERROR = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("olmo2") / "model", "olmo2")


def logits(model: FallbackModel) -> torch.Tensor:
    """Of chunks, decodes and mixed steps of many sizes."""
    heads = model.spec.num_heads
    paged = Paged(
        model,
        torch.bfloat16,
        "cuda",
        lambda pool: FlashInferAttention(pool, heads, torch.bfloat16),
    )
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.spec.vocab_size, (9, 90), generator=draw)
    a, b, *others = (Sequence(row) for row in ids.tolist())
    steps: list[list[tuple[Sequence, int]]] = [
        [(a, 40)],
        [(b, 17), *((other, 9) for other in others)],
        [(b, 1), (a, 30)],
        [(a, 1)],
        [(sequence, 1) for sequence in (a, b, *others)],
        [(b, 1), (others[0], 1), (a, 9)],
    ]
    return torch.cat([paged.step(step) for step in steps])


def test_two_graphs_serve_all_layers_and_batches(folder: Path) -> None:
    model: Any = load_model(folder, dtype=torch.bfloat16, device="cuda")
    assert isinstance(model, FallbackModel)
    want = logits(model)
    torch.compiler.reset()
    counters.clear()
    assert compile_layers(model)
    got = logits(model)
    assert counters["stats"]["unique_graphs"] == 2
    assert float((got - want).norm() / want.norm()) < ERROR


def test_a_worker_compiles_it_and_runs_it_in_graphs(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with serving(folder, Topology(0, 0, 1), log) as client:
        assert len(client.complete("bast gong", max_tokens=24).tokens) == 24
    text = log.read_text()
    assert "torch compiled its layers" in text
    assert "compile " in text.partition("started in")[2].partition("\n")[0]
    assert "CUDA graphs:" in text
