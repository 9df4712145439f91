"""Times steps of a real engine through its public interface, without a server.

KV that a step needs to find is not computed: a DECODE leg gets blocks for any
context and starts at once, as if a handoff had filled them. Attention takes as
long over whatever bytes are there. A context before a prefill is such a leg,
started and ended, which leaves its blocks in the prefix cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tasuki.bench.errors import RunFailedError
from tasuki.bench.steps import DecodePoint, PrefillPoint, StepPoint
from tasuki.engine.api import FirstToken, Leg, LegTimings, RequestSpec, SamplingParams
from tasuki.engine.engine import Engine

_DECODE_STEPS = 8
_DECODE_WARM_STEPS = 2
_MAX_STEPS = 10_000


class EngineTimer:
    """Measures prefill and decode points on one engine, which does nothing else.

    Args:
        engine: With prefix caching.
        seed: Of the prompts.
        clock: Seconds.
    """

    def __init__(
        self, engine: Engine, seed: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine = engine
        self._config = engine.config
        self._draw = random.Random(seed)
        self._clock = clock
        self._number = 0

    def fits(self, point: StepPoint) -> bool:
        """Whether limits and pool of the engine allow the point."""
        config = self._config
        match point:
            case PrefillPoint(tokens, context):
                whole = context % config.block_size == 0
                short = context + tokens + 1 <= config.max_model_len
                return whole and short and tokens <= config.max_batched_tokens
            case DecodePoint(batch, context):
                longest = context + self._decode_tokens()
                # Credits ask for room to grow, and for one request of any length beside.
                each = config.blocks_for(longest + config.growth_headroom_tokens)
                blocks = batch * each + config.max_request_blocks
                short = longest <= config.max_model_len and blocks <= config.num_blocks
                return short and batch <= config.max_running_requests
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
            case DecodePoint(batch, context):
                return self._decode_s(batch, context)
            case _:
                raise RunFailedError(f"{point} is no step of an engine")

    def _prefill_s(self, tokens: int, context: int) -> float:
        past = self._prompt(context)
        if past:
            self._engine.abort(self._start_decoding(past, max_tokens=2))
            self._run_dry()
        name = self._name()
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        prompt = past + self._prompt(tokens)
        begun_s = self._clock()
        self._engine.submit(RequestSpec(name, Leg.COLOCATED, prompt, sampling))
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

    def _decode_s(self, batch: int, context: int) -> float:
        count = self._decode_tokens()
        names = [self._start_decoding(self._prompt(context), count) for _ in range(batch)]
        try:
            for _ in range(_DECODE_WARM_STEPS):
                self._engine.step()
            begun_s = self._clock()
            drawn = 0
            for _ in range(_DECODE_STEPS):
                drawn += sum(len(output.tokens) for output in self._engine.step().outputs)
            seconds = self._clock() - begun_s
        finally:
            for name in names:
                self._engine.abort(name)
            self._run_dry()
        if drawn != batch * _DECODE_STEPS:
            raise RunFailedError(
                f"{_DECODE_STEPS} steps of {batch} sequences gave {drawn} tokens: "
                "they did not all run in every step"
            )
        return seconds / _DECODE_STEPS

    def _decode_tokens(self) -> int:
        """`max_tokens` of a decode leg: never reached within a measurement."""
        return _DECODE_STEPS + _DECODE_WARM_STEPS + 4

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
        return [self._draw.randrange(self._config.vocab_size) for _ in range(tokens)]

    def _name(self) -> str:
        self._number += 1
        return f"steps-{self._number}"
