"""Measured dispatch: what is measured and kept, and that every choice computes the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import DEVICE
from support.ranks import on_ranks
from tiny import save

from tasuki.execution.collective import ALONE, Collective
from tasuki.models import cache, gemm_tiles, gemms, layers
from tasuki.models.dispatch import measure as measuring
from tasuki.models.dispatch import settle as settling
from tasuki.models.dispatch import store as storing
from tasuki.models.dispatch.decide import choose
from tasuki.models.dispatch.measure import cells_of, measure
from tasuki.models.dispatch.settle import settle
from tasuki.models.dispatch.table import CHOICES, ROWS, STAGES, Choice, DispatchError, Table
from tasuki.models.dispatch.timer import Run
from tasuki.models.llama import LlamaModel
from tasuki.models.loader import load_model
from tasuki.models.ops import LlamaLayer
from tasuki.models.ops_cuda import CudaOps, stage_of

HALF = torch.float16  # the interpreter's GEMM knows no bfloat16
ADDMM = Choice("addmm", "linear")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaModel]:
    """A tiny model over the CUDA steps; its kernels take its sizes."""
    monkeypatch.setattr(gemm_tiles, "COLUMNS", 16)
    monkeypatch.setattr(gemm_tiles, "COLUMNS_OF_GATED", 16)
    monkeypatch.setattr(gemms, "_COLUMNS_OF_ONE", 16)
    monkeypatch.setattr(gemms, "_WEIGHTED", (HALF,))
    monkeypatch.setattr(layers, "_packing_works", lambda _: False)
    monkeypatch.setattr(cache, "cache_root", lambda: tmp_path / "cache")
    save("qwen3", tmp_path)
    loaded = load_model(tmp_path, dtype=HALF, device=DEVICE)
    assert isinstance(loaded, LlamaModel)
    loaded._ops = CudaOps(loaded.spec, DEVICE)
    yield loaded


def run_layer(ops: CudaOps, layer: LlamaLayer, rows: int) -> list[torch.Tensor]:
    """A layer but for attention, and the next one's query, key and value GEMM."""
    generator = torch.Generator().manual_seed(rows)
    size, inner = layer.attention_norm.shape[0], layer.output.weight.shape[1]  # type: ignore[attr-defined]
    hidden = torch.randn(rows, size, generator=generator).to(DEVICE, HALF)
    attended = torch.randn(rows, inner, generator=generator).to(DEVICE, HALF)
    ahead = ops.rest(layer, hidden, attended, layer.attention_norm)
    qkv = ops.qkv(layer, hidden, ahead)
    return [hidden.float(), qkv.float()]


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@torch.inference_mode()
def test_every_choice_computes_the_same(
    model: LlamaModel, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, layer = model.ops, model.layers[0]
    assert isinstance(ops, CudaOps)
    want = run_layer(ops, layer, rows)
    used: list[Choice] = []
    add = ops.add
    monkeypatch.setattr(ops, "add", lambda choice, *a: (used.append(choice), add(choice, *a))[1])
    for choice in CHOICES:
        ops.table = Table()
        for cell in cells_of(layer):
            ops.table.set(cell.key, cell.rows, choice)
        used.clear()
        for got, expected in zip(run_layer(ops, layer, rows), want, strict=True):
            assert float((got - expected).norm() / expected.norm()) < 5e-3, choice
        assert used == [choice] * 2


def test_a_choice_that_cannot_be_had_is_left_to_the_default(model: LlamaModel) -> None:
    """As where a file of another machine says `addmm`, and the sum over ranks follows."""
    ops, layer = model.ops, model.layers[0]
    assert isinstance(ops, CudaOps)
    summed = dataclasses.replace(layer, output=layers.SummedLinear(layer.output, ALONE))
    for cell in cells_of(layer):
        ops.table.set(cell.key, cell.rows, ADDMM)
    hidden = torch.zeros(3, layer.attention_norm.shape[0], dtype=HALF, device=DEVICE)
    assert ops._choice("mlp", layer, hidden) == ADDMM
    assert ops._choice("mlp", summed, hidden) == Choice("linear", "ours")


class FakeClock:
    """Says what work takes, by the choice that it is of; nothing is computed."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[int, str]] = []

    def work(self, ops: CudaOps, choice: Choice, _: Any, cell: measuring.Cell) -> Any:
        self.asked.append((cell.rows, str(choice)))
        return str(choice)

    def prepare(self, work: Any, _: torch.device) -> Run:
        return lambda: self.seconds.get(work, 1.0)


def test_what_is_measured_is_what_the_table_lacks(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock({str(ADDMM): 0.9})
    monkeypatch.setattr(measuring, "_work", clock.work)
    ops, table = model.ops, Table()
    assert isinstance(ops, CudaOps)
    cells = cells_of(model.layers[0])
    for cell in cells[:-3]:
        table.set(cell.key, cell.rows, CHOICES[0])
    assert measure(ops, model.layers, table, time.monotonic() - 1.0, clock.prepare) == 3
    assert clock.asked == []
    assert measure(ops, model.layers, table, time.monotonic() + 60.0, clock.prepare) == 0
    assert {rows for rows, _ in clock.asked} == set(ROWS[-3:])
    assert table.choice(cells[-1].key, ROWS[-1]) == ADDMM
    assert table.choice(cells[0].key, ROWS[0]) == CHOICES[0]


def test_the_first_start_measures_and_the_second_reads(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = FakeClock({str(ADDMM): 0.5})
    monkeypatch.setattr(measuring, "_work", clock.work)
    monkeypatch.setattr(settling, "measure", lambda *a: measure(*a, clock.prepare))
    monkeypatch.setattr(settling, "BUDGET_S", 60.0)
    settle(model, "measured", ALONE)
    assert isinstance(model.ops, CudaOps)
    first = model.ops.table.to_json()
    assert clock.asked and set(first[cells_of(model.layers[0])[0].key].values()) == {str(ADDMM)}
    [path] = (tmp_path / "cache" / "dispatch").glob("*.json")
    clock.asked.clear()
    for wanted in ("measured", str(path)):
        model.ops.table = Table()
        settle(model, wanted, ALONE)
        assert model.ops.table.to_json() == first
    assert clock.asked == []
    with pytest.raises(DispatchError, match=r"none\.json, which cannot be read"):
        settle(model, str(tmp_path / "none.json"), ALONE)


def test_a_file_with_a_choice_that_is_no_more_is_refused(model: LlamaModel, tmp_path: Path) -> None:
    file = tmp_path / "older.json"
    file.write_text(json.dumps({"choices": {"mlp": {"1": "early/early"}}}))
    with pytest.raises(DispatchError, match=r"'early/early'.*choices are ours/ours, "):
        settle(model, str(file), ALONE)


def test_a_model_without_choices_keeps_the_default_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("qwen3", tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    with caplog.at_level(logging.INFO):
        settle(loaded, "measured", ALONE)
    assert "dispatch: the default, as only the Llama family on a GPU" in caplog.text
    with pytest.raises(DispatchError, match=r"none\.json, which cannot be read"):
        settle(loaded, str(tmp_path / "none.json"), ALONE)


def test_a_new_choice_is_measured_although_there_is_a_table(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock({})
    monkeypatch.setattr(measuring, "_work", clock.work)
    monkeypatch.setattr(settling, "measure", lambda *a: measure(*a, clock.prepare))
    monkeypatch.setattr(settling, "BUDGET_S", 60.0)
    settle(model, "measured", ALONE)
    clock.asked.clear()
    monkeypatch.setattr(storing, "CHOICES", (*CHOICES, Choice("linear", "new")))
    settle(model, "measured", ALONE)
    assert clock.asked


@torch.inference_mode()
def test_real_times_decide(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real timer over the real candidates: which is fastest is the machine's to say."""
    monkeypatch.setattr(measuring, "ROWS", (2,))
    table, measured = Table(), dict[str, dict[str, list[float]]]()
    ops, layer = model.ops, model.layers[0]
    assert isinstance(ops, CudaOps)
    begin_s = time.perf_counter()
    missing = measure(
        ops,
        [layer],
        table,
        time.monotonic() + 60.0,
        on_times=lambda cell, times: measured.update({cell.stage: times}),
    )
    took_s = time.perf_counter() - begin_s
    assert missing == 0 and set(measured) == set(STAGES)
    all_times = [s for times in measured.values() for turns in times.values() for s in turns]
    assert min(all_times) > 0.0 and (DEVICE.type != "cpu" or sum(all_times) < took_s)
    for cell in cells_of(layer):
        times, default = measured[cell.stage], ops.default(*stage_of(cell.stage, layer), 2)
        assert {"addmm/linear", "linear/linear", str(default)} <= set(times)
        assert str(table.choice(cell.key, 2)) == choose(times, str(default))


def share(collective: Collective, folder: str) -> dict[str, dict[str, str]]:
    """What a rank has of the first one's table."""
    layers._packing_works = lambda _: False
    model = load_model(Path(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, LlamaModel)
    table = Table()
    if collective.is_first:
        for cell in cells_of(model.layers[0])[::2]:
            table.set(cell.key, cell.rows, ADDMM)
    return settling._shared(table, model, collective).to_json()


@pytest.mark.system
def test_all_ranks_have_the_first_ones_choices(tmp_path: Path) -> None:
    save("llama", tmp_path)
    first, second = on_ranks(2, share, str(tmp_path))
    assert first == second and sum(map(len, first.values())) == len(ROWS)
