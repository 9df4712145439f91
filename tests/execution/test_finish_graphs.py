"""What follows the last attention in graphs: a real model, a recorder that computes again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recording import Recorder
from support.models import VOCAB_SIZE, save_tiny_model
from support.ranks import on_ranks
from test_followers import Fenced
from test_mixed_graphs import PaddedSdpa

from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.executor import Executor
from tasuki.execution.finish_graphs import FinishGraphs, buckets_up_to
from tasuki.execution.forward import Body, DivisibleModel
from tasuki.execution.sampler import greedy
from tasuki.execution.step_arrays import StepHeader
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

MAX_ROWS, MAX_TOKENS, BLOCK_SIZE = 11, 48, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DivisibleModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
    found = load_model(folder, dtype=torch.float32, device="cpu")
    assert isinstance(found, DivisibleModel)
    return found


def body_of(model: CausalModel, seed: int) -> Body:
    """Random outputs of a body of 40 tokens."""
    shape, draw = model.spec, torch.Generator().manual_seed(seed)
    hidden = torch.randn(40, shape.hidden_size, generator=draw)
    return hidden, torch.randn(40, shape.num_heads * shape.head_dim, generator=draw)


def make_graphs(model: CausalModel) -> tuple[FinishGraphs, Recorder]:
    graphs, recorder = FinishGraphs(model, ALONE, MAX_ROWS), Recorder()  # type: ignore[arg-type]
    graphs.capture(body_of(model, 0), recorder)
    return graphs, recorder


def test_buckets():
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(2) == [1, 2]
    assert buckets_up_to(11) == [1, 2, 4, 8, 11]
    assert buckets_up_to(576) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 576]


@torch.inference_mode()
def test_wanted_rows_are_those_without_graphs(model: CausalModel) -> None:
    graphs, recorder = make_graphs(model)
    for count in (1, 3, MAX_ROWS, 2, MAX_ROWS + 1, 40):
        body = body_of(model, count)
        rows = torch.randperm(40, generator=torch.Generator().manual_seed(count))[:count]
        before = recorder.replays
        part, best = graphs.run(body, rows)
        want = model.finish(body, rows)  # type: ignore[attr-defined]
        torch.testing.assert_close(part, want)
        assert torch.equal(best, greedy(want))
        assert recorder.replays - before == (count <= MAX_ROWS)


@torch.inference_mode()
def test_padding_is_never_seen_and_does_not_grow(model: CausalModel) -> None:
    graphs, _ = make_graphs(model)
    body, rows = body_of(model, 1), torch.arange(3)
    want = model.finish(body, rows)  # type: ignore[attr-defined]
    before = body_of(model, 2)
    for padding in (before, [torch.full_like(x, float("nan")) for x in before]):
        for buffer, content in zip(graphs._buffers, padding, strict=True):
            buffer.copy_(content[:MAX_ROWS])
        for _ in range(3):
            part, best = graphs.run(body, rows)
            torch.testing.assert_close(part, want)
            assert torch.equal(best, greedy(want))
        for buffer, content in zip(graphs._buffers, padding, strict=True):
            torch.testing.assert_close(
                buffer[3:], content[3:MAX_ROWS], rtol=0, atol=0, equal_nan=True
            )


def run_steps(
    collective: Collective, folder: Path, graphs: bool
) -> tuple[list[list[int]], torch.Tensor, int]:
    """Chunks of one prompt: likeliest tokens of each, logits (on the first rank), and replays."""
    model = load_model(folder, dtype=torch.float32, device="cpu", collective=collective)
    shape, recorder = model.spec, Recorder()
    pool = torch.zeros(16, shape.num_kv_heads, shape.num_layers, 2, BLOCK_SIZE, shape.head_dim)
    executor = Executor(model, PaddedSdpa(pool), pool, collective)
    found, logits = [], []
    with torch.inference_mode():
        if graphs:
            executor.capture(4, 64, MAX_TOKENS, recorder)
            pool.zero_()
        for step, wanted in enumerate((0, 1, 3, 0, 5)):
            begin, end = 6 * step, 6 * step + 6
            header = StepHeader([6], [end], num_decodes=0, width=8, wanted=wanted)
            header = executor.padded(replace(header, greedy=wanted == 3), False)
            assert (header.room is not None) == graphs
            tokens, sources, positions, slots, tables, rows = executor.staging.take(*header.parts())
            tokens[:], sources[:], positions[:], slots[:] = 0, -1, 0, -1
            tokens[:6] = [(7 * i * i + 3) % VOCAB_SIZE for i in range(begin, end)]
            positions[:6] = slots[:6] = range(begin, end)
            tables[:], rows[:] = range(8), range(6 - wanted, 6)
            whole, best = executor.run(header)
            assert (whole is None) == (wanted in (0, 3)) and (best is None) == (not wanted)
            found.append([] if best is None else best.tolist())
            logits.extend([] if whole is None or not collective.is_first else [whole.clone()])
    return found, torch.cat(logits) if logits else torch.empty(0), recorder.replays


def test_a_step_in_a_graph_that_wants_no_logits_ends_with_a_fence(tmp_path: Path) -> None:
    folder, collective = save_tiny_model(tmp_path / "qwen3", "qwen3"), Fenced()
    want, logits, _ = run_steps(ALONE, folder, graphs=False)
    found, others, _ = run_steps(collective, folder, graphs=True)
    assert collective.fences == 2
    assert found == want
    torch.testing.assert_close(others, logits)


def run_both_ways(collective: Collective, folder: Path) -> list[tuple[list[list[int]], list, int]]:
    found = [run_steps(collective, folder, graphs) for graphs in (False, True)]
    return [(tokens, logits.tolist(), replays) for tokens, logits, replays in found]


@pytest.mark.system
def test_ranks_choose_in_graphs_what_one_chooses_without(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "qwen3", "qwen3")
    want, logits, _ = run_steps(ALONE, folder, graphs=False)
    ranks = on_ranks(2, run_both_ways, folder)
    for ways in ranks:
        assert [tokens for tokens, *_ in ways] == [want, want]
        assert [replays for *_, replays in ways] == [0, 5 + 3]
    for _, first_ranks, _ in ranks[0]:
        torch.testing.assert_close(torch.tensor(first_ranks), logits, rtol=1e-4, atol=1e-4)
