"""Perplexity of quantized weights and caches beside bfloat16, on the CPU.

    python benchmarks/cpu_perplexity.py [--model smollm2-135m] [--windows 40]
    python benchmarks/cpu_perplexity.py --scheme fp8 --windows 200

The text is the description (README) of every installed Python distribution, in the order of
names, or with `--scheme fp8` Debian's documentation on this machine (README, NEWS and *.txt in
/usr/share/doc), in the order of paths: the result names it by its digest. It is cut into windows
of WINDOW tokens; some of them, evenly spaced, are read by the same model in each variant. Those
with a cache in the model's dtype run by the native kernels, or those that TASUKI_CPU_KERNELS
names, float32 and those with an fp8 cache by PyTorch's operators. fp8 is computed as a device
reads it: weights are rounded to fp8 and back, keys and values too, with measured scales. Every
token of a window but its first counts. Writes a file in benchmarks/results, and fails if a
quantized variant's perplexity exceeds bfloat16's by more than LIMIT.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tasuki.attention.batch import Batch
from tasuki.attention.kv_scales import FP8, UNSCALED, KvScales
from tasuki.bench.header import header, write_result
from tasuki.execution.collective import ALONE
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for
from tasuki.models.base import CausalModel
from tasuki.models.fetch import resolve_model
from tasuki.models.llama_cpu import CpuLlamaModel
from tasuki.models.loader import load_model
from tasuki.worker.kv_calibration import scales_for

RESULTS = Path(__file__).resolve().parent / "results"
DOCUMENTATION = Path("/usr/share/doc")
DOCUMENTS = ("README*", "NEWS*", "*.txt")
MOST_CHARACTERS = 4_000_000
WINDOW = 512
BLOCK_SIZE = 16
LIMIT = 1.01


@dataclass(frozen=True, slots=True)
class Variant:
    """How a model is loaded, and the dtype of its cache; None: the model's."""

    dtype: torch.dtype = torch.bfloat16
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None


SCHEMES = {
    "int8": {
        "bfloat16": Variant(),
        "int8": Variant(quantization="int8"),
        "float32": Variant(torch.float32),
    },
    "fp8": {
        "bfloat16": Variant(),
        "fp8 weights": Variant(quantization="fp8"),
        "fp8 weights and cache": Variant(quantization="fp8", kv_dtype=FP8),
    },
}


def documentation() -> str:
    """Debian's, as far as MOST_CHARACTERS."""
    paths = {path for name in DOCUMENTS for path in DOCUMENTATION.rglob(name)}
    paths |= {path for name in DOCUMENTS for path in DOCUMENTATION.rglob(f"{name}.gz")}
    parts, length = [], 0
    for path in sorted(paths):
        if not path.is_file() or length > MOST_CHARACTERS:
            continue
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        parts.append(raw.decode(errors="ignore").strip())
        length += len(parts[-1])
    return "\n\n".join(parts)


def descriptions() -> str:
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


def loss(
    model: CausalModel,
    dtype: torch.dtype,
    window: list[int],
    kv_dtype: torch.dtype | None = None,
    scales: KvScales = UNSCALED,
) -> float:
    """Mean negative log-likelihood of the window's tokens but the first, in nats."""
    spec, blocks = model.spec, WINDOW // BLOCK_SIZE
    layout = CacheLayout(
        blocks, spec.num_kv_heads, spec.num_layers, BLOCK_SIZE, spec.head_dim, kv_dtype or dtype
    )
    pool = layout.allocate("cpu")
    attention, _ = attention_for(model, pool, dtype, scales)
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
    parser.add_argument("--scheme", choices=SCHEMES, default="int8")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results")
    arguments = parser.parse_args()
    folder = Path(resolve_model(arguments.model))
    of_debian = arguments.scheme == "fp8"
    prose = documentation() if of_debian else descriptions()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chosen = windows(tokenizer.encode(prose).ids, arguments.windows)
    losses, kernels = {}, {}
    for name, variant in SCHEMES[arguments.scheme].items():
        kv_dtype, dtype = variant.kv_dtype, variant.dtype
        kind = variant.quantization
        model = load_model(folder, dtype=dtype, quantization=kind, kv_dtype=kv_dtype)
        scales = UNSCALED
        if kv_dtype == FP8:
            scales = scales_for(model, folder, dtype, torch.device("cpu"), ALONE)
        losses[name] = [loss(model, dtype, window, kv_dtype, scales) for window in chosen]
        kernels[name] = model.kernels if isinstance(model, CpuLlamaModel) else "PyTorch's"
        perplexity = math.exp(statistics.mean(losses[name]))
        print(f"{name:21} perplexity {perplexity:.4f}  ({kernels[name]})", flush=True)
    base = losses["bfloat16"]
    ratios, errors = {}, {}
    for name in losses:
        if name not in ("bfloat16", "float32"):
            differences = [a - b for a, b in zip(losses[name], base, strict=True)]
            ratios[name] = math.exp(statistics.mean(differences))
            errors[name] = statistics.stdev(differences) / math.sqrt(len(differences))
            print(f"{name} / bfloat16: {ratios[name]:.5f}, must be at most {LIMIT}")
    kind = "cpu_perplexity" if arguments.scheme == "int8" else "fp8_perplexity"
    result = header(kind, label=arguments.model, topology=None, model=arguments.model) | {
        "text": {
            "what": "Debian's documentation"
            if of_debian
            else "descriptions of the installed Python distributions",
            "sha256": hashlib.sha256(prose.encode()).hexdigest(),
            "windows": len(chosen),
            "window_tokens": WINDOW,
        },
        "kernels": kernels,
        "perplexity": {name: math.exp(statistics.mean(each)) for name, each in losses.items()},
        "to_bfloat16": ratios,
        "standard_error": errors,
        "limit": LIMIT,
    }
    write_result(arguments.output or RESULTS / f"{kind}.json", result)
    return int(any(ratio > LIMIT for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
