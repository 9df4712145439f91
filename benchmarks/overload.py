"""Goodput at twice the load that a fleet can take, with and without admission.

    python benchmarks/overload.py                   two mixed workers, 5 minutes each, 20 in all
    python benchmarks/overload.py --seconds 60      shorter
    python benchmarks/overload.py --gpus 1 --start-rate 4 --output FILE     `tasuki serve --mixed 1`

The router is real; so are the workers, but for their device, which is a clock
(`paced_worker.py`) at the pace of an H200: a step's time is fitted to measured ones, see
`STEPS`. With `--gpus` the devices are real too, under random weights in the shape of Qwen3-4B.
The load is W2's, 5,000 tokens in and 250 out, each 50% more or less, open loop, Poisson; the
objectives are TTFT 2 s and TPOT 25 ms. First the highest rate is searched at which nine
tenths of the requests meet them, without admission, as `tasuki bench sweep --find-goodput` does.
Then the router gets twice that rate: with admission; with it where one tenant of ten sends nine
tenths of the requests; and without it, for a fifth of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from programs import ROOT, build, running
from programs import said as said_by

sys.path.append(str(Path(__file__).with_name("gpu")))
from shapes import QWEN3_4B, TINY, write_model

from tasuki.bench.arguments import words
from tasuki.bench.goodput import SearchSettings
from tasuki.bench.goodput_run import search_goodput
from tasuki.bench.header import header, write_result
from tasuki.bench.plan import Goal, Point
from tasuki.bench.serving import Serving
from tasuki.bench.topologies import Target
from tasuki.launch.config import Topology
from tasuki.models.fetch import resolve_model

RESULTS = ROOT / "benchmarks" / "results"
TASUKI = (sys.executable, "-m", "tasuki")

SLO = "ttft=2s,tpot=25ms"
OBJECTIVES = {"ttft-target-ms": 2_000, "tpot-target-ms": 25}
NO_ADMISSION = {"no-admission": True}
Options = Mapping[str, Any]
LOAD = {
    "workload": "random",
    "input-tokens": 5_000,
    "output-tokens": 250,
    "range-ratio": 0.5,
    "temperature": 0,
}
# Steps of Qwen3-4B's shape on an H200: the file, the step's name there, and what is in it:
# decodes, tokens that they attend to, prompt tokens, sum of end^2 - start^2 of the prompts.
STEPS = (
    ("gpu_steps", "decode, batch 1, context 770", 1, 770, 0, 0),
    ("gpu_steps", "decode, batch 96, context 770", 96, 73_920, 0, 0),
    ("gpu_steps", "decode, batch 32, context 5,100", 32, 163_200, 0, 0),
    ("gpu_mixed_steps", "24 decodes at 5,100, 488 after 2,000", 24, 122_400, 488, 2_190_144),
    ("gpu_mixed_steps", "prompts of 500, 300 and 224", 0, 0, 1_024, 390_176),
    ("gpu_mixed_steps", "4 prompts of 512", 0, 0, 2_048, 1_048_576),
    ("gpu_mixed_steps", "2,048 after 3,072", 0, 0, 2_048, 16_777_216),
)
LAUNCH_MS = 0.6  # of the host, as on the machine of `gpu_mixed_steps`
BLOCKS, MODEL_LEN, ITL_TARGET_MS = 12_288, 16_384, 20.0
DEADLINE_S = 60.0


def measured_ms(file: str, name: str) -> float:
    """What a step took, with a CUDA graph."""
    steps = json.loads((RESULTS / f"{file}.json").read_text())["steps"]
    for step in steps:
        if step["step"] == name and step["graph"]:
            return float(step.get("gpu_ms") or step["ms"])
    raise SystemExit(f"{file}.json has no step {name!r}")


def fit() -> dict[str, float]:
    """Milliseconds of a decode step, and for each sequence, KV token, prompt token, square."""
    names = ("step", "sequence", "kv_token", "token", "square")
    rows, times = [], []
    for file, name, sequences, kv_tokens, tokens, squares in STEPS:
        row = [float(sequences > 0), sequences, kv_tokens, tokens, squares]
        took_ms = measured_ms(file, name)
        rows.append([value / took_ms for value in row])  # relative errors count
        times.append(1.0)
    solution, *_ = np.linalg.lstsq(np.array(rows), np.array(times), rcond=None)
    return dict(zip(names, map(float, solution), strict=True))


@contextlib.contextmanager
def deployment(options: argparse.Namespace, said: Options) -> Iterator[str]:
    """Mixed workers and a router with these options; its URL."""
    with (on_gpus if options.gpus else on_clocks)(options, said) as url:
        yield url


@contextlib.contextmanager
def on_gpus(options: argparse.Namespace, said: Options) -> Iterator[str]:
    """Real workers; their steps are bounded as those of the clocks."""
    with tempfile.TemporaryDirectory() as folder:
        serve = {
            "model": options.load["tokenizer"],
            "device": "cpu" if options.tiny else "cuda",
            "load-format": "dummy",
            "max-concurrent-requests": 20_000,
            "itl-target-ms": ITL_TARGET_MS,
        }
        server = Serving(Topology(0, 0, options.gpus), {**serve, **said}, Path(folder) / "log")
        try:
            yield server.url
        finally:
            server.stop()


@contextlib.contextmanager
def on_clocks(options: argparse.Namespace, said: Options) -> Iterator[str]:
    """Workers that are clocks."""
    pace = options.pace
    arguments = [
        *("--launch-ms", str(LAUNCH_MS), "--itl-target-ms", str(ITL_TARGET_MS)),
        *("--step-ms", str(pace["step"]), "--sequence-us", str(1e3 * pace["sequence"])),
        *("--kv-token-ns", str(1e6 * pace["kv_token"]), "--token-us", str(1e3 * pace["token"])),
        *("--square-ns", str(1e6 * pace["square"]), "--blocks", str(BLOCKS)),
        *("--max-model-len", str(MODEL_LEN), "--vocabulary", "49152"),
    ]
    script = str(Path(__file__).with_name("paced_worker.py"))
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        addresses = []
        for index in range(options.workers):
            notes = str(Path(folder) / f"{index}.json")
            child = stack.enter_context(
                running([sys.executable, script, "mixed", notes, *arguments])
            )
            addresses += ["--worker", said_by(child, "ready ")]
        model = str(resolve_model("smollm2-135m"))
        command = [str(options.router), "--model", model, *addresses, "--port", "0"]
        limits = ["--max-concurrent-requests", "20000", "--log", "error", *words(said)]
        router = stack.enter_context(running([*command, *limits]))
        url = said_by(router, "listening on ")
        wait_ready(url)
        yield url


def wait_ready(url: str) -> None:
    """Until the router has its workers."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready") as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the router did not become ready")


def bench(url: str, load: Options, how: Options) -> Any:
    """One run of `tasuki bench serve`; its result."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [*TASUKI, "bench", "serve", "--base-url", url, "--output", str(output)]
        command += ["--quiet", "--no-chunks", *words({**load, **how})]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def search(options: argparse.Namespace) -> dict[str, Any]:
    """The highest rate that meets the objectives, without admission."""
    settings = SearchSettings(
        attainment=0.9,
        start_rate=options.start_rate,
        precision=options.precision,
        min_probe_s=options.probe_s,
        max_probes=8,
        looks=2,
    )
    target = Target(f"{workers(options)}mixed", Topology(mixed=workers(options)))
    with deployment(options, NO_ADMISSION) as url:
        # What is learnt from reports is there before the first probe.
        bench(url, options.load, {"request-rate": options.start_rate / 2, "duration-s": 10})
        point = Point(target, "goodput", Goal(SLO, {}, settings))
        found = search_goodput(point, lambda how: bench(url, options.load, how), say)
    return found.result({"name": target.name}, device(options))


def workers(options: argparse.Namespace) -> int:
    """How many there are."""
    return int(options.gpus or options.workers)


def device(options: argparse.Namespace) -> str:
    """What computes: said in place of a model."""
    return "Qwen3-4B shape" if options.gpus else "clock"


def say(*what: object) -> None:
    """To whoever watches."""
    print(*what, flush=True)


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a run came to."""
    requests, metrics = result["requests"], result["metrics"]
    refused_s = sorted(
        end - due
        for error, due, end in zip(
            requests["error"], requests["due_s"], requests["end_s"], strict=True
        )
        if error
    )
    return {
        "requests": len(requests["met"]),
        "completed": metrics["completed"],
        "refused": len(refused_s),
        "refused_after_s": dict(
            zip(("p50", "p90"), map(float, np.percentile(refused_s, (50, 90))), strict=True)
        )
        if refused_s
        else None,
        "goodput": metrics["goodput"],
        "attainment": metrics["attainment"],
        "ttft_ms": metrics["ttft_ms"],
        "tpot_ms": metrics["tpot_ms"],
    }


def overload(
    options: argparse.Namespace, rate: float, seconds: float, said: Options
) -> dict[str, Any]:
    """One tenant sends everything."""
    with deployment(options, said) as url:
        bench(url, options.load, {"request-rate": rate / 4, "duration-s": 10})
        how = {"request-rate": rate, "duration-s": seconds, "slo": SLO, "seed": 1}
        result = bench(url, options.load, how)
    return {"seconds": seconds, **summary(result)}


def unfair(options: argparse.Namespace, rate: float, seconds: float) -> dict[str, Any]:
    """One tenant sends nine tenths, nine others the rest."""
    shares = {"much": 0.9, **{f"little-{index}": 0.1 / 9 for index in range(9)}}
    with deployment(options, OBJECTIVES) as url, tempfile.TemporaryDirectory() as folder:
        bench(url, options.load, {"request-rate": rate / 4, "duration-s": 10})
        children = {}
        for index, (tenant, share) in enumerate(shares.items()):
            output = Path(folder) / f"{tenant}.json"
            arguments = {
                **options.load,
                "request-rate": rate * share,
                "duration-s": seconds,
                "slo": SLO,
                "seed": 10 + index,
                "extra-body": json.dumps({"user": tenant}),
                "output": output,
            }
            command = [*TASUKI, "bench", "serve", "--base-url", url, "--quiet", "--no-chunks"]
            command += words(arguments)
            children[tenant] = (subprocess.Popen(command, stdout=subprocess.DEVNULL), output)
        results = {}
        for tenant, (child, output) in children.items():
            if child.wait() != 0:
                raise SystemExit(f"the load of {tenant} failed")
            results[tenant] = summary(json.loads(output.read_text()))
    little = [result for tenant, result in results.items() if tenant != "much"]
    sent = sum(result["requests"] for result in little) / seconds
    good = sum(result["goodput"] for result in little)
    return {
        "tenants": results,
        "seconds": seconds,
        "others_sent_per_s": sent,
        "others_goodput": good,
        "others_share": good / sent,
    }


def main() -> None:
    """Prepare what the options name, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--tenants-s", type=float, help="of the run with tenants, if it differs")
    parser.add_argument("--probe-s", type=float, default=30.0, help="of a probe, at least")
    parser.add_argument("--precision", type=float, default=0.1, help="of the search, 0.2: 20%%")
    parser.add_argument("--workers", type=int, default=2, help="that are clocks")
    parser.add_argument("--gpus", type=int, default=0, help="real workers, one on each")
    parser.add_argument("--tiny", action="store_true", help="these on the CPU, with a tiny model")
    parser.add_argument("--start-rate", type=float, default=8.0, help="of the search")
    parser.add_argument("--output", type=Path, default=RESULTS / "overload.json")
    options = parser.parse_args()
    options.load = LOAD
    with tempfile.TemporaryDirectory() as folder:
        if options.gpus:
            model = write_model(Path(folder), TINY if options.tiny else QWEN3_4B)
            options.load = {**LOAD, "tokenizer": model}
        else:
            options.pace = fit()
            say({name: f"{value:.3g} ms" for name, value in options.pace.items()})
            options.router = build("--bin", "tasuki-router") / "tasuki-router"
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Search, overload, write."""
    found = search(options)
    rate = found["rate"]
    twice = 2 * rate
    content = {
        **header(
            "overload",
            label="admission",
            topology={"name": f"{workers(options)}mixed"},
            model=device(options),
        ),
        **({} if options.gpus else {"pace_ms": options.pace}),
        "load": LOAD,
        "slo": SLO,
        "search": {name: found[name] for name in ("rate", "interval", "points", "attainment")},
        "rate": twice,
    }
    content["with"] = overload(options, twice, options.seconds, OBJECTIVES)
    content["share_of_best"] = content["with"]["goodput"] / rate
    say("with", content["with"], content["share_of_best"])
    write_result(options.output, content)  # what is measured outlives what comes after it
    content["tenants"] = unfair(options, twice, options.tenants_s or options.seconds)
    say(content["tenants"])
    write_result(options.output, content)
    # Without admission the queue grows without end, and has to be served after it.
    content["without"] = overload(options, twice, 0.2 * options.seconds, NO_ADMISSION)
    say("without", content["without"])
    write_result(options.output, content)


if __name__ == "__main__":
    main()
