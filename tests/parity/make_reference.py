"""Writes reference.json: what `transformers` answers to prompts.json.

Plain `transformers`, float32, greedy, 64 tokens each, EOS ignored. With each
token goes the gap between the two largest logits, so that a near-tie can be
told from a fault. Run from the repository's root, and only when the prompts
or the model change:

    python tests/parity/make_reference.py [MODEL_FOLDER]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from support import reference
from support.models import default_model_path


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = reference.load_float32(path)
    made = []
    for prompt in reference.load_prompts():
        tokens = reference.encode(tokenizer, prompt)
        answer = reference.greedy(model, prompt.name, tokens, reference.STEPS)
        made.append(dataclasses.asdict(answer))
        print(
            f"{prompt.name:20} {len(tokens):5} prompt tokens, least gap {min(answer.gaps):.6f}  "
            f"{tokenizer.decode(answer.tokens)!r}",
            flush=True,
        )
    document = {
        "comment": "made by make_reference.py; do not edit",
        "model": "SmolLM2-135M-Instruct",
        "weights_sha256": reference.weights_digest(path),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
        "steps": reference.STEPS,
        "references": made,
    }
    text = json.dumps(document, ensure_ascii=False)
    text = text.replace('{"name"', '\n{"name"').replace('"tokens":', '\n "tokens":')
    text = text.replace('"gaps":', '\n "gaps":')
    reference.REFERENCE_FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
