"""The stored reference is what `transformers` says, and covers what it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import reference

RECOMPUTED = ("german", "chat-sky")


def test_reference_covers_every_prompt() -> None:
    prompts = reference.load_prompts()
    references = reference.load_references()
    assert [p.name for p in prompts] == list(references)
    assert len(prompts) >= 20
    assert {p.kind for p in prompts} == {"short", "long", "chat", "non-english", "code"}
    assert max(len(r.prompt_tokens) for r in references.values()) > 1000
    for stored in references.values():
        assert len(stored.tokens) == len(stored.gaps) == reference.STEPS


@pytest.mark.parametrize("name", RECOMPUTED)
def test_transformers_still_says_the_same(name: str, default_model: Path) -> None:
    from transformers import AutoTokenizer

    prompt = next(p for p in reference.load_prompts() if p.name == name)
    stored = reference.load_references()[name]
    tokens = reference.encode(AutoTokenizer.from_pretrained(default_model), prompt)
    assert tokens == stored.prompt_tokens
    model = reference.load_float32(default_model)
    live = reference.greedy(model, name, tokens, reference.STEPS)
    assert live.tokens == stored.tokens
    assert live.gaps == pytest.approx(stored.gaps, abs=1e-3)
