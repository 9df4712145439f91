"""A model whose next token is a hash of the sequence as it stands in the KV cache.

A wrong block table, a wrong copy, KV that was never written or was overwritten
gives other tokens than `expected` computes from the tokens alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from tasuki.attention.batch import Batch
from tasuki.attention.states import StatePart, StepStates, states_of
from tasuki.engine.api import (
    FinishReason,
    Leg,
    LegEnd,
    Output,
    RequestSpec,
    SamplingParams,
    StepResult,
)
from tasuki.engine.booking import finish_reason
from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.execution.runner import ModelRunner
from tasuki.execution.sampler import Sampler

VOCAB = 48
overlap = False  # of the engines that `make_rig` makes; see conftest.py


class Shape:
    """What the engine asks of a model's shape."""

    vocab_size = VOCAB


class NoAttention:
    """Attention of models that do not attend; groups may keep states all the same."""

    def __init__(
        self, pool: torch.Tensor | None = None, groups: Sequence[CacheGroup] = ONE_GROUP
    ) -> None:
        self.states: StepStates | None = None
        if pool is not None and any(group.has_state for group in groups):
            parts = {g.layers[0]: [StatePart((1,), torch.int64)] for g in groups if g.has_state}
            self.states = StepStates(pool, groups, parts, pool.shape[4])

    def plan(self, batch: Batch) -> None:
        """Find the pages of states."""
        if self.states is not None:
            self.states.plan(batch)


def logits_of(kv: np.ndarray, groups: Sequence[CacheGroup] = ONE_GROUP) -> torch.Tensor:
    """Logits [VOCAB] from what a query sees of a sequence: [tokens, 2 (K, V), 2].

    Of several groups each sees what its window shows, or the state after the tokens.
    """
    state = 0
    for token in kv[:, 0, 0]:
        state = next_state(state, int(token))
    parts = [
        state_rows(state) if group.has_state else kv[-(group.window or len(kv)) :]
        for group in groups
    ]
    return hashed(np.concatenate(parts))


def next_state(state: int, token: int) -> int:
    """A state of 64 bits that depends on every token so far, in order."""
    digest = blake2b(f"{state} {token}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def state_rows(state: int) -> np.ndarray:
    """A state as the query sees it: [1, 2, 2]."""
    words = np.frombuffer(state.to_bytes(8, "little", signed=True), dtype="<u2")
    return words.astype(np.float32).reshape(1, 2, 2)


def hashed(seen: np.ndarray) -> torch.Tensor:
    """Logits [VOCAB] from what the query sees in all groups, one after another."""
    digest = blake2b(seen.astype("<f4").tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return torch.from_numpy(generator.normal(size=VOCAB).astype(np.float32)) * 2


def ideal_kv(tokens: Sequence[int]) -> np.ndarray:
    """What the cache must hold of these tokens."""
    positions = np.arange(len(tokens))
    values = np.asarray(tokens)
    return np.stack(
        [np.stack([values, positions], -1), np.stack([values * 3 + 1, -positions], -1)], axis=1
    ).astype(np.float32)


class HashModel:
    """Writes tokens and positions as K and V, reads them back through the block tables."""

    spec = Shape()

    def __init__(
        self,
        pool: torch.Tensor,
        poison: int | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.cursed: set[int] = set()  # tokens that make a step raise
        self.poison = poison  # a token whose KV is not a number
        self.block_size = pool.shape[4]
        self.largest_batch = 0

    def forward(self, batch: Batch, attention: object) -> torch.Tensor:
        planes = self.pool[:, 0, 0]  # [blocks, 2, block_size, 2]
        for index, group in enumerate(self.groups):
            if not group.has_state:
                self._write(batch.of_group(index), planes)
        states = self._advance(batch, attention)
        if cursed := self.cursed.intersection(batch.tokens.tolist()):
            raise RuntimeError(f"tokens {cursed} are cursed")  # its KV and states are made
        wanted = set(batch.logits_rows.tolist())
        found = {}
        begin = 0
        singles = [length == 1 for length in batch.query_lens[: batch.num_decodes]]
        assert all(singles)
        for index, (length, context) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            tables = [batch.of_group(g).block_tables[index] for g in range(len(self.groups))]
            kept = [planes[table.to(torch.int64)].permute(0, 2, 1, 3) for table in tables]
            for row in range(begin, begin + length):
                if row in wanted:
                    end = context - length + row - begin + 1
                    parts = [
                        state_rows(states[group.layers[0]][row])
                        if group.has_state
                        else kv.reshape(-1, 2, 2).numpy()[max(0, end - (group.window or end)) : end]
                        for kv, group in zip(kept, self.groups, strict=True)
                    ]
                    seen = np.concatenate(parts)
                    bad = not np.isfinite(seen).all()
                    found[row] = torch.full((VOCAB,), float("nan")) if bad else hashed(seen)
            begin += length
        padding = torch.zeros(VOCAB)
        rows = [found.get(row, padding) for row in batch.logits_rows.tolist()]
        return torch.stack(rows or [torch.zeros(0)])

    def _advance(self, batch: Batch, attention: object) -> dict[int, list[int]]:
        """The states after each token, by layer."""
        after: dict[int, list[int]] = {}
        states = states_of(attention)
        for layer in [group.layers[0] for group in self.groups if group.has_state]:
            assert states is not None
            after[layer] = []
            for run in states.runs:
                [begun] = states.begin(layer, run)
                ends = begun.clone()
                tokens = batch.tokens[run.tokens].view(run.rows, -1)
                for row, (state,) in enumerate(begun.tolist()):
                    for token in tokens[row].tolist():
                        state = next_state(state, token)
                        after[layer].append(state)
                    ends[row] = state
                states.keep(layer, run, [ends])
        return after

    def _write(self, batch: Batch, planes: torch.Tensor) -> None:
        """Write one group's KV."""
        slots = [slot for slot in batch.slots.tolist() if slot >= 0]  # the rest is padding
        assert len(set(slots)) == len(slots), "two tokens of one step share a slot"
        self.largest_batch = max(self.largest_batch, len(slots))
        for token, position, slot in zip(
            batch.tokens.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True
        ):
            if slot < 0:
                continue
            block, offset = divmod(slot, self.block_size)
            planes[block, :, offset] = torch.from_numpy(ideal_kv([token])[0])
            planes[block, 0, offset, 1], planes[block, 1, offset, 1] = position, -position
            if token == self.poison:
                planes[block, :, offset] = float("nan")


@dataclass
class Rig:
    """An engine over a HashModel."""

    engine: Engine
    pool: torch.Tensor
    model: HashModel
    outputs: dict[tuple[str, int], list[Output]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, LegEnd] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.check()
        self.results.append(result)
        for output in result.outputs:
            self.outputs[output.request_id, output.choice].append(output)
        for end in result.ended:
            assert end.request_id not in self.ended, "a leg ended twice"
            self.ended[end.request_id] = end
        return result

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        """Output tokens of a choice; asserts that positions follow one another."""
        tokens: list[int] = []
        outputs = self.outputs[request_id, choice]
        for output in outputs:
            assert output.position == outputs[0].position + len(tokens)
            tokens += output.tokens
        return tokens

    def finish(self, request_id: str, choice: int = 0) -> FinishReason | None:
        outputs = self.outputs[request_id, choice]
        assert all(output.finish is None for output in outputs[:-1])
        return outputs[-1].finish if outputs else None


def make_rig(
    poison: int | None = None, groups: Sequence[CacheGroup] = ONE_GROUP, **settings: int | bool
) -> Rig:
    values: dict[str, int | bool] = {
        "num_blocks": 64,
        "max_model_len": 64,
        "block_size": 4,
        "max_batched_tokens": 16,
        "vocab_size": VOCAB,
        "overlap": overlap,
    }
    config = EngineConfig(groups=tuple(groups), **(values | settings))  # type: ignore[arg-type]
    pool = torch.zeros(config.num_blocks, 1, 1, 2, config.block_size, 2)
    model = HashModel(pool, poison, groups)
    attention: Any = NoAttention(pool, groups)
    runner = ModelRunner(model, attention, pool, groups=len(groups))
    return Rig(Engine(config, runner), pool, model)


def spec(
    request_id: str,
    prompt: Iterable[int],
    *,
    leg: Leg = Leg.COLOCATED,
    choices: Sequence[int] = (0,),
    resumed: Sequence[int] = (),
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 7,
    tenant: str = "",
    **sampling: object,
) -> RequestSpec:
    params = SamplingParams(seed=seed, max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
    return RequestSpec(request_id, leg, list(prompt), params, resumed, choices, tenant)


def expected(
    request: RequestSpec,
    choice: int,
    max_model_len: int,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> tuple[list[int], FinishReason]:
    """New tokens of a choice, generated alone and without a cache."""
    state = Request(request, 0, b"", 0.0)
    sequence = state.sequences[0]
    tokens: list[int] = []
    while True:
        logits = logits_of(ideal_kv(sequence.tokens), groups)[None]
        sampler = Sampler(logits.device)
        [token] = sampler.sample(logits, [0], [Draw.next(sequence, choice)]).tokens.tolist()
        tokens.append(token)
        sequence.tokens.append(token)
        finish = finish_reason(
            request.sampling,
            token,
            outputs=sequence.num_outputs,
            length=len(sequence.tokens),
            max_model_len=max_model_len,
        )
        if finish is not None:
            return tokens, finish
