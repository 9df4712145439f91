"""What plain `transformers` says: greedy tokens and how sure it was of each.

The reference of the parity tests. `tests/parity/reference.json` was written by
`tests/parity/make_reference.py` with `greedy` before the engine existed; for
tiny random-weight models tests call `greedy` live.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARITY_DIR = Path(__file__).resolve().parents[1] / "parity"
PROMPTS_FILE = PARITY_DIR / "prompts.json"
REFERENCE_FILE = PARITY_DIR / "reference.json"
STEPS = 64


@dataclass(frozen=True)
class Prompt:
    """One fixed prompt: plain text, or chat messages that go through the template."""

    name: str
    kind: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None


@dataclass(frozen=True)
class Reference:
    """Greedy float32 continuation of one prompt.

    Attributes:
        name: of the prompt.
        prompt_tokens: the prompt as token ids.
        tokens: the continuation, EOS ignored.
        gaps: at each step, the largest logit minus the second largest.
    """

    name: str
    prompt_tokens: list[int]
    tokens: list[int]
    gaps: list[float]


def load_prompts() -> list[Prompt]:
    """The fixed prompts, in file order."""
    entries = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))["prompts"]
    return [
        Prompt(
            name=entry["name"],
            kind=entry["kind"],
            text=entry.get("text"),
            messages=tuple(entry["messages"]) if "messages" in entry else None,
        )
        for entry in entries
    ]


@functools.cache
def load_references() -> dict[str, Reference]:
    """The stored references by prompt name."""
    entries = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))["references"]
    return {entry["name"]: Reference(**entry) for entry in entries}


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt as `transformers` makes them."""
    if prompt.messages is not None:
        encoded = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])
    return list(tokenizer(prompt.text)["input_ids"])


def greedy(model: Any, name: str, prompt_tokens: list[int], steps: int) -> Reference:
    """Runs a `transformers` causal model greedily for exactly `steps` tokens."""
    return greedy_batch(model, [name], [prompt_tokens], steps)[0]


def greedy_batch(
    model: Any, names: list[str], prompts: list[list[int]], steps: int
) -> list[Reference]:
    """`greedy` for several prompts of one length at once."""
    import torch

    tokens: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    with torch.inference_mode():
        output = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        while True:
            logits = output.logits[:, -1].float()
            chosen = torch.argmax(logits, dim=-1)
            for row, (largest, second) in enumerate(torch.topk(logits, 2).values.tolist()):
                gaps[row].append(round(largest - second, 6))
                tokens[row].append(int(chosen[row]))
            if len(tokens[0]) == steps:
                rows = zip(names, prompts, tokens, gaps, strict=True)
                return [Reference(name, list(prompt), *row) for name, prompt, *row in rows]
            output = model(chosen[:, None], past_key_values=output.past_key_values, use_cache=True)


def load_float32(path: Path) -> Any:
    """A model folder in `transformers`, float32, for reference runs."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def weights_digest(path: Path) -> str:
    """SHA-256 over the safetensors files of a model folder, in name order."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
