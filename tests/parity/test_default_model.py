"""Greedy float32 output of the whole system equals `transformers`, token for token.

Every fixed prompt goes through the HTTP API in every way the system can serve
it; here all of them through the split and some through the other ways, and all through
each in `make test-long`. 64 tokens each; what a near-tie is and how it is treated:
compare.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compare import NearTie, ask_and_compare, by_prompt_length, check_mode
from support.deployment import Deployment, Options
from support.reference import STEPS, Prompt, load_prompts, load_references

pytestmark = pytest.mark.timeout(600)

BLOCK = 16
# Bytes of one block of the default model in float32: layers, K and V, KV heads, head size.
BLOCK_BYTES = 30 * 2 * 3 * 64 * BLOCK * 4
# Room for requests of 2048 tokens, without filling the machine: workers zero their pools.
WORKER = ("--max-model-len", "2048", "--kv-memory", "400000000")

Deploy = Callable[[Options], Deployment]

some_and_all = pytest.mark.parametrize(
    "prompts",
    [by_prompt_length()[::3], pytest.param(load_prompts(), marks=pytest.mark.long)],
    ids=["some", "all"],
)


def run_mode(
    deployment: Deployment, mode: str, prompts: Sequence[Prompt], *, concurrency: int
) -> None:
    """All prompts, `concurrency` at a time, each against its reference."""
    with ThreadPoolExecutor(concurrency) as pool:
        asked = [pool.submit(ask_and_compare, deployment.http, prompt) for prompt in prompts]
        ties: list[NearTie] = [tie for future in asked for tie in future.result()]
    check_mode(mode, ties)


def blocks_of(prompts: Sequence[Prompt]) -> int:
    """Blocks that the prompts' KV fills, each prompt for itself."""
    references = load_references()
    return sum(-(-len(references[p.name].prompt_tokens) // BLOCK) for p in prompts)


def test_split(deployment: Deployment) -> None:
    """1 prefill + 1 decode; and the KV really moves."""
    before = deployment.metrics()
    run_mode(deployment, "split 1:1", load_prompts(), concurrency=8)
    after = deployment.metrics()

    def grown(name: str, role: str) -> float:
        name = f"tasuki_worker_{name}_total"
        return after.sum(name, role=role) - before.sum(name, role=role)

    assert grown("prompt_tokens_computed", "decode") == 0
    assert grown("prompt_tokens_computed", "prefill") > 0
    moved = grown("kv_pulled_blocks", "decode")
    # Prompts that share a beginning may find it on the decode worker already.
    assert 0.5 * blocks_of(load_prompts()) < moved <= blocks_of(load_prompts())
    assert grown("kv_pulled_bytes", "decode") == moved * BLOCK_BYTES


@some_and_all
def test_split_with_decode_side_prefix_hit(
    deployment: Deployment, prompts: Sequence[Prompt]
) -> None:
    """The same again: decode holds the prompts' full blocks and pulls only the rest."""
    rest = [p for p in prompts if blocks_of([p]) == 1]
    prompts = [p for p in prompts if p not in rest]
    assert len(prompts) >= 5 and rest
    for prompt in prompts:  # there already if test_split ran, else made now
        answer = deployment.http.complete(
            load_references()[prompt.name].prompt_tokens, max_tokens=2
        )
        assert answer.tokens == load_references()[prompt.name].tokens[:2]
    before = deployment.total("kv_pulled_blocks_total", "decode")
    run_mode(deployment, "split with prefix hit", prompts, concurrency=8)
    moved = deployment.total("kv_pulled_blocks_total", "decode") - before
    # Of each prompt at most the last, partly filled block.
    assert moved <= len(prompts) < blocks_of(prompts)
    run_mode(deployment, "split with prefix hit, one-block prompts", rest, concurrency=8)


@some_and_all
def test_colocated(default_model: Path, deploy: Deploy, prompts: Sequence[Prompt]) -> None:
    """One mixed worker does everything; no KV moves."""
    deployment = deploy(Options(default_model, mixed=1, worker=WORKER))
    run_mode(deployment, "colocated", prompts, concurrency=8)
    assert deployment.total("kv_pulled_blocks_total") == 0


@some_and_all
def test_chunked_prefill(default_model: Path, deploy: Deploy, prompts: Sequence[Prompt]) -> None:
    """Steps of at most 48 tokens: long prompts take many, decodes run in between."""
    options = (*WORKER, "--max-batched-tokens", "48")
    deployment = deploy(Options(default_model, prefill=1, decode=1, worker=options))
    run_mode(deployment, "chunked prefill", prompts, concurrency=8)


@pytest.mark.parametrize("count", [12, pytest.param(20, marks=pytest.mark.long)])
def test_batch_of_eight_with_preemption(default_model: Path, deploy: Deploy, count: int) -> None:
    """A pool too small for eight at a time: some are preempted and computed again."""
    references = load_references()
    prompts = by_prompt_length()[:count]
    longest = max(len(references[p.name].prompt_tokens) for p in prompts) + STEPS
    blocks = 2 * -(-longest // BLOCK)
    options = ("--max-model-len", str(longest), "--kv-memory", str(blocks * BLOCK_BYTES))
    deployment = deploy(Options(default_model, mixed=1, worker=options))
    run_mode(deployment, "batch of 8 with preemption", prompts, concurrency=8)
    assert deployment.total("preemptions_total") > 0, "the pool was large enough for everybody"


@some_and_all
def test_two_prefill_two_decode(
    default_model: Path, deploy: Deploy, prompts: Sequence[Prompt]
) -> None:
    """2 + 2; every worker has its share of the work."""
    options = Options(default_model, prefill=2, decode=2, worker=WORKER)
    deployment = deploy(options)
    run_mode(deployment, "2 prefill + 2 decode", prompts, concurrency=8)
    metrics = deployment.metrics()
    for role, counter in (("prefill", "prompt_tokens_computed"), ("decode", "output_tokens")):
        shares = metrics.find(f"tasuki_worker_{counter}_total", role=role)
        assert len(shares) == 2
        assert all(share.value > 0 for share in shares), shares
    assert metrics.sum("tasuki_worker_prompt_tokens_computed_total", role="decode") == 0
    pulled = metrics.sum("tasuki_worker_kv_pulled_blocks_total", role="decode")
    assert metrics.sum("tasuki_worker_kv_pulled_bytes_total", role="decode") == pulled * BLOCK_BYTES
