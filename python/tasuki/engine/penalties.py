"""Changes to one row's logits before sampling: penalties, bias, min_tokens.

Dense memories of what a sequence contains live in its `scratch`, made when
first needed (also after a fork) and brought up to date token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.engine.api import SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import SequenceState

# Finite bounds, so that no difference of two logits is NaN.
_LEAST, _MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


@dataclass(slots=True)
class _Seen:
    """What a sequence contains, on the logits' device.

    Attributes:
        counts: [V] float32, occurrences among output tokens.
        present: [V] bool, in prompt or output; None without repetition penalty.
        outputs: How many output tokens are in both.
    """

    counts: torch.Tensor
    present: torch.Tensor | None
    outputs: int = 0


def _penalized(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def needs_adjusting(draw: Draw) -> bool:
    """Whether `adjust` would change this draw's logits."""
    params = draw.sequence.request.spec.sampling
    return (
        _penalized(params)
        or bool(params.logit_bias)
        or draw.sequence.num_outputs < params.min_tokens
    )


def adjust(logits: torch.Tensor, draw: Draw) -> None:
    """Apply penalties, then logit bias, then the ban on early stop tokens.

    Repetition divides positive and multiplies negative logits of tokens in
    prompt or output; frequency and presence subtract, over output tokens only.

    Args:
        logits: [V] float32, changed in place.
        draw: Whose they are.
    """
    sequence = draw.sequence
    params = sequence.request.spec.sampling
    if _penalized(params):
        seen = _seen(sequence, logits)
        if seen.present is not None:
            scaled = torch.where(
                logits > 0,
                logits / params.repetition_penalty,
                logits * params.repetition_penalty,
            )
            torch.where(seen.present, scaled.clamp_(_LEAST, _MOST), logits, out=logits)
        if params.frequency_penalty != 0.0:
            logits.sub_(seen.counts, alpha=params.frequency_penalty)
        if params.presence_penalty != 0.0:
            logits.sub_((seen.counts > 0).to(logits.dtype), alpha=params.presence_penalty)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias.keys()), device=logits.device)
        logits[ids] += torch.tensor(
            list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device
        )
    if sequence.num_outputs < params.min_tokens:
        stops = [token for token in params.stop_token_ids if token < logits.shape[0]]
        if stops:
            logits[torch.tensor(stops, device=logits.device)] = _LEAST


def _seen(sequence: SequenceState, logits: torch.Tensor) -> _Seen:
    """The sequence's memory, made or brought up to date."""
    request = sequence.request
    seen = sequence.scratch
    if not isinstance(seen, _Seen):
        present = None
        if request.spec.sampling.repetition_penalty != 1.0:
            present = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
            present[torch.tensor(list(request.spec.prompt_tokens), device=logits.device)] = True
        seen = sequence.scratch = _Seen(torch.zeros_like(logits), present)
    outputs = sequence.tokens[request.num_prompt_tokens + seen.outputs :]
    if outputs:
        ids = torch.tensor(list(outputs), device=logits.device)
        seen.counts.index_add_(0, ids, torch.ones(len(outputs), device=logits.device))
        if seen.present is not None:
            seen.present[ids] = True
        seen.outputs += len(outputs)
    return seen
