"""Prompt-lookup drafts in a deployment: split requests get the tokens that they get without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.deployment import Deployment, Options


def test_split_answers_are_those_without_drafts(
    tiny: Deployment, deploy: Callable[[Options], Deployment], tiny_model: Path
) -> None:
    worker = ("--kv-memory", "64000000", "--speculate", "prompt-lookup")
    drafting = deploy(Options(tiny_model, prefill=1, decode=1, worker=worker))
    bias = {str(token): 100 - token % 7 for token in (21, 22, 23)}  # answers repeat themselves
    for prompt, sampling in (
        ([21, 22, 23, 24] * 12, {"temperature": 0.0}),
        ([30, 21, 22] * 9, {"temperature": 0.0, "logit_bias": bias}),
        ([40, 41, 42] * 9, {"temperature": 1.0, "seed": 4, "logit_bias": bias}),
    ):
        answers = []
        for deployment in (tiny, drafting):
            answer = deployment.http.stream(prompt, max_tokens=64, **sampling)
            assert answer.timings is not None and answer.timings["transfer_bytes"] > 0
            answers.append((answer.tokens, answer.finish_reason))
        assert answers[1] == answers[0]
        assert len(answers[0][0]) == 64
    accepted = drafting.total("accepted_draft_tokens_total")
    assert 0 < accepted <= drafting.total("draft_tokens_total")
