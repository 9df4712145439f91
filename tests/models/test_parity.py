"""Logits and greedy tokens of tiny random-weight models equal those of transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, Sequence
from tiny import EXPERTS, FALLBACK, NATIVE, save

from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

TOLERANCE = 1e-4  # of the largest logit


@dataclass
class Pair:
    reference: Any
    model: CausalModel

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] by transformers."""
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits
        return logits[0]


@pytest.fixture(scope="module", params=[*NATIVE, *EXPERTS, *FALLBACK])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    reference = save(request.param, folder)
    model = load_model(folder, dtype=torch.float32)
    assert model.spec.native == (request.param not in FALLBACK)
    return Pair(reference, model)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 256) for _ in range(length)]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    difference = float((got - want).abs().max() / want.abs().max())
    assert difference < TOLERANCE, difference


@pytest.mark.parametrize("length", [1, 8, 9, 50])
def test_whole_prefill(pair: Pair, length: int) -> None:
    tokens = prompt(length, length)
    got = Paged(pair.model).step([(Sequence(tokens), length)])
    assert_close(got, pair.expected(tokens))


def test_prefill_in_chunks(pair: Pair) -> None:
    tokens = prompt(1, 45)
    paged, sequence = Paged(pair.model), Sequence(tokens)
    parts = [paged.step([(sequence, count)]) for count in (5, 16, 3, 1, 20)]
    assert_close(torch.cat(parts), pair.expected(tokens))


def test_decodes_mixed_with_chunks(pair: Pair) -> None:
    """Three decodes of different lengths, one chunk that goes on, one that begins."""
    paged = Paged(pair.model)
    lengths = (3, 21, 40)
    decoding = [Sequence(prompt(10 + n, n + 1)) for n in lengths]
    for sequence, count in zip(decoding, lengths, strict=True):
        paged.step([(sequence, count)])
    going_on, beginning = Sequence(prompt(20, 33)), Sequence(prompt(21, 12))
    paged.step([(going_on, 14)])
    got = paged.step([*((s, 1) for s in decoding), (going_on, 19), (beginning, 12)])
    want = [pair.expected(sequence.tokens)[-1:] for sequence in decoding]
    want += [pair.expected(going_on.tokens)[14:], pair.expected(beginning.tokens)]
    assert_close(got, torch.cat(want))


def test_only_wanted_rows(pair: Pair) -> None:
    paged = Paged(pair.model)
    first, second = Sequence(prompt(2, 18)), Sequence(prompt(3, 11))
    got = paged.step([(first, 18), (second, 11)], all_rows=False)
    want = torch.cat([pair.expected(s.tokens)[-1:] for s in (first, second)])
    assert_close(got, want)


def test_no_rows_wanted_still_writes_the_cache(pair: Pair) -> None:
    """A chunk in the middle of a prompt asks for no logits."""
    paged, sequence = Paged(pair.model), Sequence(prompt(4, 20))
    forward = pair.model.forward

    def without_rows(batch: Any, attention: Any) -> torch.Tensor:
        batch.logits_rows = batch.logits_rows[:0]
        return forward(batch, attention)

    paged.model = type("NoRows", (), {"forward": staticmethod(without_rows)})()
    assert paged.step([(sequence, 19)]).shape == (0, 256)
    paged.model = pair.model
    got = paged.step([(sequence, 1)])
    assert_close(got, pair.expected(sequence.tokens)[-1:])


def test_greedy_64(pair: Pair) -> None:
    tokens = prompt(5, 30)
    want = list(tokens)
    for _ in range(64):
        want.append(int(pair.expected(want)[-1].argmax()))
    for chunk in (1000, 7):
        assert Paged(pair.model).greedy(tokens, 64, chunk) == want[30:], chunk


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    reference = save("llama", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    tokens = prompt(6, 24)
    got = Paged(model, torch.bfloat16).step([(Sequence(tokens), 24)])
    want = Pair(reference, model).expected(tokens)
    assert float((got - want).abs().max() / want.abs().max()) < 0.1
