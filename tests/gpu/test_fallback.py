"""A model without a fast path on CUDA: compiled once, right at every batch size, served.

In bfloat16 the compiled layers round elsewhere than those of transformers. The truth
is the same (rounded) weights in float32: errors are relative to it,
|got - want| / |want| over all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_model import save_model, serving
from paged import Paged, Sequence

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="FlashInfer is not installed (optional: tasuki[gpu])")

from test_gpu_engine import WINDOW, crowd, make_model, make_rig, plain_reference
from torch._dynamo.utils import counters

from tasuki.attention.base import AttentionBackend
from tasuki.attention.flashinfer import FlashInferAttention
from tasuki.attention.sdpa import SdpaAttention
from tasuki.launch.config import Topology
from tasuki.models.attending import cache_groups
from tasuki.models.base import CausalModel
from tasuki.models.fallback import FallbackModel
from tasuki.models.fallback_compile import compile_layers
from tasuki.models.loader import load_model

BESIDE_EAGER = 1.3  # times the error of the model as it is


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("olmo2")


@pytest.fixture(scope="module")
def model(folder: Path) -> FallbackModel:
    made = make_model("olmo2", folder)
    assert isinstance(made, FallbackModel)
    return made


def logits(
    model: CausalModel, dtype: torch.dtype, attend: Callable[[torch.Tensor], AttentionBackend]
) -> torch.Tensor:
    """Of chunks, decodes and mixed steps of many sizes."""
    paged = Paged(model, dtype, "cuda", attend)
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


def test_two_graphs_serve_all_layers_and_batches(model: FallbackModel, folder: Path) -> None:
    def flashinfer(pool: torch.Tensor) -> AttentionBackend:
        return FlashInferAttention(pool, model.spec.num_heads, torch.bfloat16)

    exact = load_model(folder, dtype=torch.float32, device="cuda")
    want = logits(exact, torch.float32, SdpaAttention)
    eager = logits(model, torch.bfloat16, flashinfer)
    torch.compiler.reset()
    counters.clear()
    assert compile_layers(model)
    got = logits(model, torch.bfloat16, flashinfer)
    assert counters["stats"]["unique_graphs"] == 2
    error, beside = (float((x - want).norm() / want.norm()) for x in (got, eager))
    assert error < BESIDE_EAGER * beside, f"as it is: {beside:.1e}"


def check_graphs_and_overlap(model: CausalModel) -> None:
    """Assert that overlapping steps in graphs give the tokens of plain ones."""
    reference = plain_reference(model)
    rig = make_rig(model, graphs=True, overlap=True)
    for request in crowd():
        rig.engine.submit(request)
    rig.drain()
    same = [reference.check(name, rig.tokens(name)) for name in reference.tokens]
    assert sum(same) > len(same) / 2


def test_its_graphs_and_overlapping_steps_give_the_tokens_of_plain_ones(
    model: FallbackModel,
) -> None:
    """After the test above it is compiled."""
    check_graphs_and_overlap(model)


def test_layers_with_windows_have_block_tables_of_their_own_in_graphs(tmp_path: Path) -> None:
    model = make_model("gemma3", tmp_path / "gemma3")
    assert [group.window for group in cache_groups(model.spec)] == [None, WINDOW, WINDOW]
    check_graphs_and_overlap(model)


def test_a_worker_compiles_it_and_runs_it_in_graphs(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    options = {"gpu-memory-utilization": 0.6}  # other tests may use the GPU at this time
    model = save_model(tmp_path / "model", "olmo2")
    with serving(model, Topology(0, 0, 1), log, **options) as client:
        assert len(client.complete("bast gong", max_tokens=24).tokens) == 24
    text = log.read_text()
    assert "torch compiled its layers" in text
    assert "compile " in text.partition("started in")[2].partition("\n")[0]
    assert "CUDA graphs:" in text
