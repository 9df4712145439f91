"""What the engine counts and measures about itself.

The simulator has a copy of how `StepRates` learns the speed of prompts,
`crates/sim/src/worker/chunks.rs`. Both are tested with `tests/golden/prompt_rates.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki._native import ChunkFit, StepFit

_WEIGHT = 0.2  # of the newest step in the moving averages
_FORGET = 0.95  # of the longest launch, a step
_LEAD_S = (0.3e-3, 3e-3)  # the least and the most
_LATE_S = 0.25e-3  # added to the lead after a launch that came too late
_IN_TIME = 0.995  # factor of the lead after a launch in time: one in a hundred is late
_SIZE_TOKENS = 128
_EARLY = 0.85  # of the expected time of a step with prompts, whose times vary at one size
_LEAST_BESIDE = 0.25  # of what a prompt token takes without decodes: it is never free beside them
_MIN_CHUNK_TOKENS = 16  # smaller chunks say little about the prefill rate
_HUNG = 50.0  # times what was expected: no step takes that long
_FIRST = 10.0  # times the timeout: for the first step of a kind, which may compile kernels


@dataclass(slots=True)
class EngineCounters:
    """Since the engine's start. Prompt tokens include resumed and recomputed ones.

    Of `draft_tokens`, `accepted_draft_tokens` were right. An answer may end before them.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step that was measured; fields as in worker.proto's StepSample."""

    number: int
    duration_s: float
    sequences: int
    kv_tokens: int
    prefill_tokens: int
    prefill_squares: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is now; fields as in worker.proto's Load, but that blocks are pages.

    `pages_per_block` of these make a block of a request.
    """

    waiting_requests: int
    running_requests: int
    waiting_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    running_sequences: int
    running_kv_tokens: int
    waiting_sequences: int
    waiting_kv_tokens: int
    awaited_sequences: int
    planned_ahead_s: float
    last_decode: StepSample | None
    last_prefill: StepSample | None
    pages_per_block: float = 1


@dataclass(slots=True)
class StepRates:
    """Moving averages over steps; 0 until measured.

    Attributes:
        prefill_tokens_per_s: Of prefill chunks, a mixed step's decodes deducted.
        decode_step_s: Duration of a step that only decodes, as the last ones did.
        lead_s: Between the expected end of a launch and that of the step before
            it; as long as it takes for nearly all launches to be in time.
        planned_ahead_s: Before a step that only decoded ended, the next one was
            planned; a prompt that came later was not part of it.
        last_decode: The last step that only decoded.
        last_prefill: The last step with prompt tokens.
    """

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    lead_s: float = 0.5e-3
    planned_ahead_s: float = 0.0
    last_decode: StepSample | None = None
    last_prefill: StepSample | None = None
    _launch_s: dict[bool, float] = field(default_factory=dict)
    _mixed_s: dict[tuple[int, bool], float] = field(default_factory=dict)
    _fit: StepFit = field(default_factory=StepFit)
    _chunks: ChunkFit = field(default_factory=ChunkFit)
    _seen_mixed: bool = False

    def decode_s(self, decodes: int, kv_tokens: int) -> float:
        """Of a step that only decodes so many, which attend to `kv_tokens`; 0 until measured."""
        return self._fit.decode_s(decodes, kv_tokens)

    @property
    def mixed_tokens_per_s(self) -> float:
        """Prompt tokens that a second more in a step with decodes computes; 0 until measured."""
        alone = self.prefill_tokens_per_s
        if not self._seen_mixed or not alone:
            return alone
        return 1.0 / max(self._fit.prompt_token_s(), _LEAST_BESIDE / alone)

    @property
    def overhead_tokens(self) -> float:
        """Prompt tokens that take as long as what a chunk of any size adds to a step with decodes.

        0 until measured.
        """
        return self._chunks.overhead_tokens()

    def expected_s(self, prefill_tokens: int, num_decodes: int) -> float:
        """How long such a step will take; 0 where nothing like it was measured."""
        if prefill_tokens == 0:
            return self.decode_step_s if num_decodes else 0.0
        return _EARLY * self._mixed_s.get(_size(prefill_tokens, num_decodes), 0.0)

    def limit_s(
        self, prefill_tokens: int, num_decodes: int, timeout_s: float, compiled: bool
    ) -> float:
        """After how long such a step counts as hung.

        Args:
            prefill_tokens: Of the step.
            num_decodes: Of the step.
            timeout_s: The least.
            compiled: Whether its kernels are compiled for sure, and only the device
                works on it; else a step like which none was measured gets more time.
        """
        expected_s = self.expected_s(prefill_tokens, num_decodes)
        if not expected_s and prefill_tokens and self.prefill_tokens_per_s:
            expected_s = prefill_tokens / self.prefill_tokens_per_s + self.decode_step_s
        if not expected_s and not compiled:
            return _FIRST * timeout_s
        return max(timeout_s, _HUNG * expected_s)

    def launch_s(self, prompts: bool) -> float:
        """What the host takes to plan and launch a step, with prompts in it or without.

        The longest of late: a device that waits costs more than a request that
        comes too late for a step.
        """
        return self._launch_s.get(prompts, 0.0)

    def record_launch(self, duration_s: float, prompts: bool) -> None:
        """Take the launch of one step into account."""
        self._launch_s[prompts] = max(duration_s, self.launch_s(prompts) * _FORGET)

    def record_lead(self, late: bool) -> None:
        """Take into account whether the device had nothing left to do at a launch's end."""
        lead_s = self.lead_s + _LATE_S if late else self.lead_s * _IN_TIME
        self.lead_s = min(max(lead_s, _LEAD_S[0]), _LEAD_S[1])

    def record_plan(self, ahead_s: float) -> None:
        """Take into account how long before a decode step's end the next one was planned."""
        self.planned_ahead_s = _blend(self.planned_ahead_s, ahead_s)

    def record(self, sample: StepSample) -> None:
        """Take one step into account, and remember it as the last of its kind."""
        prompt_tokens, decodes = sample.prefill_tokens, sample.sequences
        duration_s = sample.duration_s
        if decodes:
            self._fit.learn(decodes, sample.kv_tokens, prompt_tokens, duration_s)
        if prompt_tokens == 0:
            if decodes:
                self.last_decode = sample
                self.decode_step_s = _blend(self.decode_step_s, duration_s)
            return
        self.last_prefill = sample
        self._seen_mixed |= decodes > 0
        size = _size(prompt_tokens, decodes)
        self._mixed_s[size] = _blend(self._mixed_s.get(size, 0.0), duration_s)
        decode_s = self.decode_s(decodes, sample.kv_tokens) if decodes else 0.0
        if decodes:
            self._chunks.learn(prompt_tokens, sample.prefill_squares, duration_s, decode_s)
        if prompt_tokens < _MIN_CHUNK_TOKENS:
            return
        # Decodes that ride along cost less than a step of their own.
        own_s = max(duration_s - decode_s, duration_s / 2, 1e-9)
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, prompt_tokens / own_s)


def _size(prefill_tokens: int, num_decodes: int) -> tuple[int, bool]:
    """Steps of one size take about as long."""
    return -(-prefill_tokens // _SIZE_TOKENS), num_decodes > 0


def _blend(average: float, sample: float) -> float:
    return sample if average == 0.0 else average + _WEIGHT * (sample - average)
