"""Times steps of a real engine through its public interface, without a server.

KV that a step needs to find is not computed: a DECODE leg gets blocks for any
context and starts at once, as if a handoff had filled them. Attention takes as
long over whatever bytes are there. A context before a prefill is such a leg,
started and ended, which leaves its blocks in the prefix cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from tasuki.bench.errors import RunFailedError
from tasuki.bench.steps import (
    BackToBackPoint,
    BesidePoint,
    DecodePoint,
    PrefillPoint,
    StepPoint,
)
from tasuki.engine.api import FirstToken, Leg, LegTimings, RequestSpec, SamplingParams
from tasuki.engine.engine import Engine

_DECODE_STEPS = 8
_DECODE_WARM_STEPS = 2
_BACK_TO_BACK = 5  # prompts, at least
_LASTING_S = 1.0  # of prompts back to back, at least
_BESIDE_PROMPTS = 3
_BESIDE_REST = 2  # steps after a prompt, which its launch may have delayed
_BESIDE_STEPS = 4  # of one prompt, at most
_DECODE_TOKENS = _DECODE_STEPS + _DECODE_WARM_STEPS + 4
"""`max_tokens` of a decode leg: never reached within a measurement."""
_WARM_PROMPTS = 40  # beside decodes, at most
_BESIDE_TOKENS = (
    _DECODE_TOKENS
    + _BESIDE_PROMPTS * (_BESIDE_STEPS + _BESIDE_REST)
    + _WARM_PROMPTS * _BESIDE_STEPS
)
_MAX_STEPS = 10_000


class EngineTimer:
    """Measures steps of one engine, which does nothing else.

    Args:
        engine: With prefix caching.
        seed: Of the prompts.
        clock: Seconds.
        lasting_s: How long prompts follow each other, at least.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        lasting_s: float = _LASTING_S,
    ) -> None:
        self._engine = engine
        self._config = engine.config
        self._draw = random.Random(seed)
        self._clock = clock
        self._lasting_s = lasting_s
        self._number = 0

    def fits(self, point: StepPoint) -> bool:
        """Whether limits and pool of the engine allow the point."""
        config = self._config
        match point:
            case PrefillPoint(tokens, context):
                return self._prompts_fit(1, tokens, context)
            case BackToBackPoint(tokens, context):
                return config.overlap and self._prompts_fit(_BACK_TO_BACK, tokens, context)
            case DecodePoint(batch, context):
                return self._decodes_fit(batch, context, _DECODE_TOKENS)
            case BesidePoint(tokens, batch, context):
                short = tokens < config.max_model_len
                within = tokens + batch <= config.max_batched_tokens
                return short and within and self._decodes_fit(batch + 1, context, _BESIDE_TOKENS)
            case _:
                return False

    def measure(self, point: StepPoint) -> float:
        """Seconds of one step.

        Raises:
            RunFailedError: The engine did not run the step that was meant.
        """
        match point:
            case PrefillPoint(tokens, context):
                return self._prefill_s(tokens, context)
            case BackToBackPoint(tokens, context):
                return self._back_to_back_s(tokens, context)
            case DecodePoint(batch, context):
                return self._decode_s(batch, context)
            case BesidePoint(tokens, batch, context):
                return self._beside_s(tokens, batch, context)
            case _:
                raise RunFailedError(f"{point} is no step of an engine")

    def _prefill_s(self, tokens: int, context: int) -> float:
        prompt = self._cached(context) + self._prompt(tokens)
        begun_s = self._clock()
        self._submit(prompt)
        for _ in range(_MAX_STEPS):
            outputs = self._engine.step().outputs
            if outputs:
                break
        seconds = self._clock() - begun_s
        if not outputs or outputs[0].cached_prompt_tokens != context:
            found = outputs[0].cached_prompt_tokens if outputs else None
            raise RunFailedError(
                f"a prefill of {tokens} tokens found {found} of {context} tokens of context cached"
            )
        self._run_dry()
        return seconds

    def _back_to_back_s(self, tokens: int, context: int) -> float:
        """Prompts come while the step of the one before runs, so the device never waits.

        The later half of them counts: a GPU that computes without a pause may lower its clock.
        """
        past, ends_s = self._cached(context), []
        begun_s = self._clock()
        for _ in range(_MAX_STEPS):
            self._submit(past + self._prompt(tokens))
            outputs = self._engine.step().outputs
            if any(output.cached_prompt_tokens != context for output in outputs):
                raise RunFailedError(f"a prompt did not find {context} tokens of context cached")
            ends_s += [self._clock()] * len(outputs)
            if len(ends_s) >= _BACK_TO_BACK and ends_s[-1] - begun_s >= self._lasting_s:
                break
        else:
            raise RunFailedError(
                f"{_MAX_STEPS} steps gave {len(ends_s)} prompts of {tokens} tokens their tokens"
            )
        self._run_dry()
        settled_s = ends_s[len(ends_s) // 2 :]
        return (settled_s[-1] - settled_s[0]) / (len(settled_s) - 1)

    def launch_s(self, batch: int, context: int) -> float:
        """Seconds in which the host launches a step of decodes while the device computes another.

        Raises:
            RunFailedError: As `measure`.
        """
        with self._decoding(batch, context, _DECODE_TOKENS):
            found = []
            for _ in range(_DECODE_STEPS):
                begun_s = self._clock()
                result = self._engine.step(wait=False)
                found.append(self._clock() - begun_s)
                while not result.outputs:
                    result = self._engine.step(wait=False)
        return median(found)

    def _decode_s(self, batch: int, context: int) -> float:
        with self._decoding(batch, context, _DECODE_TOKENS) as names:
            return self._steps_s(names)

    def _beside_s(self, tokens: int, batch: int, context: int) -> float:
        found = []
        with self._decoding(batch, context, _BESIDE_TOKENS) as names:
            if self._config.overlap:
                self._warm(tokens)
            step_s = self._steps_s(names)
            for _ in range(_BESIDE_PROMPTS):
                begun_s = self._clock()
                steps = self._prompt_steps(tokens)
                self._rest()
                found.append(self._clock() - begun_s - (steps + _BESIDE_REST) * step_s)
        return max(median(found), 0.0)

    def _warm(self, tokens: int) -> None:
        """Compute prompts beside decodes, for as long as the first half of prompts back to back."""
        until_s = self._clock() + self._lasting_s / 2
        for _ in range(_WARM_PROMPTS):
            if self._clock() >= until_s:
                break
            self._prompt_steps(tokens)
        self._rest()

    def _rest(self) -> None:
        for _ in range(_BESIDE_REST):
            self._engine.step()

    def _prompt_steps(self, tokens: int) -> int:
        """Steps from a prompt's coming to its first token, decodes beside it."""
        name = self._submit(self._prompt(tokens))
        for steps in range(1, _BESIDE_STEPS + 1):
            if any(output.request_id == name for output in self._engine.step().outputs):
                return steps
        raise RunFailedError(
            f"a prompt of {tokens} tokens beside decodes has no token after {_BESIDE_STEPS} steps"
        )

    def _steps_s(self, names: Sequence[str]) -> float:
        """Of one step that decodes these, in the mean over some."""
        begun_s = self._clock()
        drawn = 0
        for _ in range(_DECODE_STEPS):
            drawn += sum(len(output.tokens) for output in self._engine.step().outputs)
        seconds = self._clock() - begun_s
        if drawn != len(names) * _DECODE_STEPS:
            raise RunFailedError(
                f"{_DECODE_STEPS} steps of {len(names)} sequences gave {drawn} tokens: "
                "they did not all run in every step"
            )
        return seconds / _DECODE_STEPS

    @contextmanager
    def _decoding(self, batch: int, context: int, most: int) -> Iterator[list[str]]:
        """Sequences that decode `most` tokens each; the first few steps are over."""
        names = [self._start_decoding(self._prompt(context), most) for _ in range(batch)]
        try:
            for _ in range(_DECODE_WARM_STEPS):
                self._engine.step()
            yield names
        finally:
            for name in names:
                self._engine.abort(name)
            self._run_dry()

    def _decodes_fit(self, batch: int, context: int, most: int) -> bool:
        config = self._config
        longest = context + most
        # Credits ask for room to grow, and for one request of any length beside.
        each = config.blocks_for(longest + config.growth_headroom_tokens)
        blocks = batch * each + config.max_request_blocks
        short = longest <= config.max_model_len and blocks <= config.num_blocks
        return short and batch <= config.max_running_requests

    def _prompts_fit(self, prompts: int, tokens: int, context: int) -> bool:
        config = self._config
        whole = context % config.block_size == 0
        short = context + tokens + 1 <= config.max_model_len and tokens <= config.max_batched_tokens
        blocks = prompts * config.blocks_for(context + tokens + 1)
        return whole and short and blocks + config.max_request_blocks <= config.num_blocks

    def _cached(self, context: int) -> list[int]:
        """A prompt whose KV is in the prefix cache."""
        past = self._prompt(context)
        if past:
            self._engine.abort(self._start_decoding(past, max_tokens=2))
            self._run_dry()
        return past

    def _submit(self, prompt: list[int]) -> str:
        """A request for one token."""
        name = self._name()
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        self._engine.submit(RequestSpec(name, Leg.COLOCATED, prompt, sampling))
        return name

    def _start_decoding(self, prompt: list[int], max_tokens: int) -> str:
        """A DECODE leg whose KV is there."""
        name = self._name()
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        self._engine.submit(RequestSpec(name, Leg.DECODE, prompt, sampling))
        if not self._engine.may_credit(name) or self._engine.assign(name) is None:
            self._engine.abort(name)
            raise RunFailedError(f"no room for another sequence of {len(prompt)} tokens")
        self._engine.start_decode(name, [FirstToken(0, prompt[0], False)], LegTimings())
        return name

    def _run_dry(self) -> None:
        for _ in range(_MAX_STEPS):
            if not self._engine.has_work():
                return
            self._engine.step()
        raise RunFailedError(f"the engine still has work after {_MAX_STEPS} steps")

    def _prompt(self, tokens: int) -> list[int]:
        return self._draw.choices(range(self._config.vocab_size), k=tokens)

    def _name(self) -> str:
        self._number += 1
        return f"steps-{self._number}"
