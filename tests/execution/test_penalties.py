"""Penalties, bias and bans of many rows at once: what each row alone would get, step after step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from engine_fakes import spec
from support.kernels import DEVICE

from tasuki.engine.plan import Draw
from tasuki.engine.request import Request, SequenceState
from tasuki.execution import penalties, penalty_kernel
from tasuki.execution.penalties import Penalties
from tasuki.execution.penalty_torch import LEAST

VOCAB = 50
EXTRAS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.25},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": -0.5, "presence_penalty": 1.0, "repetition_penalty": 0.75},
    {"logit_bias": {3: 2.0, 49: -100.0}},
    {"min_tokens": 2, "stop_token_ids": frozenset({1, 2, 10**6})},
    {"repetition_penalty": 2.0, "logit_bias": {0: 1.0}, "min_tokens": 3},
]


def sequence_of(name: str, rng: random.Random, **extra: Any) -> SequenceState:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
    resumed = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 4]))]
    request = Request(spec(name, prompt, resumed=resumed, max_tokens=99, **extra), 0, b"", 0.0)
    return request.sequences[0]


def wanted(logits: torch.Tensor, sequence: SequenceState, position: int) -> torch.Tensor:
    """One row by the definition, token by token."""
    params = sequence.request.spec.sampling
    prompt = sequence.tokens[: sequence.request.num_prompt_tokens]
    output = sequence.tokens[sequence.request.num_prompt_tokens :][:position]
    assert len(output) == position
    row, counts = logits.tolist(), Counter(output)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in counts.items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, value in params.logit_bias.items():
        row[token] += value
    if position < params.min_tokens:
        for token in params.stop_token_ids:
            if token < VOCAB:
                row[token] = LEAST
    return torch.tensor(row)


@pytest.fixture(params=["torch", "kernel"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the logits are; on the CPU the kernel is interpreted."""
    if request.param == "kernel":
        monkeypatch.setattr(penalties, "_penalize", penalty_kernel.penalize)
        return DEVICE
    return torch.device("cpu")


def test_rows_by_the_definition_while_sequences_grow_end_and_give_way(
    device: torch.device,
) -> None:
    """Some tokens are in flight when they are counted; sequences come, pause, and are voided."""
    rng = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    ours = Penalties(device)
    alive = [sequence_of(f"r{i}", rng, **EXTRAS[i % len(EXTRAS)]) for i in range(10)]
    voided = 0
    for step in range(30):
        if step % 3 == 0:
            alive.append(sequence_of(f"s{step}", rng, **rng.choice(EXTRAS)))
            alive.pop(0)
        batch = rng.sample(alive, rng.randint(1, len(alive)))
        sampled = torch.randint(VOCAB, (len(alive),), generator=generator)
        draws, later = [], []
        for index, sequence in enumerate(batch):
            ahead = rng.random() < 0.6  # its newest token is not known on the host yet
            sequence.drawn = index
            draws.append(Draw(sequence, 0, sequence.num_outputs + ahead))
            if ahead:
                later.append((sequence, int(sampled[index])))
        logits = torch.randn(len(alive), VOCAB, generator=generator) * 3
        rows = [rng.randrange(len(alive)) for _ in batch]
        found = ours.adjust(logits.to(device), rows, draws, sampled.to(device)).cpu()
        for sequence, token in later:
            sequence.tokens.append(token)
        for row, draw, got in zip(rows, draws, found, strict=True):
            torch.testing.assert_close(got, wanted(logits[row], draw.sequence, draw.position))
        for sequence, token in later:
            if rng.random() < 0.2:  # what was launched is void: another token takes its place
                voided += 1
                sequence.epoch += 1
                sequence.tokens[-1] = (token + 1) % VOCAB
    assert voided > 5


def test_few_slots_serve_many_sequences_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "SLOTS_AT_ONCE", 2)
    rng = random.Random(1)
    ours = Penalties(torch.device("cpu"))
    sequences = [sequence_of(f"r{i}", rng, repetition_penalty=1.5) for i in range(6)]
    logits = torch.randn(1, VOCAB)
    for turn in range(20):
        pair = rng.sample(sequences, 2)
        found = ours.adjust(logits, [0, 0], [Draw.next(s, 0) for s in pair], None)
        for sequence, got in zip(pair, found, strict=True):
            torch.testing.assert_close(got, wanted(logits[0], sequence, sequence.num_outputs))
            sequence.tokens.append(turn)
        assert ours._seen.shape == (2, VOCAB)


def test_bias_follows_the_batch_from_step_to_step() -> None:
    """What was sent to the device for one batch serves that batch only."""
    rng = random.Random(5)
    ours = Penalties(torch.device("cpu"))
    one, other = (sequence_of(f"r{i}", rng, logit_bias={3: 1.0 + i}) for i in range(2))
    logits = torch.randn(1, VOCAB)
    for batch in ([one], [one, other], [one, other], [other, one], [other]):
        found = ours.adjust(logits, [0] * len(batch), [Draw.next(s, 0) for s in batch], None)
        for sequence, got in zip(batch, found, strict=True):
            torch.testing.assert_close(got, wanted(logits[0], sequence, sequence.num_outputs))


def test_a_fork_counts_apart() -> None:
    rng = random.Random(2)
    ours = Penalties(torch.device("cpu"))
    parent = sequence_of("r", rng, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    ours.adjust(logits, [0], [Draw.next(parent, 0)], None)
    child = parent.fork(1)
    parent.tokens.append(3)
    child.tokens.append(4)
    found = ours.adjust(logits, [0, 0], [Draw.next(s, 0) for s in (parent, child)], None)
    for sequence, got in zip((parent, child), found, strict=True):
        torch.testing.assert_close(got, wanted(logits[0], sequence, sequence.num_outputs))
    assert not found[0].equal(found[1])


def test_a_step_that_raises_leaves_every_token_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)
    ours = Penalties(torch.device("cpu"))
    sequence = sequence_of("r", rng, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    ours.adjust(logits, [0], [Draw.next(sequence, 0)], None)
    sequence.tokens.append(7)
    draw = Draw.next(sequence, 0)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(penalties, "upload", lambda *_: (_ for _ in ()).throw(MemoryError()))
        ours.adjust(logits, [0], [draw], None)
    [found] = ours.adjust(logits, [0], [draw], None)
    torch.testing.assert_close(found, wanted(logits[0], sequence, draw.position))
