"""The GPU's drawing against its definition in float64, and against the CPU's.

The definition: of a row's distances (largest - logit) / temperature, in float32, top-k keeps
those up to the k-th; top-p those up to the one at which the weights of what top-k keeps (of
several that are the k-th, as many as make up k) reach their share; min-p those up to a
bound. Ties stay in. The token is the inverse of the cumulative weights in vocabulary order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import spec
from numpy.typing import NDArray
from support.kernels import DEVICE

from tasuki.engine.api import SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.execution import draw_kernel, sampler
from tasuki.execution.draw_torch import draw as draw_on_cpu
from tasuki.execution.penalties import Penalties
from tasuki.execution.sampler import NOT_FINITE, greedy

# temperature, top-k, top-p, min-p
CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (0.7, 0, 0.01, 0.0),
    (1.5, 0, 0.999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.3, 7, 1.0, 0.0),
    (1.0, 50, 0.8, 0.0),
    (2.0, 10**6, 0.7, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 0.0, 0.0),
    (1.0, 40, 0.95, 0.02),
    (1.0, 0, 1.0, 1.0),
    (1e-38, 0, 0.9, 0.0),
]
MORE = 1 if DEVICE.type == "cpu" else 20  # an interpreted draw takes 0.2 s
NEAR = 1e-6  # of the total weight: so near a border, rounding of exp may choose the neighbour


def kept(logits: NDArray[np.float32], case: tuple[float, int, float, float]) -> NDArray[np.float64]:
    """Weights [V] of the tokens that pass the filters, 0 for the others."""
    temperature, top_k, top_p, min_p = case
    vocab = len(logits)
    inverse = min(np.float32(1.0) / np.float32(temperature), np.float32(3e38))
    with np.errstate(over="ignore"):
        distance = (logits.max() - logits) * inverse
    ordered = np.sort(distance)
    border = np.float32(np.inf)
    number = min(top_k, vocab) or vocab
    if top_k:
        border = ordered[number - 1]
    if top_p < 1.0:
        sums = np.exp(-ordered[:number].astype(np.float64)).cumsum()
        border = ordered[min(int((sums < top_p * sums[-1]).sum()), number - 1)]
    if min_p > 0.0:
        border = min(border, np.float32(-math.log(min_p)))
    return np.where(distance <= border, np.exp(-distance.astype(np.float64)), 0.0)


def drawn(
    logits: torch.Tensor,
    rows: list[int],
    cases: list[tuple[float, int, float, float]],
    uniforms: list[float],
    adjusted: torch.Tensor | None = None,
    sources: list[int] | None = None,
) -> list[int]:
    """The kernel's tokens."""
    table = np.zeros((len(draw_kernel.FIELDS), len(rows)))
    table[0], table[1] = rows, -1 if sources is None else sources
    for column, (temperature, top_k, top_p, min_p) in enumerate(cases):
        furthest = max(0.0, -math.log(min_p)) if min_p else math.inf
        table[2:6, column] = temperature, top_k, top_p, furthest
    table[6] = uniforms
    logits = logits.to(DEVICE)
    best = greedy(logits)
    changed = None if adjusted is None else adjusted.to(DEVICE)
    draws = torch.tensor(table, device=DEVICE)
    return draw_kernel.draw(logits, changed, draws, best, NOT_FINITE).tolist()


def check(logits: torch.Tensor, cases: list[tuple[float, int, float, float]]) -> None:
    """Tokens at both ends of [0, 1), in the middle of some kept tokens' shares, and anywhere."""
    generator = np.random.default_rng(5)
    columns, uniforms, shares = [], [], []
    for case in cases:
        weights = kept(logits.numpy(), case)
        share = weights / weights.sum()
        some = generator.choice(np.flatnonzero(weights), MORE)
        middles = (share.cumsum() - share / 2)[some]
        last = 1.0 - 2.0**-53
        own = [last, *middles.clip(0.0, last), *([0.0, *generator.random(9)] * (MORE > 1))]
        columns += [case] * len(own)
        uniforms += own
        shares += [share] * len(own)
    tokens = drawn(logits[None], [0] * len(columns), columns, uniforms)
    for case, u, share, token in zip(columns, uniforms, shares, tokens, strict=True):
        assert share[token] > 0.0, (case, u, token)
        end = share.cumsum()[token]
        assert end - share[token] - NEAR <= u <= end + NEAR, (case, u, token)


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """As a model in bfloat16 makes them: with many ties."""
    return logits.bfloat16().float()


ADVERSARIES = {
    "all equal": torch.full((700,), -3.25),
    "one hot": torch.zeros(600).index_fill_(0, torch.tensor(411), 40.0),
    "one finite": torch.full((300,), -math.inf).index_fill_(0, torch.tensor(7), -2.0),
    "three values": torch.tensor([2.0, 1.0, -1.0]).repeat(211),
    "halves": torch.cat([torch.zeros(350), torch.full((350,), -math.inf)]),
    "neighbours": 1.0 + torch.arange(900) * 2.0**-23,
    "octaves": -(2.0 ** torch.arange(-120.0, 30.0)),
    "huge": torch.tensor([3e38, 3e38, -3e38, 0.0]).repeat(40),
    "at the copy's end": torch.arange(512.0).flip(0) / 64,
    "one token": torch.tensor([0.5]),
    "two tokens": torch.tensor([0.5, -0.5]),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_hard_rows(name: str) -> None:
    check(ADVERSARIES[name], CASES if MORE > 1 else CASES[1::4])


@pytest.mark.parametrize("vocab", [5, 513, 9001])
def test_random_rows(vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    check(logits, CASES if MORE > 1 else CASES[::3])
    check(rounded(logits), CASES if MORE > 1 else CASES[1::3])


def test_every_kept_token_is_drawn_and_no_other() -> None:
    logits = rounded(torch.randn(64, generator=torch.Generator().manual_seed(9)) * 2)
    count = 20 * MORE
    for case in CASES[1:2] if MORE == 1 else CASES:
        weights = kept(logits.numpy(), case)
        uniforms = [(i + 0.5) / count for i in range(count)]
        tokens = drawn(logits[None], [0] * count, [case] * count, uniforms)
        wanted = {i for i, w in enumerate(weights / weights.sum()) if w > 1 / count}
        assert wanted <= set(tokens) <= set(np.flatnonzero(weights).tolist())


def test_a_token_does_not_depend_on_its_batch() -> None:
    cases = CASES[1::2]
    rows = list(range(len(cases)))
    logits = torch.randn(len(cases), 4100, generator=torch.Generator().manual_seed(4)) * 3
    uniforms = np.random.default_rng(6).random(len(cases)).tolist()
    together = drawn(logits, rows, cases, uniforms)
    alone = [drawn(logits[i][None], [0], [cases[i]], [uniforms[i]])[0] for i in rows]
    assert together == alone


def test_the_cpu_draws_the_same() -> None:
    logits = torch.randn(len(CASES), 3000, generator=torch.Generator().manual_seed(8)) * 3
    uniforms = np.random.default_rng(7).random(len(CASES)).tolist()
    params = [
        SamplingParams(seed=0, max_tokens=1, temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in CASES
    ]
    here = draw_on_cpu(logits, params, uniforms).tolist()
    assert drawn(logits, list(range(len(CASES))), CASES, uniforms) == here


def test_rows_that_lie_apart_and_adjusted_ones() -> None:
    wide = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    logits, adjusted = wide[:, :300], torch.randn(2, 300).contiguous()
    case, uniforms = CASES[0], [0.1, 0.9, 0.4, 0.6]
    rows, sources = [5, 0, 0, 3], [-1, 1, -1, 0]
    found = drawn(logits, rows, [case] * 4, uniforms, adjusted, sources)
    used = [logits[5], adjusted[1], logits[0], adjusted[0]]
    alone = [
        drawn(row.contiguous()[None], [0], [case], [u])[0]
        for row, u in zip(used, uniforms, strict=True)
    ]
    assert found == alone


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = torch.zeros(4, 40)
    logits[1, 3], logits[2, 3] = math.nan, math.inf
    tokens = drawn(logits, [0, 1, 2, 3], [CASES[1]] * 4, [0.5] * 4)
    assert [token == NOT_FINITE for token in tokens] == [False, True, True, False]


def test_a_mixed_batch_by_the_kernel_is_that_of_the_cpu() -> None:
    """Parameters reach the kernel as they are meant; of greedy ties the first is taken."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)) * 3
    logits[0, [7, 90]] = 50.0
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "logit_bias": {5: 60.0, 11: 60.0}},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 2.0},
        {"temperature": 1.2, "top_k": 9},
    ]
    requests = [
        Request(spec("r", [1, 2], seed=seed, max_tokens=9, **extra), 0, b"", 0.0)
        for seed, extra in enumerate(extras)
    ]
    draws = [Draw.next(request.sequences[0], 0) for request in requests]
    adjusted = Penalties(logits.device).adjust(logits, [1, 3], [draws[1], draws[3]], None)
    best = greedy(logits)
    prepared = sampler.Prepared(logits, range(5), draws, best, adjusted, [1, 3])
    here = sampler._on_cpu(prepared).tolist()
    sent = sampler.Prepared(
        logits.to(DEVICE), range(5), draws, best.to(DEVICE), adjusted.to(DEVICE), [1, 3]
    )
    sent.table = torch.from_numpy(sampler._table(sent)).to(DEVICE)
    there = sampler._on_gpu(sent).tolist()
    assert here == there
    assert here[0] == 7
