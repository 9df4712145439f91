"""Runs a plan: builds the batch, calls model and sampler. Charter: tensors, no decisions.

    launch    copies of blocks ▶ inputs ▶ other ranks ▶ executor ▶ sampling ▶ tokens home
    collect                                                            wait ──┘

`launch` only puts work into the device's stream, so that the next step can be
launched while this one runs; where the host is the device, it is done when
`launch` returns. A step's tokens stay on the device too: the next step takes
its inputs from there, if the host has not seen them yet.

What lies between a step's arrays and its logits is the executor's, which every
rank has (executor.py); a runner, which plans and samples, only the first one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.errors import DeviceMemoryError
from tasuki.engine.plan import StepOutcome, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.executor import Executor
from tasuki.execution.followers import Followers, following
from tasuki.execution.forward import ForwardModel
from tasuki.execution.grammar_masks import StepMasks, make_masks
from tasuki.execution.host_buffers import upload
from tasuki.execution.inputs import Wanted, wanted_logits
from tasuki.execution.logprobs import Scores, score, to_host
from tasuki.execution.mask_threads import MaskThreads
from tasuki.execution.recorder import Recorder
from tasuki.execution.sampler import NOT_FINITE, Sampler
from tasuki.execution.step_builder import build_step


@dataclass(slots=True)
class Launched:
    """A step on its way; tensors are in host memory once `event` has happened.

    Attributes:
        wanted: What was to be sampled and scored.
        tokens: One for each draw; None: there is none.
        scores: Of the draws.
        prompt_scores: One for each of `wanted.scored`.
        event: After the last kernel; None where to launch is to compute.
        masks: What grammars allow; None: no request has one.
        waited_s: How long its launch waited for tokens in flight, which grammars need.
    """

    wanted: Wanted
    tokens: torch.Tensor | None = None
    scores: Scores | None = None
    prompt_scores: list[_PromptScores] = field(default_factory=list)
    event: torch.cuda.Event | None = None
    masks: StepMasks | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _PromptScores:
    """Log-probabilities of a chunk's prompt tokens; `best` as `greedy` has it."""

    best: torch.Tensor
    scores: Scores


class ModelRunner:
    """One model on one device over one pool; of several ranks, the first.

    Args:
        model: Computes logits and writes KV.
        attention: Knows the pool.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        collective: Joins the ranks.
        followers: Tells the other ranks what to compute; None: there are none.
        groups: Cache groups.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        pool: torch.Tensor,
        collective: Collective = ALONE,
        followers: Followers | None = None,
        groups: int = 1,
    ) -> None:
        self._executor = Executor(model, attention, pool, collective, groups)
        self._followers = followers
        self._block_size = pool.shape[4]
        self._device = pool.device
        self._sampler = Sampler(pool.device)
        self._mask_threads = MaskThreads()
        self._last: Launched | None = None
        self._waited_s = 0.0  # in all launches
        # Each thread has a current device of its own: whoever calls, it is the pool's.
        self._here: AbstractContextManager[object] = nullcontext()
        if pool.is_cuda:
            self._here = torch.cuda.device(pool.device)

    @torch.inference_mode()
    def capture(
        self,
        max_rows: int,
        max_model_len: int,
        max_tokens: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """Record CUDA graphs; call once, before the first step, on all ranks.

        Args:
            max_rows: Sequences that may generate at once, own ones and pulled
                ones each (`EngineConfig.max_running_requests`); decode batches
                that are larger run without a graph.
            max_model_len: Tokens of the longest sequence.
            max_tokens: Of a step with prompts in it, up to which it runs in graphs
                (mixed_graphs.py); 0: none does.
            recorder: Another than CUDA's.
        """
        with self._here:
            self._executor.capture(max_rows, max_model_len, max_tokens, recorder)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Put a step into the stream: copy blocks, run the model, sample.

        Raises:
            DeviceMemoryError: It does not fit; a smaller one may.
        """
        with self._here:
            try:
                return self._launch(plan)
            except torch.OutOfMemoryError as error:
                short = DeviceMemoryError(f"a step of {len(plan.rows)} rows: {error}")
            # Outside of the handler: its traceback held the step's tensors.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise short

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
        if launched.masks is not None:
            outcome.raised |= launched.masks.refused(wanted.draws, tokens)
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
            with self._here, following(self._followers):
                if self._followers is not None:
                    self._followers.scrub(blocks)
                self._executor.scrub(blocks)

    def _launch(self, plan: StepPlan) -> Launched:
        if plan.copies:
            with following(self._followers):
                if self._followers is not None:
                    self._followers.copy(plan.copies)
                self._executor.copy(plan.copies)
        wanted = wanted_logits(plan)
        launched = Launched(wanted)
        logits, best = self._forward(plan, wanted)
        if wanted.constrained:  # while the device computes the logits
            began_s = self._waited_s
            launched.masks = make_masks(
                wanted.draws, wanted.constrained, self._upcoming, self._mask_threads
            )
            launched.waited_s = self._waited_s - began_s
        if wanted.draws:
            result = self._sampler.sample(
                logits,
                wanted.draw_rows,
                wanted.draws,
                best=best,
                sampled=self._executor.sampled,
                masks=launched.masks,
            )
            self._keep(result.tokens, wanted)
            launched.tokens, launched.scores = to_host(result.tokens), result.scores
        for sequence, first, tokens in wanted.scored:
            assert logits is not None and best is not None
            rows = slice(first, first + len(tokens))
            launched.prompt_scores.append(_score(logits[rows], best[rows], sequence, tokens))
        if self._device.type == "cuda":
            launched.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            launched.event.record()
        self._last = launched
        return launched

    def _upcoming(self, sequence: SequenceState) -> int:
        """The token of a sequence that the step in flight samples, once that step is over."""
        last = self._last
        assert last is not None and last.tokens is not None
        if last.event is not None:
            began_s = time.monotonic()
            last.event.synchronize()
            self._waited_s += time.monotonic() - began_s
        return int(last.tokens[last.wanted.kept[sequence.drawn]])

    def _forward(
        self, plan: StepPlan, wanted: Wanted
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Logits of `wanted.rows`, and what `greedy` says of them; see `Executor.run`."""
        executor = self._executor
        header = build_step(
            plan, wanted, executor.padded, executor.staging, self._block_size, executor.groups
        )
        with following(self._followers):
            if self._followers is not None:
                self._followers.run(header, executor.staging.filled())
            return executor.run(header)

    def _keep(self, tokens: torch.Tensor, wanted: Wanted) -> None:
        """Leave tokens where the next step finds them: in place, once graphs read that place."""
        count = len(wanted.kept)
        for index, draw in enumerate(wanted.kept):
            wanted.draws[draw].sequence.drawn = index
        if count < len(wanted.draws):
            tokens = tokens[upload(wanted.kept, torch.int64, self._device)]
        if self._executor.keeps_place:
            self._executor.sampled[:count].copy_(tokens)
        else:
            self._executor.sampled = tokens


def _score(
    logits: torch.Tensor, best: torch.Tensor, sequence: SequenceState, tokens: list[int]
) -> _PromptScores:
    """Log-probabilities of prompt tokens, from the logits [n, V] before each and their best."""
    count = sequence.request.spec.sampling.prompt_logprobs or 0
    device = logits.device
    given = upload(tokens, torch.int64, device)
    return _PromptScores(to_host(best), score(logits, given, [count] * len(tokens)))
