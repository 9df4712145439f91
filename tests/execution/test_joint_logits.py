"""Ranks with a part of the logits each choose what one rank would, and send little for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import engine_fakes
import pytest
import torch
import torch.distributed as dist
from engine_fakes import Rig, expected, spec
from recording import Recorder
from support.ranks import on_ranks
from test_cuda_graphs import GraphModel, PlannedAttention

from tasuki.attention.batch import Batch
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.execution.collective import Collective
from tasuki.execution.executor import Executor
from tasuki.execution.runner import ModelRunner
from tasuki.execution.sampler import NOT_FINITE, JointLogits, greedy
from tasuki.execution.step_arrays import StepHeader

VOCAB = 46  # of four ranks the last one has 10 of 12 columns
VOCABS = (VOCAB, 48, 3)  # of four ranks the last one has nothing of three
PADDING = 1e6  # what padding holds: it would win
NAN, INFINITY = float("nan"), float("inf")
hashed = engine_fakes.hashed


def part_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """One rank's columns, those of the last ones padded."""
    each = -(-whole.shape[1] // size)
    padded = torch.full((whole.shape[0], each * size), PADDING)
    padded[:, : whole.shape[1]] = whole
    return padded[:, each * rank : each * (rank + 1)]


def cases(vocab: int) -> torch.Tensor:
    """Rows [R, vocab] that are easy to get wrong, then many with ties."""
    last = vocab - 1
    changes: list[dict[int, float]] = [
        {},  # all alike
        {last: 3.0},
        {0: 3.0, last: 3.0},
        {vocab // 2: 3.0, vocab // 2 - 1: 3.0},
        {last: NAN},
        {0: NAN, last: 5.0},
        {last: INFINITY},
        {0: INFINITY, last: INFINITY},
        dict.fromkeys(range(last), -INFINITY),
        dict.fromkeys(range(vocab), -INFINITY),
        dict.fromkeys(range(1, vocab), -INFINITY),
    ]
    rows = torch.full((len(changes), vocab), -2.0)
    for row, change in zip(rows, changes, strict=True):
        for token, value in change.items():
            row[token] = value
    drawn = torch.randn(200, vocab, generator=torch.Generator().manual_seed(3))
    return torch.cat([rows, drawn.round()])


def choose(collective: Collective, vocabs: Sequence[int]) -> list[list[int]]:
    """This rank's answers for each vocabulary."""
    found = []
    for vocab in vocabs:
        part = part_of(cases(vocab), collective.rank, collective.size)
        found.append(JointLogits(collective, vocab).best(part).tolist())
    return found


class PartModel(GraphModel):
    """Gives a rank's part of whole logits with many ties."""

    rank, size = 0, 1

    def forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        return part_of(super().forward(batch, attention), self.rank, self.size)


class Counted:
    """A collective that keeps how much was sent to make logits or compare them."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self.gathered_rows: list[int] = []
        self.compared_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        self.gathered_rows.append(x.shape[0])
        return self._inner.gather(x, width)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.compared_bytes += x.numel() * x.itemsize
        return self._inner.all_gather(x)


class Teller:
    """`Followers` that are told by the collectives' own group."""

    def run(self, header: StepHeader, slab: memoryview) -> None:
        self.tell(("run", header, bytes(slab)))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.tell(("copy", pairs))

    def scrub(self, blocks: Sequence[int], first_slot: int) -> None:
        self.tell(("scrub", blocks, first_slot))

    def tell(self, order: tuple[Any, ...] | None) -> None:
        dist.broadcast_object_list([order], src=0)


def follow(executor: Executor) -> None:
    """Do as the first rank says until it says no more."""
    while True:
        orders: list[Any] = [None]
        dist.broadcast_object_list(orders, src=0)
        match orders[0]:
            case ("run", header, slab):
                executor.staging.take(*header.parts())
                executor.staging.filled()[:] = slab
                executor.run(header)
            case ("copy", pairs):
                executor.copy(pairs)
            case ("scrub", blocks, first_slot):
                executor.scrub(blocks, first_slot)
            case None:
                return


def small_and_tied() -> None:
    """Let the fakes have the small vocabulary, and whole numbers for logits."""
    engine_fakes.VOCAB = VOCAB
    engine_fakes.Shape.vocab_size = VOCAB
    engine_fakes.hashed = lambda seen: hashed(seen)[:VOCAB].round()


def requests(sampling: bool) -> list[Any]:
    """Greedy ones; with `sampling` one each that needs all of the logits, for a while."""
    found = [spec(f"g{i}", range(i, 3 * i + 4), max_tokens=20 + 4 * i) for i in range(3)]
    if sampling:
        others = (
            {"temperature": 0.9},
            {"logprobs": 2},
            {"frequency_penalty": 1.0},
            {"logit_bias": {3: 2.0}},
            {"prompt_logprobs": 0},
        )
        found += [spec(f"s{i}", range(i + 5), max_tokens=4, **o) for i, o in enumerate(others)]
    return found


def serve(
    collective: Collective, sampling: bool, graphs: bool
) -> tuple[dict[str, list[int]], list[int], int, float]:
    """Answers (on the first rank), rows gathered, bytes compared, and a sum over the pool."""
    small_and_tied()
    PartModel.rank, PartModel.size = collective.rank, collective.size
    config = EngineConfig(
        num_blocks=96,
        max_model_len=64,
        block_size=4,
        max_batched_tokens=16,
        vocab_size=VOCAB,
        max_running_requests=9,
        overlap=True,
    )
    pool = torch.zeros(config.num_blocks, 1, 1, 2, config.block_size, 2)
    counted, model = Counted(collective), PartModel(pool)
    attention: Any = PlannedAttention()
    answers = {}
    teller = Teller()
    if collective.is_first:
        runner = ModelRunner(model, attention, pool, counted, teller)
        if graphs:
            runner.capture(9, config.max_model_len, recorder=Recorder())
            counted.compared_bytes = 0
        rig = Rig(Engine(config, runner), pool, model)
        for request in requests(sampling):
            rig.engine.submit(request)
        rig.drain()
        answers = {each.request_id: rig.tokens(each.request_id) for each in requests(sampling)}
        teller.tell(None)
    else:
        executor = Executor(model, attention, pool, counted)
        if graphs:
            executor.capture(9, config.max_model_len, recorder=Recorder())
        follow(executor)
    return answers, counted.gathered_rows, counted.compared_bytes, float(pool.double().sum())


Served = dict[tuple[bool, bool], tuple[dict[str, list[int]], list[int], int, float]]


def run(collective: Collective) -> tuple[list[list[int]], Served]:
    """All that one rank does, so that it starts but once."""
    chosen = choose(collective, VOCABS)
    return chosen, {
        (sampling, graphs): serve(collective, sampling, graphs)
        for sampling in (False, True)
        for graphs in (False, True)
    }


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest) -> list[tuple[list[list[int]], Served]]:
    return on_ranks(request.param, run)


@pytest.mark.system
def test_the_best_of_the_parts_is_the_best_of_the_whole(ranks: list[Any]) -> None:
    want = [greedy(cases(vocab)).tolist() for vocab in VOCABS]
    for row in want:
        assert row[4:8] == [NOT_FINITE] * 4 and row[9] == NOT_FINITE
    assert [chosen for chosen, _ in ranks] == [want] * len(ranks)


@pytest.mark.system
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "mixed"])
def test_ranks_answer_as_one_does(
    ranks: list[Any], sampling: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_fakes, "VOCAB", VOCAB)
    monkeypatch.setattr(engine_fakes, "hashed", lambda seen: hashed(seen)[:VOCAB].round())
    want = {each.request_id: expected(each, 0, 64)[0] for each in requests(sampling)}
    found = [served[sampling, graphs] for _, served in ranks]
    answers, gathered, compared, _ = found[0]
    assert answers == want
    assert len({total for *_, total in found}) == 1, "ranks computed different tokens"
    tokens = sum(map(len, want.values()))
    if not sampling:
        assert gathered == []
        if not graphs:
            assert compared == 8 * tokens  # of logits it would be 4 * VOCAB / size a token
    else:
        needed = sum(len(want[name]) for name in want if name.startswith("s"))
        assert needed < sum(gathered) < tokens  # only while somebody needs them
