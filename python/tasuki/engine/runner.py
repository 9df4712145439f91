"""Runs a plan: builds the batch, calls model and sampler. Charter: tensors, no decisions.

    launch    inputs ▶ copies of blocks ▶ attention plan ▶ forward ▶ sampling ▶ tokens home
    collect                                                              wait ──┘

`launch` only puts work into the device's stream, so that the next step can be
launched while this one runs; where the host is the device, it is done when
`launch` returns. A step's tokens stay on the device too: the next step takes
its inputs from there, if the host has not seen them yet.

Owns the pool tensor's content and the host buffers that batches are built in.
Decode batches run in CUDA graphs once `capture` was called (cuda_graphs.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.engine.cuda_graphs import CudaRecorder, DecodeGraphs, Recorder
from tasuki.engine.forward import ForwardModel, input_tokens
from tasuki.engine.host_buffers import Staging, upload, write_tables
from tasuki.engine.inputs import Places, Wanted, fill, wanted_logits
from tasuki.engine.logprobs import Scores, score, to_host
from tasuki.engine.plan import StepOutcome, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.engine.sampler import NOT_FINITE, greedy, sample


@dataclass(slots=True)
class Launched:
    """A step on its way; tensors are in host memory once `event` has happened.

    Attributes:
        wanted: What was to be sampled and scored.
        tokens: One for each draw; None: there is none.
        scores: Of the draws.
        prompt_scores: One for each of `wanted.scored`.
        event: After the last kernel; None where to launch is to compute.
    """

    wanted: Wanted
    tokens: torch.Tensor | None = None
    scores: Scores | None = None
    prompt_scores: list[_PromptScores] = field(default_factory=list)
    event: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _PromptScores:
    """Log-probabilities of a chunk's prompt tokens; `best` as `greedy` has it."""

    best: torch.Tensor
    scores: Scores


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
        # Each thread has a current device of its own: whoever calls, it is the pool's.
        self._here: AbstractContextManager[object] = nullcontext()
        if pool.is_cuda:
            self._here = torch.cuda.device(pool.device)
        self._staging = Staging(pool.device)
        self._graphs: DecodeGraphs | None = None
        self._sampled = torch.zeros(0, dtype=torch.int64, device=pool.device)

    @torch.inference_mode()
    def capture(self, max_rows: int, max_model_len: int, recorder: Recorder | None = None) -> None:
        """Record CUDA graphs of decode steps; call once, before the first step.

        Args:
            max_rows: Sequences that may generate at once, own ones and pulled
                ones each (`EngineConfig.max_running_requests`); decode batches
                that are larger run without a graph.
            max_model_len: Tokens of the longest sequence.
            recorder: Another than CUDA's.
        """
        self._sampled = torch.zeros(2 * max_rows, dtype=torch.int64, device=self._device)
        graphs = DecodeGraphs(
            self._model,
            self._attention,
            self._sampled,
            max_rows=max_rows,
            max_width=-(-max_model_len // self._block_size),
            block_size=self._block_size,
        )
        with self._here:
            graphs.capture(self._staging, recorder or CudaRecorder())
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Put a step into the stream: copy blocks, run the model, sample."""
        with self._here:
            return self._launch(plan)

    def landed(self, launched: Launched) -> bool:
        """Whether a launched step is over."""
        return launched.event is None or bool(launched.event.query())  # type: ignore[no-untyped-call]

    def collect(self, launched: Launched) -> StepOutcome:
        """Wait for a launched step, and read what it brought."""
        if launched.event is not None:
            launched.event.synchronize()
        wanted = launched.wanted
        tokens: list[int] = [] if launched.tokens is None else launched.tokens.tolist()
        outcome = StepOutcome(wanted.draws, tokens)
        failed = dict.fromkeys(
            draw.sequence
            for draw, token in zip(wanted.draws, tokens, strict=True)
            if token == NOT_FINITE
        )
        if launched.scores is not None:
            outcome.logprobs = launched.scores.entries(tokens)
        for (sequence, _, scored), given in zip(wanted.scored, launched.prompt_scores, strict=True):
            if NOT_FINITE in given.best.tolist():
                failed[sequence] = None
            entries = [entry for entry in given.scores.entries(scored) if entry is not None]
            outcome.prompt_logprobs.append((sequence, entries))
        outcome.failed = list(failed)
        return outcome

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Overwrite the blocks with zeros, behind what is in the stream; waits for it.

        The blocks' next owner may be a transfer, which no stream orders.
        """
        if blocks:
            bits = self._pool.view(torch.uint8)  # not every dtype can be filled: fp8 cannot
            bits.index_fill_(0, upload(blocks, torch.int64, self._device), 0)
            if self._pool.is_cuda:
                torch.cuda.synchronize(self._device)

    def _launch(self, plan: StepPlan) -> Launched:
        for source, target in plan.copies:
            self._pool[target].copy_(self._pool[source])
        wanted = wanted_logits(plan)
        launched = Launched(wanted)
        logits, best = self._forward(plan, wanted)
        if wanted.draws:
            result = sample(
                logits, wanted.draw_rows, wanted.draws, best=best, sampled=self._sampled
            )
            self._keep(result.tokens, wanted)
            launched.tokens, launched.scores = to_host(result.tokens), result.scores
        for sequence, first, tokens in wanted.scored:
            rows = logits[first : first + len(tokens)]
            launched.prompt_scores.append(_score(rows, sequence, tokens))
        if self._pool.is_cuda:
            launched.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            launched.event.record()
        return launched

    def _forward(self, plan: StepPlan, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of `wanted.rows`; and what `greedy` says of them, if a graph did."""
        if self._graphs is not None:
            bucket = self._graphs.bucket_for(wanted)
            if bucket is not None:
                return self._graphs.run(bucket, plan.rows, self._staging)
        batch = self._build(plan, wanted)
        self._attention.plan(batch)
        return self._model.forward(batch, self._attention), None

    def _keep(self, tokens: torch.Tensor, wanted: Wanted) -> None:
        """Leave tokens where the next step finds them: in place, once graphs read that place."""
        count = len(wanted.kept)
        for index, draw in enumerate(wanted.kept):
            wanted.draws[draw].sequence.drawn = index
        if count < len(wanted.draws):
            tokens = tokens[upload(wanted.kept, torch.int64, self._device)]
        if self._graphs is None:
            self._sampled = tokens
        else:
            self._sampled[:count].copy_(tokens)

    def _build(self, plan: StepPlan, wanted: Wanted) -> Batch:
        """The plan as tensors."""
        count = len(plan.rows)
        total = sum(row.tokens for row in plan.rows)
        contexts = [row.end for row in plan.rows]
        width = -(-max(contexts) // self._block_size)
        per_token = (total, torch.int64)
        *arrays, logits_rows = self._staging.take(
            *[per_token] * 4, (count * width, torch.int32), (len(wanted.rows), torch.int64)
        )
        places = Places.over(arrays, count)
        write_tables(places.tables, [row.sequence.blocks for row in plan.rows])
        ahead = fill(places, plan, self._block_size)
        logits_rows[:] = wanted.rows
        parts = self._staging.send()
        return Batch(
            tokens=input_tokens(parts[0], parts[1], self._sampled) if ahead else parts[0],
            positions=parts[2],
            slots=parts[3],
            block_tables=parts[4].view(count, width),
            query_lens=[row.tokens for row in plan.rows],
            context_lens=contexts,
            logits_rows=parts[5],
            num_decodes=plan.num_decodes,
        )


def _score(logits: torch.Tensor, sequence: SequenceState, tokens: list[int]) -> _PromptScores:
    """Log-probabilities of prompt tokens, from the logits [n, V] before each."""
    count = sequence.request.spec.sampling.prompt_logprobs or 0
    device = logits.device
    given = upload(tokens, torch.int64, device)
    return _PromptScores(to_host(greedy(logits)), score(logits, given, [count] * len(tokens)))
