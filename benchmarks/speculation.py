"""What prompt-lookup drafts bring: one request at a time on the CPU, with and without by turns.

    python benchmarks/speculation.py [--threads N] [--turns 3]

The default model in float32, greedy, in one process: an engine as a worker builds it, with
`--speculate prompt-lookup` and without. Two workloads: `copy`, texts to be repeated, and `write`,
short tasks without anything to copy, where drafts should cost nothing. Decode tokens per second
are those after an answer's first token; `cpu_ratio` compares tokens per second of processor time,
which other programs on the machine change less. The answers of both must be the same tokens;
else the program fails. Writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tasuki.bench.header import header, own_command, write_result
from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.execution.runner import ModelRunner
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for
from tasuki.models.fetch import resolve_model
from tasuki.models.loader import load_model
from tasuki.worker.config import DRAFT_TOKENS

RESULT = Path(__file__).resolve().parent / "results" / "speculation.json"
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
TEXTS = (
    "The harbour office opens at seven. Boats that carry fish are unloaded first, then those with"
    " timber, then all others. Each captain signs the list at the door and waits in the hall until"
    " his number is called. Nobody may leave a boat at the northern pier for longer than two hours,"
    " because the ferry needs it in the afternoon.",
    "def total(items):\n    result = 0\n    for item in items:\n        if item.price < 0:\n"
    "            raise ValueError(item.name)\n        result += item.price * item.count\n"
    "    return result\n\n\ndef average(items):\n    if not items:\n        return 0\n"
    "    return total(items) / len(items)\n",
)
COPY = tuple(f"Repeat the following text word for word:\n\n{text}" for text in TEXTS)
WRITE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle keeps its balance.",
)


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers of a workload, and how long their decoding took."""

    answers: list[list[int]]
    tokens: int
    seconds: float
    cpu_seconds: float
    steps: int
    drafted: int
    accepted: int

    def to_json(self) -> dict[str, Any]:
        """Rates."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_cpu_s": self.tokens / self.cpu_seconds,
            "tokens_per_step": self.tokens / self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


class Bench:
    """A model, and engines over one pool."""

    def __init__(self, model: Any) -> None:
        spec = self._spec = model.spec
        self._blocks = 2 * MAX_MODEL_LEN // BLOCK_SIZE
        layout = CacheLayout(
            self._blocks,
            spec.num_kv_heads,
            spec.num_layers,
            BLOCK_SIZE,
            spec.head_dim,
            torch.float32,
        )
        pool = layout.allocate("cpu")
        attention, _ = attention_for(model, pool, torch.float32)
        self._runner = ModelRunner(model, attention, pool)

    def answer(self, prompts: list[list[int]], max_tokens: int, draft_tokens: int) -> Answered:
        """All prompts, one after another."""
        config = EngineConfig(
            num_blocks=self._blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._spec.vocab_size,
            block_size=BLOCK_SIZE,
            max_running_requests=1,
            prefix_caching=False,
            draft_tokens=draft_tokens,
        )
        engine = Engine(config, self._runner)
        answers, tokens, seconds, cpu_s, steps = [], 0, 0.0, 0.0, 0
        stops = frozenset(self._spec.eos_token_ids)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                seed=0, temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops
            )
            engine.submit(RequestSpec(str(index), Leg.COLOCATED, prompt, params))
            answer: list[int] = []
            while not answer:
                answer += [t for output in engine.step().outputs for t in output.tokens]
            first, begin_s, begin_cpu_s = len(answer), time.perf_counter(), time.process_time()
            while engine.has_work():
                answer += [t for output in engine.step().outputs for t in output.tokens]
                steps += 1
            seconds += time.perf_counter() - begin_s
            cpu_s += time.process_time() - begin_cpu_s
            tokens += len(answer) - first
            answers.append(answer)
        counters = engine.counters()
        drafted, accepted = counters.draft_tokens, counters.accepted_draft_tokens
        return Answered(answers, tokens, seconds, cpu_s, steps, drafted, accepted)


def median_ratio(turns: list[dict[str, Any]], rate: str) -> float:
    """Of a rate with drafts to that without, over the turns."""
    return statistics.median(turn["with"][rate] / turn["without"][rate] for turn in turns)


def main() -> int:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(resolve_model(arguments.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bench = Bench(load_model(folder, dtype=torch.float32))
    workloads, failed = {}, 0
    for name, texts in (("copy", COPY), ("write", WRITE)):
        prompts = [
            tokenizer.encode(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )
            for text in texts
        ]
        bench.answer(prompts, 8, 0)  # warm
        turns = []
        for turn in range(arguments.turns):
            without = bench.answer(prompts, arguments.max_tokens, 0)
            drafted = bench.answer(prompts, arguments.max_tokens, DRAFT_TOKENS)
            failed += without.answers != drafted.answers
            turns.append({"without": without.to_json(), "with": drafted.to_json()})
            print(f"{name}, turn {turn + 1}: {turns[-1]}", file=sys.stderr, flush=True)
        workloads[name] = {
            "ratio": median_ratio(turns, "tokens_per_s"),
            "cpu_ratio": median_ratio(turns, "tokens_per_cpu_s"),
            "output_tokens": without.tokens,
            "same_tokens": not failed,
            "turns": turns,
        }
    result = {
        **header(
            "speculation",
            command=own_command(),
            label="tasuki",
            topology=None,
            model=arguments.model,
        ),
        "draft_tokens": DRAFT_TOKENS,
        "max_tokens": arguments.max_tokens,
        "threads": arguments.threads,
        "workloads": workloads,
    }
    write_result(arguments.out, result)
    print(json.dumps({name: (w["ratio"], w["cpu_ratio"]) for name, w in workloads.items()}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
