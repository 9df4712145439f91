"""What grammars cost a decode step: rows with a JSON schema of their own beside rows without.

    python benchmarks/gpu/grammar_steps.py --tokenizer tokenizer.json
    python benchmarks/gpu/grammar_steps.py --tokenizer tokenizer.json --device cpu --tiny

Random weights in the shape of Qwen3-4B; the tokenizer is any byte-level one, of up to as many
tokens as the model has. Every row decodes an answer to its own schema (arrays of objects with
strings, numbers, booleans and words, none of which ends while it is measured); the same rows
without grammars take turns with it in one process, `--turns` times. `ratio` is the median over
turns of a step with grammars through the one without.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from busy import SAMPLINGS, WARM_STEPS
from dummy import dummy_model, pool_for
from tokenizers import Tokenizer

from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.engine.api import FirstToken, Leg, LegTimings, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource
from tasuki.execution.runner import ModelRunner

RESULT = Path(__file__).resolve().parents[1] / "results" / "gpu_grammar_steps.json"
LEAST_ITEMS = 400  # of the array that an answer is: it does not end
SAMPLED = ("greedy", "top-p")


def schema(index: int) -> dict[str, Any]:
    """An array of objects whose names no other schema has."""
    draw = random.Random(index)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10**6},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": [f"word {draw.randrange(10**6)}" for _ in range(8)]},
        {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 4},
    ]
    draw.shuffle(kinds)
    members = {f"{index}_{draw.randrange(10**6)}": kind for kind in kinds}
    item = {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": LEAST_ITEMS}


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner whose graphs are captured, and what its rows may say."""

    runner: ModelRunner
    config: EngineConfig
    grammars: list[Grammar]
    first_token: int

    def step_s(self, sampling: str, grammars: bool, context: int, repeats: int) -> float:
        """Median seconds of a step."""
        engine = Engine(self.config, self.runner)
        draw = random.Random(0)
        for index, grammar in enumerate(self.grammars):
            name = f"r{index}"
            prompt = [draw.randrange(self.config.vocab_size) for _ in range(context)]
            params = SamplingParams(
                seed=index,
                max_tokens=repeats + WARM_STEPS + 8,
                **SAMPLINGS[sampling],
            )
            given = grammar if grammars else None
            engine.submit(RequestSpec(name, Leg.DECODE, prompt, params, grammar=given))
            if engine.assign(name) is None:
                raise SystemExit("the pool is too small")
            engine.start_decode(name, [FirstToken(0, self.first_token, False)], LegTimings())
        times = []
        for index in range(WARM_STEPS + repeats):
            begin_s = time.perf_counter()
            result = engine.step()
            if index >= WARM_STEPS:
                times.append(time.perf_counter() - begin_s)
                outputs = sum(len(output.tokens) for output in result.outputs)
                assert outputs == len(self.grammars), result.ended
        for index in range(len(self.grammars)):
            engine.abort(f"r{index}")
        while engine.has_work():
            engine.step()
        return statistics.median(times)


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--context", type=int, default=770)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    device = torch.device(args.device)
    model = dummy_model(device, args.tiny)
    vocab = model.spec.vocab_size
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    if tokenizer.get_vocab_size() > vocab:
        raise SystemExit(f"{args.tokenizer} has more tokens than the model, {vocab}")
    longest = args.context + args.repeats + WARM_STEPS + 16
    pool = pool_for(model, device, args.rows * (longest + 32), 16)
    config = EngineConfig(
        num_blocks=pool.shape[0],
        max_model_len=longest,
        vocab_size=vocab,
        block_size=pool.shape[4],
        max_running_requests=args.rows,
        prefix_caching=False,
        overlap=True,
    )
    runner = ModelRunner(model, make_attention(pool, model.spec.num_heads, pool.dtype)[0], pool)
    if device.type == "cuda":
        runner.capture(args.rows, longest)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(args.tokenizer, Path(folder) / "tokenizer.json")
        compiler = GrammarCompiler(Path(folder), vocab, [0])
        grammars = [
            compiler.compile(GrammarSource("json_schema", json.dumps(schema(index))))
            for index in range(args.rows)
        ]
    bench = Bench(runner, config, grammars, tokenizer.token_to_id("["))
    rows = []
    for sampling in SAMPLED:
        turns = [
            tuple(
                1e3 * bench.step_s(sampling, grammar, args.context, args.repeats)
                for grammar in (False, True)
            )
            for _ in range(args.turns)
        ]
        ratio = statistics.median(within / without for without, within in turns)
        row = {"sampling": sampling, "rows": args.rows, "ms": turns, "ratio": ratio}
        print(f"{sampling}: {row}", file=sys.stderr, flush=True)
        rows.append(row)
    sizes = {"vocab": vocab, "tokenizer_tokens": tokenizer.get_vocab_size()}
    described = header("gpu_grammar_steps", label="grammars", topology=None, model="Qwen3-4B shape")
    write_result(args.output, described | sizes | {"context": args.context, "steps": rows})


if __name__ == "__main__":
    main()
