"""Changes to one row's logits before sampling: penalties, bias, min_tokens.

Dense memories of what a sequence contains live in its `scratch` on the device,
made when first needed (also after a fork) and brought up to date token by
token. A token that is still on its way to the host is counted where it is, on
the device: penalties do not keep steps from overlapping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.engine.api import SamplingParams
from tasuki.engine.host_buffers import upload
from tasuki.engine.plan import Draw

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

    def add(self, tokens: torch.Tensor) -> None:
        """Count further output tokens, [n] int64."""
        self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=self.counts.dtype))
        if self.present is not None:
            self.present.index_fill_(0, tokens, True)
        self.outputs += tokens.shape[0]


def _penalized(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def needs_adjusting(draw: Draw) -> bool:
    """Whether `adjust` would change this draw's logits."""
    params = draw.sequence.request.spec.sampling
    return _penalized(params) or bool(params.logit_bias) or draw.position < params.min_tokens


def adjust(logits: torch.Tensor, draw: Draw, sampled: torch.Tensor | None) -> None:
    """Apply penalties, then logit bias, then the ban on early stop tokens.

    Repetition divides positive and multiplies negative logits of tokens in
    prompt or output; frequency and presence subtract, over output tokens only.

    Args:
        logits: [V] float32, changed in place.
        draw: Whose they are.
        sampled: The tokens of the step in flight, on the device.
    """
    params = draw.sequence.request.spec.sampling
    device = logits.device
    if _penalized(params):
        seen = _seen(draw, logits, sampled)
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
        ids = upload(list(params.logit_bias.keys()), torch.int64, device)
        logits.index_add_(0, ids, upload(list(params.logit_bias.values()), logits.dtype, device))
    if draw.position < params.min_tokens:
        stops = [token for token in params.stop_token_ids if token < logits.shape[0]]
        if stops:
            logits.index_fill_(0, upload(stops, torch.int64, device), _LEAST)


def _seen(draw: Draw, logits: torch.Tensor, sampled: torch.Tensor | None) -> _Seen:
    """The sequence's memory, made or brought up to date with all before the draw."""
    sequence = draw.sequence
    request = sequence.request
    seen = sequence.scratch
    if not isinstance(seen, _Seen):
        present = None
        if request.spec.sampling.repetition_penalty != 1.0:
            present = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
            prompt = upload(list(request.spec.prompt_tokens), torch.int64, logits.device)
            present.index_fill_(0, prompt, True)
        seen = sequence.scratch = _Seen(torch.zeros_like(logits), present)
    known = sequence.tokens[request.num_prompt_tokens + seen.outputs :]
    if known:
        seen.add(upload(list(known), torch.int64, logits.device))
    if seen.outputs < draw.position:
        assert sampled is not None
        seen.add(sampled[sequence.drawn : sequence.drawn + 1].clamp(min=0))
    return seen
