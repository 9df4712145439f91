"""Perplexity of int8 weights beside bfloat16 and float32, on the CPU.

    python benchmarks/cpu_perplexity.py [--model smollm2-135m] [--windows 40]

The text is the description (README) of every installed Python distribution, in the order of
names: technical prose, which the result names by its digest. It is cut into windows of WINDOW
tokens; some of them, evenly spaced, are read by the same model with bfloat16 weights, with
int8 weights (both by the native kernels, or those that TASUKI_CPU_KERNELS names) and in
float32 by PyTorch's operators. Every token of a window but its first counts. Writes
benchmarks/results/cpu_perplexity.json, and fails if int8's perplexity exceeds bfloat16's by
more than LIMIT.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import math
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tasuki.attention.batch import Batch
from tasuki.bench.header import header, write_result
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for
from tasuki.models.base import CausalModel
from tasuki.models.fetch import resolve_model
from tasuki.models.llama_cpu import CpuLlamaModel
from tasuki.models.loader import load_model

RESULT = Path(__file__).resolve().parent / "results" / "cpu_perplexity.json"
WINDOW = 512
BLOCK_SIZE = 16
LIMIT = 1.01
MODELS = {
    "bfloat16": (torch.bfloat16, False),
    "int8": (torch.bfloat16, True),
    "float32": (torch.float32, False),
}


def text() -> str:
    """Descriptions of all installed distributions."""
    found = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        found[metadata["Name"].lower()] = str(metadata.json.get("description", ""))
    return "\n\n".join(found[name].strip() for name in sorted(found))


def windows(tokens: list[int], count: int) -> list[list[int]]:
    """At most `count` windows, evenly spaced."""
    whole = len(tokens) // WINDOW
    chosen = sorted({index * whole // count for index in range(count)})
    return [tokens[index * WINDOW : (index + 1) * WINDOW] for index in chosen]


def loss(model: CausalModel, dtype: torch.dtype, window: list[int]) -> float:
    """Mean negative log-likelihood of the window's tokens but the first, in nats."""
    spec, blocks = model.spec, WINDOW // BLOCK_SIZE
    layout = CacheLayout(
        blocks, spec.num_kv_heads, spec.num_layers, BLOCK_SIZE, spec.head_dim, dtype
    )
    pool = layout.allocate("cpu")
    attention, _ = attention_for(model, pool, dtype)
    batch = Batch(
        tokens=torch.tensor(window),
        positions=torch.arange(WINDOW),
        slots=torch.arange(WINDOW),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        query_lens=[WINDOW],
        context_lens=[WINDOW],
        logits_rows=torch.arange(WINDOW),
        num_decodes=0,
    )
    attention.plan(batch)
    with torch.inference_mode():
        logits = model.forward(batch, attention)[:-1].float()
        return float(torch.nn.functional.cross_entropy(logits, batch.tokens[1:]))


def main() -> int:
    """Read the windows by each model, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    folder = Path(resolve_model(arguments.model))
    prose = text()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chosen = windows(tokenizer.encode(prose).ids, arguments.windows)
    found, kernels = {}, {}
    for name, (dtype, int8) in MODELS.items():
        model = load_model(folder, dtype=dtype, int8=int8)
        losses = [loss(model, dtype, window) for window in chosen]
        found[name] = math.exp(sum(losses) / len(losses))
        kernels[name] = model.kernels if isinstance(model, CpuLlamaModel) else "PyTorch's"
        print(f"{name:9} perplexity {found[name]:.4f}  ({kernels[name]})", flush=True)
    ratio = found["int8"] / found["bfloat16"]
    print(f"int8 / bfloat16: {ratio:.5f}, must be at most {LIMIT}")
    result = header(
        "cpu_perplexity", label=arguments.model, topology=None, model=arguments.model
    ) | {
        "text": {
            "what": "descriptions of the installed Python distributions",
            "sha256": hashlib.sha256(prose.encode()).hexdigest(),
            "windows": len(chosen),
            "window_tokens": WINDOW,
        },
        "kernels": kernels,
        "perplexity": found,
        "int8_to_bfloat16": ratio,
        "limit": LIMIT,
    }
    write_result(arguments.output, result)
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
