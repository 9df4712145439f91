"""Runs a plan: builds the batch, calls model and sampler. Charter: tensors, no decisions.

    launch    copies of blocks ▶ inputs ▶ other ranks ▶ executor ▶ sampling prepared
    sample                                        masks ▶ sampling ▶ tokens home
    collect                                                    wait ──┘

`launch` and `sample` only put work into the device's stream, so that the next step can be
launched while this one runs; where the host is the device, it is done when they return.
States of layers that have any are written at the end of it: a step that raises before may be
computed again. A step without grammars is sampled by `launch`. Its tokens stay on the device
too: the next step takes its inputs from there, if the host has not seen them yet. The logits of
a step that waits for its masks stay where they are: nothing but the next step's launch,
which comes after `sample`, writes there.

What lies between a step's arrays and its logits is the executor's, which every
rank has (executor.py); a runner, which plans and samples, only the first one. It tells the other
ranks what to do before it begins itself (`Followers`). What fails between the telling and the end
of the own launch leaves the ranks in different places, each in a collective that the other never
joins: then there is no way on but a new start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.errors import DeviceMemoryError, OutOfStepError
from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import Draw, StepOutcome, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.executor import Executor
from tasuki.execution.forward import ForwardModel
from tasuki.execution.inputs import Wanted, build_step, wanted_logits
from tasuki.execution.logprobs import score
from tasuki.execution.recorder import Recorder
from tasuki.execution.sampler import NOT_FINITE, Prepared, Sampled, Sampler
from tasuki.execution.step_arrays import StepHeader, to_host, upload

_T = TypeVar("_T")


class Followers(Protocol):
    """The other ranks' executors; none of these waits for them."""

    def run(self, header: StepHeader, slab: memoryview) -> None:
        """Compute a step whose arrays are these bytes."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks."""

    def scrub(self, blocks: Sequence[int], first_slot: int) -> None:
        """Overwrite blocks' slots from `first_slot` on with zeros."""


@contextmanager
def following(followers: Followers | None) -> Iterator[None]:
    """What raises inside ends the worker, if others follow.

    Raises:
        OutOfStepError: Some ranks did what others did not.
    """
    try:
        yield
    except Exception as error:
        if followers is None:
            raise
        raise OutOfStepError(
            f"the ranks are out of step, this worker must be started anew: {error!r}"
        ) from error


@dataclass(slots=True)
class Launched:
    """A step on its way; tensors are in host memory once `event` has happened.

    Attributes:
        wanted: What was to be sampled and scored.
        prepared: The draws, until they are sampled; None: there are none any more.
        sampled: Of the draws; None: there are none.
        prompts: For each of `wanted.scored` the likeliest tokens, and the scores of the prompt's.
        event: After the last kernel; None where to launch is to compute.
    """

    wanted: Wanted
    prepared: Prepared | None = None
    sampled: Sampled | None = None
    prompts: list[Sampled] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    @property
    def draws(self) -> list[Draw]:
        """What it samples."""
        return self.wanted.draws

    @property
    def constrained(self) -> Sequence[int]:
        """Draws with a grammar, by index."""
        return self.wanted.constrained


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
            max_rows: `EngineConfig.max_running_requests`; decode batches that are larger run
                without a graph.
            max_model_len: Tokens of the longest sequence.
            max_tokens: Of a step with prompts in it, up to which it runs in graphs
                (mixed_graphs.py); 0: none does.
            recorder: Another than CUDA's.
        """
        with self._here:
            self._executor.capture(max_rows, max_model_len, max_tokens, recorder)

    @property
    def decode_rows(self) -> Sequence[int]:
        """See `Executor.decode_rows`."""
        return self._executor.decode_rows

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Put a step into the stream: copy blocks, run the model; sample, without grammars.

        Raises:
            DeviceMemoryError: It does not fit; a smaller one may.
        """
        with self._here:
            return self._within_memory(
                f"a step of {len(plan.rows)} rows", lambda: self._launch(plan)
            )

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: StepMasks) -> None:
        """Put the sampling of a launched step with grammars into the stream.

        Raises:
            DeviceMemoryError: It does not fit; a smaller step may.
        """
        with self._here:
            what = f"sampling {len(launched.draws)} tokens"
            self._within_memory(what, lambda: self._finish(launched, masks))

    def _within_memory(self, what: str, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            short = DeviceMemoryError(f"{what}: {error}")
        # Outside of the handler: its traceback held the step's tensors.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise short

    def landed(self, launched: Launched) -> bool:
        """Whether a launched step is over."""
        if launched.prepared is not None:
            return False
        return launched.event is None or bool(launched.event.query())  # type: ignore[no-untyped-call]

    def collect(self, launched: Launched) -> StepOutcome:
        """Wait for a sampled step, and read what it brought."""
        assert launched.prepared is None, "the step waits for its masks"
        if launched.event is not None:
            launched.event.synchronize()
        wanted = launched.wanted
        sampled = launched.sampled
        tokens: list[int] = [] if sampled is None else sampled.tokens.tolist()
        outcome = StepOutcome(wanted.draws, tokens)
        failed = dict.fromkeys(
            draw.sequence
            for draw, token in zip(wanted.draws, tokens, strict=True)
            if token == NOT_FINITE and not draw.drafted
        )
        if sampled is not None and sampled.scores is not None:
            outcome.logprobs = sampled.scores.entries(tokens)
        for (sequence, _, scored), given in zip(wanted.scored, launched.prompts, strict=True):
            if NOT_FINITE in given.tokens.tolist():
                failed[sequence] = None
            assert given.scores is not None
            entries = [entry for entry in given.scores.entries(scored) if entry is not None]
            outcome.prompt_logprobs.append((sequence, entries))
        outcome.failed = list(failed)
        return outcome

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        """Overwrite blocks' slots from `first_slot` on with zeros, behind what is in the stream.

        Waits for it. The blocks' next owner may be a transfer, which no stream orders.
        """
        if blocks:
            with self._here, following(self._followers):
                if self._followers is not None:
                    self._followers.scrub(blocks, first_slot)
                self._executor.scrub(blocks, first_slot)

    def _launch(self, plan: StepPlan) -> Launched:
        if plan.copies:
            with following(self._followers):
                if self._followers is not None:
                    self._followers.copy(plan.copies)
                self._executor.copy(plan.copies)
        wanted = wanted_logits(plan)
        launched = Launched(wanted)
        logits, best = self._forward(plan, wanted)
        for sequence, first, tokens in wanted.scored:
            assert logits is not None and best is not None
            rows = slice(first, first + len(tokens))
            launched.prompts.append(_score(logits[rows], best[rows], sequence, tokens))
        if wanted.draws:
            launched.prepared = self._sampler.prepare(
                logits,
                wanted.draw_rows,
                wanted.draws,
                best=best,
                sampled=self._executor.sampled,
                constrained=wanted.constrained,
            )
        if not wanted.constrained:
            self._finish(launched, None)
        return launched

    def _finish(self, launched: Launched, masks: StepMasks | None) -> None:
        """Sample, and mark the step's end."""
        prepared, launched.prepared = launched.prepared, None
        if prepared is not None:
            result = self._sampler.draw(prepared, masks)
            self._keep(result.tokens, launched.wanted)
            launched.sampled = Sampled(to_host(result.tokens), result.scores)
        self._executor.commit()
        if self._device.type == "cuda":
            launched.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            launched.event.record()

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
) -> Sampled:
    """Scores of prompt tokens, from the logits [n, V] before each, beside their likeliest."""
    count = sequence.request.spec.sampling.prompt_logprobs or 0
    device = logits.device
    given = upload(tokens, torch.int64, device)
    return Sampled(to_host(best), score(logits, given, [count] * len(tokens)))
