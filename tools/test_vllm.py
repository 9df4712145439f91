"""Runs the router in front of two real vLLM workers on the CPU: alone, and split by NIXL.

Both have an adapter (LoRA) of random values, and the second one has another. `make test-vllm` calls
it. Each check prints one line; the first that fails ends the run. The workers take about a minute
to start and 4 GB each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from random_adapter import write_adapter
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

CONTEXT = 2048
START_S = 300.0
BOTH, ONE = "adapter-of-both", "adapter-of-one"
CONNECTOR = json.dumps(
    {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
)


def start_vllm(
    vllm: Path, model: Path, adapters: dict[str, Path], port: int, core: int, log: Path
) -> Process:
    """A vLLM worker with NixlConnector and adapters, bound to one core."""
    words = [str(vllm), "serve", str(model), "--served-model-name", MODEL]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    words += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"]
    words += ["--kv-transfer-config", CONNECTOR, "--enable-lora", "--max-loras", "2"]
    words += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    env = {
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_NET_DEVICES": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    return Process(words, log, env)


LOADED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="external'
STORY = chat("Tell me a story about a fox and a crow.", max_tokens=48)


def colocated(router: int, worker: int) -> str:
    """One worker behind the router. Returns a story, as the worker alone tells it."""
    capital = chat("What is the capital of France?", max_tokens=12)
    direct, through = ask(worker, CHAT, capital), ask(router, CHAT, capital)
    check("colocated: the router's answer is the worker's", said(direct[2]) == said(through[2]))
    wrong = chat("x", max_tokens=-3)
    check(
        "colocated: a worker's 400 passes as it is",
        ask(worker, CHAT, wrong) == ask(router, CHAT, wrong) and ask(router, CHAT, wrong)[0] == 400,
    )
    guided = chat("Say yes or no.", structured_outputs={"choice": ["maybe"]}, max_tokens=8)
    check("colocated: fields of vLLM's own reach it", said(ask(router, CHAT, guided)[2]) == "maybe")
    story = text_of(list(stream(router, STORY)))
    check(
        "colocated: a stream has the text of the whole", said(ask(worker, CHAT, STORY)[2]) == story
    )
    return story


def split(router: int, prefill: int, decode: int, story: str) -> None:
    """Prefill and decode apart."""
    before = metric(decode, LOADED)
    check("split: the story is the same", text_of(list(stream(router, STORY))) == story)
    moved = metric(decode, LOADED) - before
    check(f"split: decode loaded {moved:.0f} tokens of KV", moved > 16, moved)
    several = ask(router, CHAT, {**chat("Name a colour.", max_tokens=4), "temperature": 1, "n": 2})
    check(
        "split: two choices are served by one worker", len(json.loads(several[2])["choices"]) == 2
    )
    time.sleep(2.0)
    check(
        "split: no prompt was computed twice",
        metric(router, "tasuki_recomputed_prompts_total") == 0,
    )
    before = metric(decode, LOADED)
    question = "Count to a thousand. " * 8
    status, _, text = ask(router, CHAT, chat(question, max_tokens=8, min_tokens=9))
    found = status == 400 and b"min_tokens" in text
    check("split: what decode refuses is a 400", found, (status, text))
    took = lambda: metric(decode, LOADED) - before > 16  # noqa: E731
    until("decode to take the KV of what it refused", took, 20.0)
    moved = metric(decode, LOADED) - before
    check(f"split: decode took the KV of what it refused, {moved:.0f} tokens", moved > 16)
    status, _, text = ask(router, CHAT, chat(question, max_tokens=CONTEXT + 1))
    check("split: a limit beyond the context is a 400", status == 400, (status, text))
    check("split: and nothing is prefilled for it", metric(decode, LOADED) - before == moved)
    lines = stream(router, chat("Count to a thousand.", max_tokens=1500))
    first = [next(lines) for _ in range(5)]
    check("split: a long answer has begun", any("content" in line for line in first))
    lines.close()  # type: ignore[attr-defined]
    idle = lambda: metric(decode, "vllm:num_requests_running") == 0  # noqa: E731
    until("a hang-up to reach the decode worker", idle, 20.0)
    check("split: a hang-up ends the work", True)


CAPITAL = chat("What is the capital of France?", max_tokens=4)


def of(adapter: str, request: dict[str, Any] = CAPITAL) -> dict[str, Any]:
    """A request for an adapter."""
    return {**request, "model": adapter}


def eight(router: int, request: dict[str, Any]) -> list[tuple[int, str, bytes]]:
    """Answers to a request that is sent eight times at once."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: ask(router, CHAT, request), range(8)))


def adapters(router: int, workers: Sequence[int]) -> None:
    """Two workers behind the router, of which the second one has an adapter alone."""
    served = lambda: [metric(port, "vllm:request_success_total") for port in workers]  # noqa: E731
    direct = [said(ask(workers[1], CHAT, of(name))[2]) for name in (MODEL, BOTH, ONE)]
    check("adapters: their answers are not the base's", len(set(direct)) == 3, direct)
    for name, text in zip((ONE, MODEL), (direct[2], direct[0]), strict=True):
        before = served()
        answers = eight(router, of(name))
        good = all(status == 200 and said(body) == text for status, _, body in answers)
        check(f"adapters: requests for {name} get its answer", good, answers)
        counts = [int(now - then) for now, then in zip(served(), before, strict=True)]
        where = counts == [0, 8] if name == ONE else all(counts) and sum(counts) == 8
        check(f"adapters: by the workers that have it, {counts}", where, counts)


def split_adapters(router: int, decode: int) -> None:
    """The halves of a pair have one adapter both, and the decode worker has another alone."""
    for name, moves in ((BOTH, True), (ONE, False)):
        request = of(name, chat("Name the days of the week, then the months.", max_tokens=4))
        before = metric(decode, LOADED)
        status, _, body = ask(router, CHAT, request)
        moved = metric(decode, LOADED) - before
        check(f"split: {name}: decode loaded {moved:.0f} tokens of KV", (moved > 16) == moves)
        same = status == 200 and said(body) == said(ask(decode, CHAT, request)[2])
        check(f"split: {name}: the answer is the worker's", same, (status, body))


def adapter_deaths(router: int) -> None:
    """The worker that had an adapter alone is dead."""
    until("the router to miss it", lambda: metric(router, "tasuki_worker_up") == 1, 20.0)
    status, _, body = ask(router, CHAT, of(ONE))
    found = status == 503 and b"load the adapter on more workers" in body
    check("death: requests for its adapter are a 503 that says so", found, (status, body))
    answers = [ask(router, CHAT, of(name))[0] for name in (BOTH, MODEL)]
    check("death: those for the base and the other adapter are served", answers == [200, 200])


def deaths(router: int, decode: Process, story: str) -> None:
    """The decode worker dies in the middle of an answer."""
    lines = stream(router, STORY)
    begun = [next(lines) for _ in range(12)]
    decode.kill()
    whole = text_of(begun + list(lines))
    check("death: the answer went on with the other worker", whole == story, (whole, story))
    check("death: which was counted", metric(router, "tasuki_resumed_answers_total") == 1)
    again = ask(router, CHAT, chat("What is the capital of France?", max_tokens=12))
    check("death: the worker that is left serves alone", "Paris" in said(again[2]))


def main() -> None:
    """Starts everything, checks, ends everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="the vllm program")
    parser.add_argument("--router", type=Path, required=True, help="the tasuki-router program")
    parser.add_argument("--model", type=Path, required=True, help="the model's folder")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    print(about(args.vllm.with_name("python"), ("vllm", "torch", "nixl")), flush=True)
    ports = [free_port(), free_port()]
    processes: list[Process] = []
    try:
        of_both = {BOTH: write_adapter(args.logs / BOTH, args.model, seed=1)}
        of_one = {**of_both, ONE: write_adapter(args.logs / ONE, args.model, seed=2)}
        for at, (port, has) in enumerate(zip(ports, (of_both, of_one), strict=True)):
            log = args.logs / f"vllm{at}.log"
            processes.append(start_vllm(args.vllm, args.model, has, port, at, log))
        for port in ports:
            until("vLLM", lambda port=port: ask(port, "/health", wait_s=5)[0] == 200, START_S)
        check("two vLLM workers are up", True)

        def route(workers: list[str], name: str) -> int:
            process, port = start_router(args.router, workers, args.logs / f"{name}.log")
            processes.append(process)
            return port

        story = colocated(route([f"vllm://127.0.0.1:{ports[0]}"], "colocated"), ports[0])
        whole = route([f"vllm://127.0.0.1:{port}" for port in ports], "whole")
        adapters(whole, ports)
        roles = zip(("prefill", "decode"), ports, strict=True)
        router = route([f"vllm://127.0.0.1:{port}?role={role}" for role, port in roles], "split")
        split(router, *ports, story)
        split_adapters(router, ports[1])
        deaths(router, processes[1], story)
        adapter_deaths(whole)
        print("all checks passed")
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
