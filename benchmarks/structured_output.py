"""Do answers match their JSON schemas? A small model over the schemas of JSONSchemaBench.

    python benchmarks/structured_output.py SCHEMAS [--count 500] [--threads N]

SCHEMAS is the folder `data` of https://github.com/guidance-ai/jsonschemabench (revision in
the result): a folder for each collection, a file for each schema. Some of them, drawn by the seed,
are compiled as a worker compiles them, and the model is asked for an example of each, by an
engine as a worker builds it, on the CPU; two short examples of other schemas come before. The
model is so small that it often goes on within a string for ever: at a low temperature it repeats
itself, at a high one it rambles. So it draws at `--temperature` among tokens that are not much
less likely than the likeliest (`--min-p`), repeats what it has said less gladly
(`--frequency-penalty`), and likes to end strings, lists and objects (`--closing-bias`, added to the
logits of tokens that do). What ended by itself is checked with the package `jsonschema`.

An answer is `valid`, `invalid` (it ended and does not match), `cut off` (by `--max-tokens`) or
`failed` (the engine refused to go on); a schema may be `refused` when it is compiled, with
the keywords that are not supported. Writes benchmarks/results/structured_output.json; fails if
an answer is invalid or failed.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import torch
from transformers import AutoTokenizer

from tasuki.bench.header import header, own_command, write_result
from tasuki.engine import isolation
from tasuki.engine.api import FinishReason, Leg, LegEndReason, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.errors import GrammarError
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource
from tasuki.execution.runner import ModelRunner
from tasuki.kv.layout import CacheLayout
from tasuki.models.attending import attention_for
from tasuki.models.fetch import resolve_model
from tasuki.models.loader import load_model
from tasuki.worker.grammar_pool import GrammarPool

RESULT = Path(__file__).resolve().parent / "results" / "structured_output.json"
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
AT_ONCE = 32
_SCHEMA_TOKENS = 300  # of a prompt: the rest of a long schema is left out
_STRING: Any = {"type": "string"}
EXAMPLES: tuple[tuple[Any, Any], ...] = (
    (
        {
            "type": "object",
            "properties": {
                "title": _STRING,
                "year": {"type": "integer"},
                "tags": {"type": "array", "items": _STRING},
                "publisher": _STRING,
            },
            "required": ["title", "tags"],
        },
        {"title": "Dune", "tags": ["novel"]},
    ),
    (
        {
            "type": "object",
            "properties": {
                "host": _STRING,
                "ports": {"type": "array", "items": {"type": "integer"}},
                "options": {"type": "object"},
            },
        },
        {"host": "a.org", "ports": [80]},
    ),
)
"""Schemas, and a short answer to each."""
_UNSUPPORTED = re.compile(r"Unimplemented keys: (\[[^\]]*\])")


@dataclass
class Case:
    """A schema and what came of it."""

    name: str
    schema: Any
    compile_s: float = 0.0
    grammar: Grammar | None = None
    refusal: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: str = ""
    outcome: str = ""
    detail: str = ""


def draw_cases(folder: Path, count: int, seed: int) -> list[Case]:
    """Some schemas of all collections."""
    files = sorted(folder.glob("*/*.json"))
    chosen = sorted(random.Random(seed).sample(files, min(count, len(files))))
    return [Case(str(file.relative_to(folder)), json.loads(file.read_text())) for file in chosen]


def compile_all(cases: Sequence[Case], compiler: GrammarCompiler) -> None:
    """As a worker does, one after another; the time is that of a first request."""
    pool = GrammarPool(compiler, kept=1)
    told: queue.SimpleQueue[Grammar | GrammarError] = queue.SimpleQueue()
    pool.get(GrammarSource("regex", "warm-up"), told.put)
    told.get()
    for case in cases:
        begin_s = time.perf_counter()
        pool.get(GrammarSource("json_schema", json.dumps(case.schema)), told.put)
        compiled = told.get()
        case.compile_s = time.perf_counter() - begin_s
        if isinstance(compiled, GrammarError):
            case.refusal = str(compiled)
        else:
            case.grammar = compiled


def prompt_of(tokenizer: Any, schema: Any) -> list[int]:
    """A chat that asks for an example, after others that were answered."""
    chat = []
    for asked, answer in EXAMPLES:
        chat.append({"role": "user", "content": _question(tokenizer, asked)})
        chat.append({"role": "assistant", "content": json.dumps(answer, separators=(",", ":"))})
    chat.append({"role": "user", "content": _question(tokenizer, schema)})
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(said, add_special_tokens=False))


def _question(tokenizer: Any, schema: Any) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    text = tokenizer.decode(tokenizer.encode(text)[:_SCHEMA_TOKENS])
    return f"Give a short example, as JSON, of what this schema describes:\n{text}"


def make_engine(model: Any) -> Engine:
    """As a worker builds it for the CPU."""
    spec, blocks = model.spec, AT_ONCE * MAX_MODEL_LEN // BLOCK_SIZE
    layout = CacheLayout(
        blocks, spec.num_kv_heads, spec.num_layers, BLOCK_SIZE, spec.head_dim, torch.bfloat16
    )
    pool = layout.allocate("cpu")
    attention, _ = attention_for(model, pool, torch.bfloat16)
    config = EngineConfig(
        num_blocks=blocks,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=spec.vocab_size,
        block_size=BLOCK_SIZE,
        max_running_requests=AT_ONCE,
    )
    return Engine(config, ModelRunner(model, attention, pool))


def closing_bias(tokenizer: Any, bias: float) -> dict[int, float]:
    """The logit bias of tokens that begin with a quote or a closing bracket."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return {token: bias for token, text in enumerate(texts) if text.startswith(('"', "}", "]"))}


class MaskTimes:
    """How long making the masks took, in all."""

    def __init__(self) -> None:
        self.seconds, self.rows = 0.0, 0
        make = isolation.make_masks

        def timed(draws: Any, constrained: Any, *rest: Any) -> Any:
            begin_s = time.perf_counter()
            masks = make(draws, constrained, *rest)
            self.seconds += time.perf_counter() - begin_s
            self.rows += len(constrained)
            return masks

        isolation.make_masks = timed


def answer_all(
    cases: Sequence[Case], engine: Engine, tokenizer: Any, sampling: Mapping[str, Any]
) -> float:
    """Run all that compiled, each with a seed of its own; returns the seconds."""
    places = {}
    stops = frozenset({tokenizer.eos_token_id})
    for index, case in enumerate(cases):
        if case.grammar is None:
            continue
        prompt = prompt_of(tokenizer, case.schema)
        params = SamplingParams(seed=index, stop_token_ids=stops, **sampling)
        name = str(index)
        places[name] = case
        engine.submit(RequestSpec(name, Leg.COLOCATED, prompt, params, grammar=case.grammar))
    begin_s = shown_s = time.perf_counter()
    left = len(places)
    while engine.has_work():
        result = engine.step()
        for output in result.outputs:
            places[output.request_id].tokens += output.tokens
            places[output.request_id].finish = output.finish
        for ended in result.ended:
            left -= 1
            if ended.reason is not LegEndReason.FINISHED:
                places[ended.request_id].failure = ended.message or ended.reason.value
        if time.perf_counter() - shown_s > 10.0:
            shown_s = time.perf_counter()
            print(f"{shown_s - begin_s:.0f} s: {left} left", file=sys.stderr, flush=True)
    return time.perf_counter() - begin_s


def judge(case: Case, tokenizer: Any) -> None:
    """What came of a case, and why."""
    if case.grammar is None:
        case.outcome, case.detail = "refused", case.refusal
    elif case.failure:
        case.outcome, case.detail = "failed", case.failure
    elif case.finish is not FinishReason.STOP:
        case.outcome = "cut off"
    else:
        text = tokenizer.decode(case.tokens[:-1])
        try:
            value = json.loads(text)
            kind = jsonschema.validators.validator_for(case.schema)
            kind(case.schema).validate(value)
            case.outcome = "valid"
        except (json.JSONDecodeError, jsonschema.ValidationError) as error:
            case.outcome, case.detail = "invalid", f"{str(error)[:300]}: {text[:500]}"
        except Exception as error:  # of schemas that the package cannot follow
            case.outcome, case.detail = "not checked", f"{type(error).__name__}: {error}"[:300]


def why_refused(message: str) -> list[str]:
    """The unsupported keywords that a refusal names, or its beginning."""
    if found := _UNSUPPORTED.search(message):
        return [f"keyword {word}" for word in json.loads(found[1])]
    if found := re.search(r"(\w+) constraints are not supported", message):
        return [f"keyword {found[1]}"]
    return [re.sub(r'["\'`].*', "", message.split(": ", 1)[-1])[:60].strip()]


def at(sorted_values: Sequence[float], share: float) -> float:
    """A percentile."""
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--revision", default="", help="of the schemas, for the result")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1280)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.05)
    parser.add_argument("--frequency-penalty", type=float, default=0.1)
    parser.add_argument("--closing-bias", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = Path(resolve_model(arguments.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = draw_cases(arguments.schemas, arguments.count, arguments.seed)
    model = load_model(folder, dtype=torch.bfloat16)
    spec = model.spec
    compile_all(cases, GrammarCompiler(folder, spec.vocab_size, spec.eos_token_ids))
    times = MaskTimes()
    names = ("max_tokens", "temperature", "min_p", "frequency_penalty")
    sampling = {name: getattr(arguments, name) for name in names}
    bias = closing_bias(tokenizer, arguments.closing_bias)
    engine = make_engine(model)
    seconds = answer_all(cases, engine, tokenizer, {**sampling, "logit_bias": bias})
    for case in cases:
        judge(case, tokenizer)
    outcomes = Counter(case.outcome for case in cases)
    collections: dict[str, Counter[str]] = {}
    for case in cases:
        collections.setdefault(case.name.partition("/")[0], Counter())[case.outcome] += 1
    compiled = sorted(1e3 * case.compile_s for case in cases if case.grammar is not None)
    command = ["SCHEMAS" if word == str(arguments.schemas) else word for word in own_command()]
    result = {
        **header(
            "structured_output",
            command=command,
            label="tasuki",
            topology=None,
            model=arguments.model,
        ),
        "schemas": {"suite": "JSONSchemaBench", "revision": arguments.revision},
        "seed": arguments.seed,
        "count": len(cases),
        **sampling,
        "closing_bias": arguments.closing_bias,
        "threads": arguments.threads,
        "outcomes": dict(outcomes),
        "collections": {name: dict(counts) for name, counts in sorted(collections.items())},
        "refused_for": dict(
            Counter(why for c in cases if c.refusal for why in why_refused(c.refusal)).most_common()
        ),
        "compile_ms": {"p50": at(compiled, 0.5), "p99": at(compiled, 0.99), "most": compiled[-1]},
        "mask_us_per_row": 1e6 * times.seconds / max(1, times.rows),
        "output_tokens": sum(len(case.tokens) for case in cases),
        "seconds": seconds,
        "not_valid": [
            {"schema": case.name, "outcome": case.outcome, "detail": case.detail}
            for case in cases
            if case.outcome not in ("valid", "cut off", "refused")
        ],
    }
    write_result(arguments.out, result)
    shown = {key: result[key] for key in ("outcomes", "refused_for", "compile_ms", "not_valid")}
    print(json.dumps(shown, indent=1, ensure_ascii=False))
    return 1 if outcomes["invalid"] or outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
