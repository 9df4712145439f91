"""What grammars cost a decode step: rows with a JSON schema of their own beside rows without.

    python benchmarks/gpu/grammar_steps.py
    python benchmarks/gpu/grammar_steps.py --device cpu --tiny --rows 4 --context 32 --repeats 10

Random weights in the shape of Qwen3-4B; a byte-level tokenizer of as many tokens as the model
has, made here (`--tokenizer` takes another). Every row decodes an answer to its own schema
(arrays of objects with strings, numbers, booleans and words, none of which ends while it is
measured). The same rows without grammars take turns with it in one process, `--turns` times.
`ratio` is the median over turns of a step with grammars through the one without; `masks_ms` the
median time to make the masks of a step, and `host_ms` how long a step kept the engine's thread,
the wait for the device not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from busy import SAMPLINGS, WARM_STEPS, TimedRunner
from dummy import dummy_model, pool_for
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.engine import isolation
from tasuki.engine.api import FirstToken, Leg, LegTimings, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource

RESULT = Path(__file__).resolve().parents[1] / "results" / "gpu_grammar_steps.json"
LEAST_ITEMS = 400  # of the array that an answer is: it does not end
SAMPLED = ("greedy", "top-p")
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # the most frequent of English first
LONGEST_TOKEN = 12


def make_tokenizer(tokens: int) -> Tokenizer:
    """A byte-level tokenizer of so many tokens: words and parts of them, numbers, marks.

    Each token is another one and a character more, so the tree of tokens branches as that of a
    trained vocabulary does. The same in every run.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate(["<eos>", *alphabet])}
    others = [chr(c) for c in range(33, 127) if not chr(c).isalpha()]
    characters = [*LETTERS, *LETTERS.upper(), *others]
    weights = [1.0 / (5 + rank) for rank in range(26)]
    weights += [*(weight / 8 for weight in weights), *[0.01] * len(others)]
    draw = random.Random(0)
    parents = [*alphabet, *["\u0120"] * len(alphabet)]  # of a blank, begins a word
    merges: list[tuple[str, str]] = []
    while len(vocab) < tokens:
        drawn = zip(
            draw.choices(parents, k=4096), draw.choices(characters, weights, k=4096), strict=True
        )
        for parent, character in drawn:
            text = parent + character
            if len(text) <= LONGEST_TOKEN and text not in vocab and len(vocab) < tokens:
                vocab[text] = len(vocab)
                merges.append((parent, character))
                parents.append(text)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


class MaskTimes:
    """How long making the masks takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        make = isolation.make_masks

        def timed(*arguments: Any) -> Any:
            begin_s = time.perf_counter()
            masks = make(*arguments)
            self.seconds += time.perf_counter() - begin_s
            return masks

        isolation.make_masks = timed


MASK_TIMES = MaskTimes()


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner whose graphs are captured, and what its rows may say."""

    runner: TimedRunner
    config: EngineConfig
    grammars: list[Grammar]
    first_token: int

    def step_ms(self, sampling: str, grammars: bool, context: int, repeats: int) -> dict[str, Any]:
        """Median milliseconds of a step, of its masks and of the host's part in it."""
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
        times, hosts, masks = [], [], []
        for index in range(WARM_STEPS + repeats):
            self.runner.waited_s, MASK_TIMES.seconds = 0.0, 0.0
            begin_s = time.perf_counter()
            result = engine.step()
            if index >= WARM_STEPS:
                times.append(time.perf_counter() - begin_s)
                hosts.append(times[-1] - self.runner.waited_s)
                masks.append(MASK_TIMES.seconds)
                outputs = sum(len(output.tokens) for output in result.outputs)
                assert outputs == len(self.grammars), result.ended
        for index in range(len(self.grammars)):
            engine.abort(f"r{index}")
        while engine.has_work():
            engine.step()
        names = ("ms", "host_ms", "masks_ms")
        return {
            name: 1e3 * statistics.median(each)
            for name, each in zip(names, (times, hosts, masks), strict=True)
        }


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of the one made")
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
    tokenizer = (
        make_tokenizer(vocab)
        if args.tokenizer is None
        else Tokenizer.from_file(str(args.tokenizer))
    )
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
    runner = TimedRunner(model, make_attention(pool, model.spec.num_heads, pool.dtype)[0], pool)
    if device.type == "cuda":
        runner.capture(args.rows, longest)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        compiler = GrammarCompiler(Path(folder), vocab, [0])
        grammars = [
            compiler.compile(GrammarSource("json_schema", json.dumps(schema(index))))
            for index in range(args.rows)
        ]
    bench = Bench(runner, config, grammars, tokenizer.token_to_id("["))
    rows = []
    for sampling in SAMPLED:
        turns = [
            [bench.step_ms(sampling, given, args.context, args.repeats) for given in (False, True)]
            for _ in range(args.turns)
        ]
        ratio = statistics.median(within["ms"] / without["ms"] for without, within in turns)
        row = {"sampling": sampling, "rows": args.rows, "without_and_with": turns, "ratio": ratio}
        print(f"{sampling}: {row}", file=sys.stderr, flush=True)
        rows.append(row)
    sizes = {"vocab": vocab, "tokenizer_tokens": tokenizer.get_vocab_size()}
    described = header("gpu_grammar_steps", label="grammars", topology=None, model="Qwen3-4B shape")
    write_result(args.output, described | sizes | {"context": args.context, "steps": rows})


if __name__ == "__main__":
    main()
