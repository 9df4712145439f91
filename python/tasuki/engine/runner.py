"""Runs a plan: builds the batch, calls model and sampler. Charter: tensors, no decisions.

Owns the pool tensor's content and the host buffers that batches are built in.
The buffers are reused: a batch is dead when `execute` returns, which is after
the device has finished, since the sampled tokens are read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.api import TokenLogprob
from tasuki.engine.batch import Batch
from tasuki.engine.host_buffers import HostBuffers, write_tables
from tasuki.engine.logprobs import token_logprobs
from tasuki.engine.plan import Draw, StepOutcome, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.engine.sampler import finite_rows, sample


class ForwardModel(Protocol):
    """What the runner needs of a `CausalModel` (models/base.py)."""

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Logits [R, vocab] float32 of `batch.logits_rows`; `attention` is planned for it."""


@dataclass(slots=True)
class _Wanted:
    """Which logits a plan needs, and what for.

    Attributes:
        rows: Of the batch's tokens, in order.
        draws: Tokens to sample; `draw_rows` are theirs, as indices into `rows`.
        scored: Sequences that want log-probabilities of prompt tokens: first
            index into `rows`, and the prompt tokens predicted from there on.
    """

    rows: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    draw_rows: list[int] = field(default_factory=list)
    scored: list[tuple[SequenceState, int, list[int]]] = field(default_factory=list)


class ModelRunner:
    """One model on one device over one pool.

    Args:
        model: Computes logits and writes KV.
        attention: Knows the pool.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
    """

    def __init__(
        self, model: ForwardModel, attention: AttentionBackend, pool: torch.Tensor
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._block_size = pool.shape[4]
        self._device = pool.device
        self._buffers = HostBuffers(pinned=pool.is_cuda)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutcome:
        """Copy blocks, run the model, sample; returns when the device has finished."""
        for source, target in plan.copies:
            self._pool[target].copy_(self._pool[source])
        wanted = _wanted_logits(plan)
        batch = self._build(plan, wanted.rows)
        self._attention.plan(batch)
        logits = self._model.forward(batch, self._attention)
        if not wanted.rows:
            if self._pool.is_cuda:
                torch.cuda.synchronize(self._device)
            return StepOutcome([], [])
        finite = finite_rows(logits)
        failed: list[SequenceState] = []
        if not all(finite):
            failed = _owners(wanted, {row for row, fine in enumerate(finite) if not fine})
            keep = torch.tensor(finite, device=logits.device)[:, None]
            logits = torch.where(keep, logits, 0.0)
        outcome = StepOutcome(wanted.draws, [], failed=failed)
        if wanted.draws:
            outcome.tokens, outcome.logprobs = sample(logits, wanted.draw_rows, wanted.draws)
        for sequence, first, tokens in wanted.scored:
            rows = logits[first : first + len(tokens)]
            outcome.prompt_logprobs.append((sequence, _score(rows, sequence, tokens)))
        return outcome

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros."""
        if blocks:
            self._pool[torch.tensor(blocks, device=self._device)] = 0

    def _build(self, plan: StepPlan, logits_rows: list[int]) -> Batch:
        """The plan as tensors."""
        block_size, buffers, device = self._block_size, self._buffers, self._device
        singles = plan.num_decodes
        total = sum(count for _, count in plan.rows)
        tokens = buffers.tokens.reserve(total)
        positions = buffers.positions.reserve(total)
        slots = buffers.slots.reserve(total)
        if singles:
            last = [s.computed for s, _ in plan.rows[:singles]]
            positions[:singles] = last
            tokens[:singles] = [s.tokens[s.computed] for s, _ in plan.rows[:singles]]
            slots[:singles] = [
                s.blocks[at // block_size] * block_size + at % block_size
                for (s, _), at in zip(plan.rows[:singles], last, strict=True)
            ]
        begin = singles
        for sequence, count in plan.rows[singles:]:
            end, first = begin + count, sequence.computed
            tokens[begin:end] = np.frombuffer(sequence.tokens, dtype=np.uint32)[first:][:count]
            at = np.arange(first, first + count)
            positions[begin:end] = at
            table = np.frombuffer(sequence.blocks, dtype=np.int32).astype(np.int64)
            slots[begin:end] = table[at // block_size] * block_size + at % block_size
            begin = end
        contexts = [sequence.computed + count for sequence, count in plan.rows]
        width = -(-max(contexts) // block_size)
        write_tables(buffers.block_tables, [s.blocks for s, _ in plan.rows], width)
        buffers.logits_rows.reserve(len(logits_rows))[:] = logits_rows
        tables = buffers.block_tables.take(len(plan.rows) * width, device)
        return Batch(
            tokens=buffers.tokens.take(total, device),
            positions=buffers.positions.take(total, device),
            slots=buffers.slots.take(total, device),
            block_tables=tables.view(len(plan.rows), width),
            query_lens=[count for _, count in plan.rows],
            context_lens=contexts,
            logits_rows=buffers.logits_rows.take(len(logits_rows), device),
            num_decodes=singles,
        )


def _wanted_logits(plan: StepPlan) -> _Wanted:
    """The rows to compute logits for: ends of sequences, and scored prompt tokens."""
    wanted = _Wanted()
    begin = 0
    for sequence, count in plan.rows:
        first, end = sequence.computed, sequence.computed + count
        request = sequence.request
        if request.prompt_logprobs is not None:
            last = min(end, request.num_prompt_tokens - 1)
            if last > first:
                scored = list(sequence.tokens[first + 1 : last + 1])
                wanted.scored.append((sequence, len(wanted.rows), scored))
                wanted.rows.extend(range(begin, begin + last - first))
        if end == len(sequence.tokens):
            for choice in sequence.choices:
                wanted.draws.append(Draw(sequence, choice))
                wanted.draw_rows.append(len(wanted.rows))
            wanted.rows.append(begin + count - 1)
        begin += count
    return wanted


def _owners(wanted: _Wanted, rows: set[int]) -> list[SequenceState]:
    """The sequences that these indices into `wanted.rows` belong to."""
    owners = {
        id(draw.sequence): draw.sequence
        for draw, row in zip(wanted.draws, wanted.draw_rows, strict=True)
        if row in rows
    }
    for sequence, first, tokens in wanted.scored:
        if rows.intersection(range(first, first + len(tokens))):
            owners[id(sequence)] = sequence
    return list(owners.values())


def _score(logits: torch.Tensor, sequence: SequenceState, tokens: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of prompt tokens, from the logits [n, V] before each."""
    count = sequence.request.spec.sampling.prompt_logprobs or 0
    entries = token_logprobs(logits, tokens, [count] * len(tokens))
    return [entry for entry in entries if entry is not None]
