"""Answers that rest on rounding: a number was drawn within float32's rounding of a border.

A sampled token is where the cumulative distribution passes a drawn number. Steps of another
shape round the distribution otherwise, by up to some 7e-7 in the tiny models. A number that is
as near to a border gives one token or its neighbour, and all that follow differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.chaos.asking import Document
from tasuki.execution.sampler import uniforms

NEAR = 2e-6  # of all probability
_CHANGED = ("top_k", "top_p", "min_p", "logit_bias", "presence_penalty", "repetition_penalty")


class Ties:
    """Looks for them by the model in float64.

    Args:
        folder: Of the model.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float64).eval()

    def rests_on_rounding(self, body: dict[str, Any], answer: Document) -> bool:
        """Whether a choice of an answer does, if it was sampled plainly from one list of tokens.

        Of other answers it is not known: False.
        """
        prompt = body.get("prompt")
        plain = body["temperature"] == 1.0 and not any(name in body for name in _CHANGED)
        if not plain or not prompt or not isinstance(prompt[0], int):
            return False
        return any(
            self._least_distance(prompt, choice.tokens, body["seed"], index) < NEAR
            for index, choice in answer.choices.items()
            if choice.tokens
        )

    @torch.inference_mode()
    def _least_distance(
        self, prompt: list[int], tokens: list[int], seed: int, choice: int
    ) -> float:
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        borders = logits.softmax(-1).cumsum(-1)
        drawn = torch.from_numpy(uniforms((seed, choice, i) for i in range(len(tokens))))
        return float((borders - drawn[:, None]).abs().min())
