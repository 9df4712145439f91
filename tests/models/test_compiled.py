"""The fallback under torch.compile: few graphs, whatever the batches, and the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setuptools  # noqa: F401 - before anything imports distutils, which it replaces
import torch
from paged import Paged, Sequence
from tiny import save
from torch._dynamo.testing import CompileCounter

from tasuki.models import one_row_op
from tasuki.models.fallback import FallbackModel, load_fallback
from tasuki.models.fallback_compile import compile_layers
from tasuki.models.loader import compile_model, load_model
from tasuki.models.spec_reader import read_spec

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


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


def load(name: str, folder: Path) -> FallbackModel:
    """Through transformers, whether there is a fast path or not."""
    save(name, folder)
    spec = read_spec(folder)
    return load_fallback(folder, spec, torch.float32, torch.device("cpu"), trust_remote_code=False)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("qwen3", 2),
        ("olmo2", 2),
        ("gemma", 2),
        ("starcoder2-window", 2),
        ("qwen2-some-windows", 4),
        ("minicpm3", 2),
    ],
)
def test_one_layer_serves_all_layers_and_batches(name: str, graphs: int, tmp_path: Path) -> None:
    """One graph for any number of tokens, one for a single token; for each kind of layer."""
    model = load(name, tmp_path)
    want = run(model)
    counter = CompileCounter()
    assert compile_layers(model, counter)
    assert counter.frame_count == graphs
    assert error(run(model), want) < 1e-5
    assert counter.frame_count == graphs, "compiled again while serving"


def test_what_inductor_makes_of_it_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("olmo2", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert isinstance(model, FallbackModel)
    want = run(model)
    with caplog.at_level("INFO"):
        compile_model(model)
    assert "torch compiled its layers" in caplog.text
    assert error(run(model), want) < 1e-4


@pytest.mark.interpreter
def test_one_row_is_multiplied_by_our_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's four GEMMs of a single token, and no others."""
    gemms = pytest.importorskip("tasuki.models.gemms", reason="there is no Triton here")
    monkeypatch.setattr(one_row_op, "_DEVICES", ("cpu",))
    monkeypatch.setattr(gemms, "_COLUMNS_OF_ONE", 16)
    monkeypatch.setattr(gemms, "_OUTS_OF_ONE", 64)  # few programs: they are interpreted
    rows: list[int] = []
    plain = gemms.FewRows.plain

    def counted(few: Any, gemm: Any, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return plain(few, gemm, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(gemms.FewRows, "plain", counted)
    model = load("olmo2", tmp_path)
    want = run(model)
    assert not rows, "it is not compiled"
    assert compile_layers(model, CompileCounter())
    rows.clear()
    assert error(run(model), want) < 1e-5
    assert rows == [1] * 4 * model.spec.num_layers


def test_two_models_do_not_meet(tmp_path: Path) -> None:
    """Each finds the backend of its own step."""
    models = []
    for name in ("olmo2", "gemma"):
        model = load(name, tmp_path / name)
        models.append((model, run(model)))
        compile_layers(model, CompileCounter())
    for model, want in models:
        assert error(run(model), want) < 1e-5


def _breaks(graph: Any, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no code for this")


def _lies(graph: Any, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: tuple(1.5 * part for part in graph(*args))


@pytest.mark.parametrize(
    ("backend", "reason"), [(_breaks, "no code for this"), (_lies, "its logits")]
)
def test_what_does_not_compile_runs_as_it_is(
    backend: Callable[..., Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load("olmo2", tmp_path)
    want = run(model)
    assert not compile_layers(model, backend)
    assert "runs without torch.compile" in caplog.text
    assert reason in caplog.text
    assert error(run(model), want) == 0
