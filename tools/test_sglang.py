"""Runs the router in front of real SGLang workers on the CPU: alone, and split by Mooncake's TCP.

`make test-sglang` calls it. SGLang computes by torch there, in place of its CUDA kernels. Each
check prints one line; the first that fails ends the run. The three workers take some minutes to
start and 3 GB for each rank: the prefill worker has two data-parallel ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_workers import (
    CHAT,
    MODEL,
    Process,
    about,
    ask,
    chat,
    check,
    free_port,
    metric,
    said,
    start_router,
    stream,
    text_of,
    until,
)

START_S = 600.0
GENERATE = "/generate"
LAUNCH = Path(__file__).with_name("sglang_on_cpu") / "launch.py"
PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port")
RANKS = ("--dp-size", "2")
DECODE = ("--disaggregation-mode", "decode")
DECODE += ("--disaggregation-decode-retraction-backup", "cpu_tensor")  # the other needs CUDA


def start_sglang(python: Path, model: Path, port: int, log: Path, *options: str) -> Process:
    """An SGLang worker, whole or one half."""
    words = [str(python), str(LAUNCH), "--model-path", str(model), "--served-model-name", MODEL]
    words += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "16"]
    words += ["--mem-fraction-static", "0.3", "--disable-overlap-schedule"]
    words += ["--enable-metrics", "--decode-log-interval", "1", "--skip-server-warmup", *options]
    env = {
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "MC_FORCE_TCP": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if RANKS[0] in options:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    return Process(words, log, env)


def generate(text: str | list[str], tokens: int, n: int = 1, **fields: Any) -> dict[str, Any]:
    """A greedy request in SGLang's own format."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "n": n}
    return {"text": text, "sampling_params": sampling, **fields}


def tokens_of(body: bytes) -> list[list[int]]:
    """Of each answer to a `/generate`."""
    found = json.loads(body)
    return [one["output_ids"] for one in (found if isinstance(found, list) else [found])]


CAPITAL = chat("What is the capital of France?", max_tokens=12)
STORY = chat("Tell me a story about a fox and a crow.", max_tokens=32)
TWO = generate(["The capital of France is", "One, two, three,"], 6)
CHOICES = generate("The capital of France is", 6, n=2)
SCORED = generate("The capital of France is", 4, return_logprob=True, logprob_start_len=0)


def colocated(router: int, worker: int) -> str:
    """One worker behind the router. Returns a story, as the worker alone tells it."""
    direct, through = ask(worker, CHAT, CAPITAL), ask(router, CHAT, CAPITAL)
    check("colocated: the router's answer is the worker's", said(direct[2]) == said(through[2]))
    wrong = chat("x", max_tokens=-3)
    refused = ask(router, CHAT, wrong)
    passes = refused == ask(worker, CHAT, wrong) and refused[0] == 400
    check("colocated: a worker's 400 passes as it is", passes, refused)
    direct, through = ask(worker, GENERATE, TWO), ask(router, GENERATE, TWO)
    check("colocated: /generate with two prompts", tokens_of(direct[2]) == tokens_of(through[2]))
    direct, through = ask(worker, GENERATE, CHOICES), ask(router, GENERATE, CHOICES)
    check("colocated: /generate, two choices", tokens_of(direct[2]) == tokens_of(through[2]))
    for path in ("/get_model_info", "/get_server_info", "/v1/models"):
        status, _, body = ask(router, path)
        check(f"colocated: {path}", status == 200 and bool(json.loads(body)), (status, body))
    story = text_of(list(stream(router, STORY)))
    check(
        "colocated: a stream has the text of the whole", said(ask(worker, CHAT, STORY)[2]) == story
    )
    return story


def split(router: int, whole: int, halves: tuple[int, int], story: str) -> None:
    """Prefill and decode apart; `whole` serves alone, to compare with."""
    prefill, decode = halves
    check("split: the story is the same", text_of(list(stream(router, STORY))) == story)
    direct = said(ask(whole, CHAT, CAPITAL)[2])
    answers = [said(ask(router, CHAT, CAPITAL)[2]) for _ in range(8)]
    check("split: so are answers over two ranks of prefill", answers == [direct] * 8, answers)
    named = ask(router, CHAT, {**CAPITAL, "routed_dp_rank": 0})
    check("split: and one on a rank that the client names", said(named[2]) == direct, named)
    refused = ask(router, CHAT, {**CAPITAL, "routed_dp_rank": 2})
    check("split: a rank that is not there is a 400", refused[0] == 400, refused)
    failed = metric(prefill, "sglang:num_bootstrap_failed_reqs_total")
    check("split: no room was refused", not failed, failed)
    alone, apart = ask(whole, GENERATE, TWO), ask(router, GENERATE, TWO)
    check("split: two prompts have a room each", tokens_of(alone[2]) == tokens_of(apart[2]))
    status, _, text = ask(router, GENERATE, CHOICES)
    check("split: several choices are a 400", status == 400 and b"(n)" in text, (status, text))
    alone, apart = ask(whole, GENERATE, SCORED), ask(router, GENERATE, SCORED)
    for field in ("input_token_logprobs", "output_token_logprobs"):
        check(f"split: {field} are the same", scores(alone, field) == scores(apart, field))
    refused = ask(router, CHAT, chat("x", max_tokens=-3))
    check("split: a 400 of the workers is the client's", refused[0] == 400, refused)
    lines = stream(router, chat("Count to a thousand.", max_tokens=1500))
    first = [next(lines) for _ in range(5)]
    check("split: a long answer has begun", any("content" in line for line in first))
    running = lambda: metric(decode, "sglang:num_running_reqs")  # noqa: E731
    until("the decode worker to tell of it", lambda: running() == 1, 30.0)
    lines.close()  # type: ignore[attr-defined]
    until("a hang-up to reach the decode worker", lambda: running() == 0, 30.0)
    check("split: a hang-up ends the work", True)


def doctor(tasuki: Path, router: int, halves: tuple[int, int]) -> None:
    """`tasuki doctor` looks at the split, which is well, while it answers."""
    lines = stream(router, chat("Count to a thousand.", max_tokens=1500))
    first = [next(lines) for _ in range(5)]
    check("doctor: a long answer has begun", any("content" in line for line in first))
    urls = [f"sglang://127.0.0.1:{port}" for port in halves]
    words = [str(tasuki), "doctor", *urls, "--window-s", "5"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    lines.close()  # type: ignore[attr-defined]
    check("doctor: nothing is wrong", found.returncode == 0, found.stdout + found.stderr)
    for looked_at in ("errors", "configuration", "lost KV", "ratio", "preemptions"):
        check(
            f"doctor: it looked at {looked_at}", f"ok    {looked_at}" in found.stdout, found.stdout
        )


def scores(answer: tuple[int, str, bytes], field: str) -> list[tuple[float | None, int]]:
    """Log probabilities and tokens of an answer, rounded."""
    rows = json.loads(answer[2])["meta_info"][field]
    return [(None if row[0] is None else round(row[0], 3), row[1]) for row in rows]


def deaths(router: int, alone: Process, story: str) -> None:
    """A worker that serves alone dies in the middle of an answer; the halves are left."""
    lines = stream(router, STORY)
    begun = [next(lines) for _ in range(12)]
    alone.kill()
    whole = text_of(begun + list(lines))
    check("death: the answer went on with the two halves", whole == story, (whole, story))
    check("death: which was counted", metric(router, "tasuki_resumed_answers_total") == 1)


def main() -> None:
    """Starts everything, checks, ends everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of SGLang's environment")
    parser.add_argument("--router", type=Path, required=True, help="the tasuki-router program")
    parser.add_argument("--tasuki", type=Path, required=True, help="the tasuki program")
    parser.add_argument("--model", type=Path, required=True, help="the model's folder")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    print(about(args.python, ("sglang", "torch", "mooncake-transfer-engine-non-cuda")), flush=True)
    whole, prefill, decode, bootstrap = (free_port() for _ in range(4))
    processes: dict[str, Process] = {}

    def start(name: str, port: int, *options: str) -> None:
        log = args.logs / f"{name}.log"
        processes[name] = start_sglang(args.python, args.model, port, log, *options)

    def route(name: str, *workers: str) -> int:
        processes[name], port = start_router(args.router, workers, args.logs / f"{name}.log")
        return port

    def is_up(name: str, port: int) -> bool:
        if processes[name].child.poll() is not None:
            sys.exit(f"FAILED: SGLang ({name}) ended: {processes[name].log} says why")
        return ask(port, "/health", wait_s=5)[0] == 200

    try:
        start("whole", whole)
        start("prefill", prefill, *PREFILL, str(bootstrap), *RANKS)
        start("decode", decode, *DECODE)
        for name, port in (("whole", whole), ("prefill", prefill), ("decode", decode)):
            until(f"SGLang ({name})", lambda name=name, port=port: is_up(name, port), START_S)
        check("three SGLang workers are up", True)
        alone = f"sglang://127.0.0.1:{whole}"
        halves = (
            f"sglang://127.0.0.1:{prefill}?role=prefill&bootstrap_port={bootstrap}",
            f"sglang://127.0.0.1:{decode}?role=decode",
        )
        story = colocated(route("colocated", alone), whole)
        router = route("split", *halves)
        split(router, whole, (prefill, decode), story)
        doctor(args.tasuki, router, (prefill, decode))
        deaths(route("all", *halves, alone), processes["whole"], story)
        print("all checks passed")
    finally:
        for process in processes.values():
            process.kill()


if __name__ == "__main__":
    main()
