"""What can run here, and when a choice is done: pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tasuki.engine.api import FinishReason, FirstToken, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.errors import GrammarError

_MOST_LOGPROBS = 20  # alternatives of a token; as the router's limit
_RANGES = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("repetition_penalty", 0.01, math.inf),
)


def rejection(spec: RequestSpec, config: EngineConfig) -> str | None:
    """Why a leg can never run on this engine, with value and limit; None if it can."""
    if isinstance(spec.grammar, GrammarError):
        return str(spec.grammar)
    prompt, resumed, params = spec.prompt_tokens, spec.resumed_tokens, spec.sampling
    length = len(prompt) + len(resumed)
    if not prompt:
        return "the prompt has 0 tokens: at least 1 is needed"
    if length >= config.max_model_len:
        return (
            f"prompt and resumed output have {length} tokens: with max_model_len "
            f"{config.max_model_len} at most {config.max_model_len - 1} leave room for output"
        )
    largest = max(max(prompt), max(resumed, default=0))
    if largest >= config.vocab_size or min(min(prompt), min(resumed, default=0)) < 0:
        return f"token id {largest} is out of range: the vocabulary has {config.vocab_size} tokens"
    if params.max_tokens <= len(resumed):
        return (
            f"max_tokens is {params.max_tokens}, and {len(resumed)} tokens are there already: "
            "it must be greater"
        )
    if not spec.choices or len(set(spec.choices)) != len(spec.choices):
        return f"choices are {list(spec.choices)}: at least one is needed, and none twice"
    if len(spec.choices) > config.max_running_requests:
        return (
            f"{len(spec.choices)} choices are asked for: this worker generates at most "
            f"{config.max_running_requests} sequences at once"
        )
    if resumed and len(spec.choices) > 1:
        return f"{len(spec.choices)} choices resume one output: submit each by itself"
    for token in params.logit_bias:
        if not 0 <= token < config.vocab_size:
            return (
                f"logit_bias names token id {token}: the vocabulary has {config.vocab_size} tokens"
            )
    return _sampling_flaw(params)


def _sampling_flaw(params: SamplingParams) -> str | None:
    """Which parameter is outside of its range; NaN is outside of all."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            return f"{name} is {value}: it must be a number from {low} to {high}"
    for token, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}: it must be finite"
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > _MOST_LOGPROBS:
            return f"{name} is {getattr(params, name)}: it must be at most {_MOST_LOGPROBS}"
    return None


def first_tokens_flaw(first_tokens: Sequence[FirstToken], vocab_size: int) -> str:
    """Why first tokens cannot be a model's; empty: they can."""
    choices = [first.choice for first in first_tokens]
    if len(set(choices)) != len(choices):
        return f"the prefill worker sent first tokens of choices {choices}: none may come twice"
    for first in first_tokens:
        if first.token >= vocab_size:
            return (
                f"the prefill worker sent token id {first.token}: the vocabulary has"
                f" {vocab_size} tokens"
            )
    return ""


def finish_reason(
    params: SamplingParams, token: int, *, outputs: int, length: int, max_model_len: int
) -> FinishReason | None:
    """Whether a choice ends with this token.

    Args:
        params: Of the request.
        token: Its newest one.
        outputs: Output tokens including it, and resumed ones.
        length: Tokens of the sequence including it.
        max_model_len: Tokens that a sequence may have.
    """
    if token in params.stop_token_ids and outputs > params.min_tokens:
        return FinishReason.STOP
    if outputs >= params.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None
