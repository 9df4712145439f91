"""Sampling: each parameter does what it says, for its own row only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from engine_fakes import spec

from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.execution.penalties import needs_adjusting
from tasuki.execution.sampler import NOT_FINITE, Sampler, greedy, uniform, uniforms

VOCAB = 200


def draw(choice: int = 0, outputs: tuple[int, ...] = (), prompt=(1, 2), **params) -> Draw:
    request = spec("r", prompt, choices=(choice,), max_tokens=10_000, **params)
    sequence = Request(request, 0, b"", 0.0).sequences[0]
    sequence.tokens.extend(outputs)
    return Draw.next(sequence, choice)


def sample(logits, rows, draws):
    """Tokens and log-probabilities, as lists."""
    result = Sampler(logits.device).sample(logits, rows, draws)
    tokens = result.tokens.tolist()
    return tokens, None if result.scores is None else result.scores.entries(tokens)


def tokens_of(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return sample(logits.expand(len(draws), -1), list(range(len(draws))), draws)[0]


def histogram(logits: torch.Tensor, count: int = 4000, **params) -> Counter[int]:
    draws = [draw(seed=seed, **({"temperature": 1.0} | params)) for seed in range(count)]
    return Counter(tokens_of(logits, draws))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_uniform_numbers_are_uniform_and_keyed():
    numbers = [uniform(s, c, p) for s in range(20) for c in range(10) for p in range(20)]
    assert len(set(numbers)) == 4000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 4000 - 0.5) < 0.02
    assert uniform(2**64 - 1, 3, 7) == uniform(2**64 - 1, 3, 7)


def test_uniform_numbers_never_change():
    """Workers of different versions go on with one another's requests."""
    assert uniform(0, 0, 0) == 0.6886830611311145
    assert uniform(12345, 1, 99) == 0.8566847636028806


def test_uniform_numbers_of_many_are_those_of_each():
    keys = [(0, 0, 0), (12345, 1, 99), (2**64 - 1, 3, 7)]
    assert uniforms(keys).tolist() == [uniform(*key) for key in keys]


def test_a_draw_is_the_number_of_its_seed_choice_and_position():
    """A request that goes on elsewhere draws the same."""
    for seed, choice, position in ((0, 0, 0), (5, 0, 0), (5, 3, 0), (5, 3, 2)):
        one = draw(choice, (9,) * position, seed=seed, temperature=1.0)
        wanted = int(uniform(seed, choice, position) * 1024)
        assert tokens_of(torch.zeros(1, 1024), [one]) == [wanted]


def test_greedy_takes_the_largest(logits):
    assert tokens_of(logits, [draw()]) == [int(logits.argmax())]


def test_draws_follow_the_softmax(logits):
    counts = histogram(logits)
    wanted = logits.softmax(-1)[0]
    for token in wanted.topk(8).indices.tolist():
        share, p = counts[token] / 4000, wanted[token].item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 4000)


def test_temperature_flattens_and_sharpens(logits):
    cold = histogram(logits, 500, temperature=1e-5)
    assert set(cold) == {int(logits.argmax())}
    assert len(histogram(logits, 500, temperature=3.0)) > len(histogram(logits, 500))


def test_tiny_temperature_stays_finite(logits):
    assert tokens_of(logits, [draw(temperature=1e-38)]) == [int(logits.argmax())]


def test_top_k_keeps_k_tokens(logits):
    assert set(histogram(logits, top_k=3)) == set(logits[0].topk(3).indices.tolist())


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p):
    values, order = logits.softmax(-1)[0].sort(descending=True)
    size = int((values.cumsum(-1) < top_p).sum()) + 1
    found = set(histogram(logits, top_p=top_p))
    assert found <= set(order[:size].tolist())
    assert len(found) >= size - 2


def test_top_p_wider_than_the_shortcut():
    flat = torch.zeros(1, 5000)
    flat[0, ::2] = 0.5  # 2,500 likelier tokens, 62% of the mass
    found = histogram(flat, 3000, top_p=0.6)
    assert all(token % 2 == 0 for token in found)
    assert len(found) > 1024
    assert any(token % 2 for token in histogram(flat, 200, top_p=0.7))


def test_top_p_counts_within_top_k(logits):
    values, order = logits[0].topk(4)
    shares = values.softmax(-1).cumsum(-1)
    found = histogram(logits, top_k=4, top_p=float(shares[1]) - 1e-4)
    assert found.keys() == set(order[:2].tolist())


def test_min_p_is_relative_to_the_likeliest(logits):
    probabilities = logits.softmax(-1)[0]
    allowed = (probabilities >= 0.2 * probabilities.max()).nonzero()[:, 0].tolist()
    assert set(histogram(logits, min_p=0.2)) == set(allowed)


@pytest.mark.parametrize("others", [{"top_k": 150}, {"top_p": 0.99}])
def test_min_p_holds_beside_other_filters(logits, others):
    assert set(histogram(logits, min_p=0.2, **others)) == set(histogram(logits, min_p=0.2))


def test_min_p_of_one_leaves_the_likeliest(logits):
    assert set(histogram(logits, 50, min_p=1.0)) == {int(logits.argmax())}


def test_logit_bias_bans_and_forces(logits):
    best = int(logits.argmax())
    assert tokens_of(logits, [draw(logit_bias={best: -100.0})]) != [best]
    assert tokens_of(logits, [draw(logit_bias={7: 100.0})]) == [7]


def test_presence_and_frequency_penalties_count_output_only():
    logits = torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    assert tokens_of(logits, [draw(prompt=(0, 0), presence_penalty=2.0)]) == [0]
    assert tokens_of(logits, [draw(outputs=(0,), presence_penalty=0.2)]) == [1]
    assert tokens_of(logits, [draw(outputs=(0,), frequency_penalty=0.05)]) == [0]
    assert tokens_of(logits, [draw(outputs=(0, 0, 0), frequency_penalty=0.05)]) == [1]
    assert tokens_of(logits, [draw(outputs=(0, 0, 0), presence_penalty=0.05)]) == [0]


def test_repetition_penalty_counts_prompt_and_output():
    positive = torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    assert tokens_of(positive, [draw(prompt=(0,), repetition_penalty=1.5)]) == [1]
    assert tokens_of(positive, [draw(prompt=(3,), outputs=(0,), repetition_penalty=1.5)]) == [1]
    negative = torch.tensor([[-1.0, -1.1, -9.0, -9.0]])
    assert tokens_of(negative, [draw(prompt=(0,), repetition_penalty=1.5)]) == [1]


def test_extreme_repetition_penalty_draws_a_token_of_the_vocabulary():
    logits = torch.tensor([[5.0, 4.0, -3.0, 1.0]])
    for seed in range(20):
        params = {"repetition_penalty": 1e-38, "temperature": 1.0, "seed": seed}
        [token] = tokens_of(logits, [draw(prompt=(0, 1, 2), **params)])
        assert token in (0, 1)


def test_banning_every_token_still_draws_one():
    every = frozenset(range(4))
    banned = draw(min_tokens=1, stop_token_ids=every, temperature=1.0)
    [token] = tokens_of(torch.ones(1, 4), [banned])
    assert token in every


def test_min_tokens_masks_stop_tokens_until_then(logits):
    best = int(logits.argmax())
    stops = frozenset({best, 10**6})
    assert tokens_of(logits, [draw(min_tokens=2, stop_token_ids=stops, outputs=(5,))]) != [best]
    assert tokens_of(logits, [draw(min_tokens=1, stop_token_ids=stops, outputs=(5,))]) == [best]


def test_min_tokens_without_stop_tokens_leaves_a_request_plain():
    """As load clients ask: `min_tokens` and `ignore_eos`, greedy."""
    free, held = (
        draw(min_tokens=3, temperature=0.0, stop_token_ids=stops) for stops in (set(), {1})
    )
    assert [each.sequence.request.plain for each in (free, held)] == [True, False]
    assert [needs_adjusting(each) for each in (free, held)] == [False, True]


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(9, 4000, generator=generator) * 3
    draws = [
        draw(seed=1, temperature=0.7, top_p=0.9),
        draw(seed=2, temperature=1.0, top_k=40),
        draw(seed=3),
        draw(seed=4, temperature=1.4, min_p=0.01, logprobs=2),
        draw(seed=5, temperature=1.0, repetition_penalty=1.2, outputs=(3, 4)),
        draw(seed=6, temperature=1.0, top_p=0.99, top_k=2000),
        draw(seed=7, temperature=2.5, top_p=0.97),
        draw(seed=8, logit_bias={5: 2.0}),
        draw(seed=9, temperature=1.0, choice=4),
    ]
    together, logprobs = sample(logits, range(9), draws)
    alone = [sample(logits[i : i + 1], [0], [draws[i]])[0][0] for i in range(9)]
    assert together == alone
    assert logprobs is not None
    assert [entry is not None for entry in logprobs] == [i == 3 for i in range(9)]


def test_several_draws_may_share_a_row(logits):
    draws = [draw(choice=c, temperature=1.0) for c in range(3)]
    both = torch.cat([logits, logits.flip(-1)])
    tokens, _ = sample(both, [0, 1, 1], draws)
    flipped = logits.flip(-1)
    assert tokens == [
        sample(source, [0], [one])[0][0]
        for source, one in zip((logits, flipped, flipped), draws, strict=True)
    ]
    assert sample(both, [1, 1], [draw(), draw()])[0] == [int(flipped.argmax())] * 2


def test_sampling_leaves_the_logits_alone(logits):
    before = logits.clone()
    sample(logits, [0], [draw(temperature=1.0, logit_bias={1: 3.0}, frequency_penalty=1.0)])
    assert logits.equal(before)


def test_logprobs_are_of_the_raw_distribution(logits):
    request = draw(temperature=1.0, logit_bias={9: 100.0}, logprobs=4)
    [token], [entry] = sample(logits, [0], [request])  # type: ignore[misc]
    wanted = logits.log_softmax(-1)[0]
    assert token == entry.token == 9
    assert entry.logprob == pytest.approx(wanted[9].item(), abs=1e-5)
    assert entry.rank == int((wanted > wanted[9]).sum()) + 1
    assert [t for t, _ in entry.top] == wanted.topk(4).indices.tolist()
    assert [v for _, v in entry.top] == pytest.approx(wanted.topk(4).values.tolist(), abs=1e-5)


def test_logprobs_are_those_of_the_draws_row(logits):
    both = torch.cat([logits, logits.flip(-1)])
    tokens, entries = sample(both, [1, 0, 1], [draw(logprobs=count) for count in (0, 4, 2)])
    assert tokens == both[[1, 0, 1]].argmax(-1).tolist()
    wanted = both.log_softmax(-1).max().item()
    assert [entry.logprob for entry in entries] == pytest.approx([wanted] * 3, abs=1e-5)
    assert [entry.rank for entry in entries] == [1] * 3
    assert [len(entry.top) for entry in entries] == [0, 4, 2], "as many as each wants"


def test_rows_that_are_not_finite_are_found():
    logits = torch.zeros(5, 10)
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, :] = 3e38  # finite, though the sum is not
    logits[4, 7] = 1.0
    assert greedy(logits).tolist() == [0, NOT_FINITE, NOT_FINITE, 0, 7]
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}):
        tokens, _ = sample(logits, range(5), [draw(**params) for _ in range(5)])
        assert [token == NOT_FINITE for token in tokens] == [False, True, True, False, False]
