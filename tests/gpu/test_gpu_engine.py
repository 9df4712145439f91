"""The engine on CUDA: graphs and overlapping steps against plain steps in turn.

Kernels divide their work by the batch, so sums round differently and two likely
tokens may change places. Tokens must be the same but where the plain run's own
two best are within `NEAR` of each other; after such a place the sequences are
different ones and nothing more is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.engine.api import Leg, LegEndReason, Output, RequestSpec, SamplingParams
from tasuki.engine.cache_groups import layers_of_page
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import StepPlan
from tasuki.execution.inputs import build_step, wanted_logits
from tasuki.execution.runner import Launched, ModelRunner
from tasuki.execution.sampler import greedy
from tasuki.execution.step_arrays import StepHeader
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for, cache_groups
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model

NEAR = 0.1  # in logits; bfloat16 activations of this model are off by some hundredths
VOCAB = 512
MAX_LEN = 256
MAX_TOKENS = 96  # of a step
BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
WINDOW = 40
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def make_model(name: str, folder: Path) -> CausalModel:
    from transformers import (
        AutoModelForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        Olmo2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    torch.manual_seed(0)
    kinds = {
        "qwen3": Qwen3Config,
        "llama": LlamaConfig,
        "olmo2": Olmo2Config,
        "gemma3": Gemma3TextConfig,
        "qwen3-moe": Qwen3MoeConfig,
    }
    own: dict[str, Any] = {
        "gemma3": {"layer_types": LAYER_TYPES, "sliding_window": WINDOW},
        "qwen3-moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    }.get(name, {})
    config = kinds[name](**SHAPE, **own)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return load_model(folder, dtype=torch.bfloat16, device="cuda")


class StrictRunner(ModelRunner):
    """Raises when a decode step's launch or sampling waits for the device."""

    strict = False
    samplings = 0

    def launch(self, plan: StepPlan) -> Launched:
        with self._no_waiting():
            return super().launch(plan)

    def sample(self, launched: Launched, masks: StepMasks) -> None:
        self.samplings += 1
        with self._no_waiting():
            super().sample(launched, masks)

    @contextmanager
    def _no_waiting(self) -> Iterator[None]:
        if self.strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@dataclass
class Rig:
    """An engine on the GPU, and what it told."""

    engine: Engine
    runner: StrictRunner
    pool: torch.Tensor
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    ended: dict[str, LegEndReason] = field(default_factory=dict)

    def step(self) -> None:
        result = self.engine.step()
        self.engine.check()
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.ended |= {end.request_id: end.reason for end in result.ended}

    def drain(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("still busy")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.tokens]


def make_rig(
    model: CausalModel,
    *,
    graphs: bool,
    overlap: bool,
    mixed: bool = True,
    num_blocks: int = 512,
    rows: int = 24,
) -> Rig:
    spec = model.spec
    groups = cache_groups(spec)
    layers = layers_of_page(groups)
    shape = num_blocks, spec.num_kv_heads, layers, BLOCK_SIZE, spec.head_dim
    pool = CacheLayout(*shape, torch.bfloat16).allocate("cuda")
    attention, _ = attention_for(model, pool, torch.bfloat16)
    runner = StrictRunner(model, attention, pool, groups=len(groups))
    if graphs:
        runner.capture(rows, MAX_LEN, MAX_TOKENS if mixed else 0)
    config = EngineConfig(
        num_blocks=num_blocks,
        groups=groups,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        block_size=BLOCK_SIZE,
        max_batched_tokens=MAX_TOKENS,
        max_running_requests=rows,
        overlap=overlap,
    )
    return Rig(Engine(config, runner), runner, pool)


def spec(name: str, length: int, seed: int, max_tokens: int, **params: Any) -> RequestSpec:
    prompt = [(seed * 7919 + i * i * 31 + i) % VOCAB for i in range(length)]
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, **{"temperature": 0.0, **params})
    return RequestSpec(name, Leg.COLOCATED, prompt, sampling)


def crowd(count: int = 20, max_tokens: int = 60, **params: Any) -> list[RequestSpec]:
    return [spec(f"r{i}", 3 + 11 * i % 130, i, max_tokens - i % 7, **params) for i in range(count)]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of a run without graphs and overlap, and by how much each one won.

    With experts any token may differ, once rounding has sent one to another expert.
    """

    tokens: dict[str, list[int]]
    gaps: dict[str, list[float]]
    near: float

    def check(self, name: str, tokens: list[int], whole: bool = True) -> bool:
        """Assert that these are as good as the reference's; returns whether they are the same."""
        want = self.tokens[name]
        assert len(tokens) == len(want) or not whole
        for at, (mine, other) in enumerate(zip(tokens, want, strict=False)):
            if mine != other:
                gap = self.gaps[name][at]
                assert gap < self.near, (
                    f"{name}, token {at}: {mine}, not {other}, which won by {gap}"
                )
                return False
        return True


@pytest.fixture(scope="module")
def reference(model: CausalModel) -> Reference:
    return plain_reference(model)


def plain_reference(model: CausalModel) -> Reference:
    """Run everything step by step."""
    rig = make_rig(model, graphs=False, overlap=False)
    for request in crowd(logprobs=2):
        rig.engine.submit(request)
    rig.drain()
    gaps = {
        name: [
            entry.top[0][1] - entry.top[1][1]
            for output in outputs
            for entry in output.logprobs or []
        ]
        for name, outputs in rig.outputs.items()
    }
    assert sum(gap > NEAR for each in gaps.values() for gap in each) > 500, "too much is near"
    near = NEAR if model.spec.experts is None else math.inf
    return Reference({name: rig.tokens(name) for name in rig.outputs}, gaps, near)


@pytest.mark.parametrize(
    ("graphs", "mixed", "overlap"),
    [
        (False, False, True),
        (True, False, False),
        (True, False, True),
        (True, True, False),
        (True, True, True),
    ],
    ids=["overlap", "graphs", "graphs, overlap", "mixed", "mixed, overlap"],
)
def test_greedy_tokens_are_those_of_plain_steps(
    model: CausalModel, reference: Reference, graphs: bool, mixed: bool, overlap: bool
) -> None:
    rig = make_rig(model, graphs=graphs, mixed=mixed, overlap=overlap)
    for request in crowd():
        rig.engine.submit(request)
    rig.drain()
    same = [reference.check(name, rig.tokens(name)) for name in reference.tokens]
    assert sum(same) > len(same) / 2
    assert rig.engine.referenced_blocks == 0


def test_a_decode_step_is_launched_without_waiting(model: CausalModel) -> None:
    """Whatever the requests ask for: nothing is read from the device before the tokens."""
    rig = make_rig(model, graphs=True, overlap=True)
    extras: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.1},
        {"logit_bias": {5: 3.0}, "logprobs": 3},
        {"min_tokens": 30, "stop_token_ids": frozenset(range(100))},
    ]
    for i, extra in enumerate(extras):
        rig.engine.submit(spec(f"r{i}", 9 + i, i, 40, **extra))
    for _ in range(6):
        rig.step()
    rig.runner.strict = True
    for _ in range(12):
        rig.step()
    rig.runner.strict = False
    rig.drain()
    assert set(rig.ended.values()) == {LegEndReason.FINISHED}


def test_a_step_with_prompts_is_launched_without_waiting(model: CausalModel) -> None:
    rig = make_rig(model, graphs=True, overlap=True)
    if not rig.runner._executor._attention.captures_prompts:
        pytest.skip("steps with prompts run without graphs here")
    for i in range(4):
        rig.engine.submit(spec(f"r{i}", 9 + i, i, 40))
    for _ in range(4):
        rig.step()
    for i in range(4, 9):
        rig.engine.submit(spec(f"r{i}", 30 * i % 100, i, 40))
        if i == 4:
            rig.step()
        rig.runner.strict = True
        rig.step()
    rig.runner.strict = False
    rig.drain()
    assert set(rig.ended.values()) == {LegEndReason.FINISHED}


@pytest.mark.parametrize("prompts", [2, 0])
def test_a_mixed_step_in_a_graph_gives_the_logits_of_an_eager_one(
    model: CausalModel, prompts: int
) -> None:
    """The same decodes and chunks, on the same cache: but for rounding, the same logits.

    Without chunks too, as where a row gives several draws: nothing is left of the chunks before.
    """
    rig = make_rig(model, graphs=True, overlap=False)
    executor = rig.runner._executor
    graphs = executor._mixed
    if graphs is None:
        pytest.skip("steps with prompts run without graphs here")
    for i in range(5):
        rig.engine.submit(spec(f"r{i}", 10 + 4 * i, i, 40))
    for _ in range(4):
        rig.step()
    for i in range(5, 5 + prompts):
        rig.engine.submit(spec(f"r{i}", 30, i, 40))
    plan = rig.engine._scheduler.plan(0.0, rig.engine._rates)
    assert plan is not None and plan.num_decodes == 5
    assert (len(plan.rows) > 5) == (prompts > 0)
    wanted = wanted_logits(plan)

    def in_room(header: StepHeader, _: bool) -> StepHeader:
        return replace(header, room=graphs.room_for(header))

    with torch.inference_mode():
        found = []
        wanted.greedy = False  # all logits, not the winners alone
        for padded in (in_room, lambda header, _: header):
            header = build_step(plan, wanted, padded, executor.staging, BLOCK_SIZE, executor.groups)
            logits, best = executor.run(header)
            assert torch.equal(best, greedy(logits))
            found.append((header, logits.clone()))
    (in_graph, ours), (eager, theirs) = found
    assert in_graph.room is not None and in_graph.room > sum(in_graph.query_lens)
    assert eager.room is None
    assert ours.shape == theirs.shape == (len(wanted.rows), VOCAB)
    assert (ours - theirs).abs().max() < NEAR
    assert rig.pool.isfinite().all()


def test_abort_in_flight(model: CausalModel, reference: Reference) -> None:
    rig = make_rig(model, graphs=True, overlap=True)
    requests = crowd()
    for request in requests:
        rig.engine.submit(request)
    for turn in range(30):
        rig.step()
        if turn % 5 == 4:
            rig.engine.abort(f"r{turn // 2}")
    rig.drain()
    for request in requests:
        name = request.request_id
        finished = rig.ended[name] is LegEndReason.FINISHED
        reference.check(name, rig.tokens(name) if name in rig.outputs else [], whole=finished)
    assert LegEndReason.ABORTED in rig.ended.values()
    assert rig.engine.referenced_blocks == 0


def test_preemption(model: CausalModel, reference: Reference) -> None:
    rig = make_rig(model, graphs=True, overlap=True, num_blocks=2 * MAX_LEN // BLOCK_SIZE)
    for request in crowd():
        rig.engine.submit(request)
    rig.drain()
    assert rig.engine.counters().preemptions > 0
    for name in reference.tokens:
        reference.check(name, rig.tokens(name))
    assert rig.engine.referenced_blocks == 0


def test_a_request_that_is_not_finite_fails_alone(model: CausalModel, reference: Reference) -> None:
    """A key or value that is no number: its sequence fails, and leaves nothing behind."""
    rig = make_rig(model, graphs=True, overlap=True)
    for request in crowd(4):
        rig.engine.submit(request)
    victim = spec("victim", 40, 99, 60)
    rig.engine.submit(victim)
    while len(rig.outputs.get("victim", ())) < 5:
        rig.step()
    [sequence] = rig.engine._legs.requests["victim"].sequences
    rig.pool[sequence.pages[1]] = float("nan")
    rig.drain()
    assert rig.ended["victim"] is LegEndReason.FAILED
    for i in range(4):
        reference.check(f"r{i}", rig.tokens(f"r{i}"))
    assert rig.pool.isfinite().all()
