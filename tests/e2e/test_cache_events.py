"""A conversation's next turn goes where its KV is, whichever router served the last one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.client import Answer, Client
from support.deployment import MODEL_NAME, Deployment, Options
from support.metrics import Metrics
from support.processes import Process
from support.waiting import until

MEMORY = ("--kv-memory", "64000000", "--max-model-len", "2048")
CHUNK_TOKENS = 128
TURN_TOKENS = 3 * CHUNK_TOKENS
ANSWER_TOKENS = 3 * CHUNK_TOKENS
# The last token's KV is not there.
STORED_CHUNKS = (TURN_TOKENS + ANSWER_TOKENS - 1) // CHUNK_TOKENS


def metrics(client: Client) -> Metrics:
    return Metrics(client.http.get("/metrics").text)


def known_chunks(client: Client, worker: str) -> float:
    """Chunks that a router takes a worker to hold."""
    return metrics(client).sum("tasuki_worker_prefix_chunks", worker=worker)


def are_idle(client: Client) -> bool:
    """Whether all workers have nothing to do, as far as a router knows."""
    known = metrics(client)
    return not any(known.sum(f"tasuki_worker_{what}") for what in ("waiting", "running"))


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 200) for _ in range(TURN_TOKENS)]


def placed(answer: Answer) -> tuple[str, str]:
    assert answer.timings is not None
    return answer.timings["prefill_worker"], answer.timings["decode_worker"]


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def teach(client: Client) -> None:
    """Lets a router learn what prompts cost, by lengths that differ.

    By one length alone, or where a chunk of few tokens took as long by chance, a prompt's tokens
    may count as free, and then nothing is saved where they are cached. So nothing of them is.
    """
    for token, tokens in enumerate((100, 1600, 8, 700, 400, 8, 1200, 8), start=5):
        answer = client.complete([token] * tokens, max_tokens=2)
        assert cached(answer) == 0


@contextmanager
def other_router(system: Deployment, directory: Path) -> Iterator[Client]:
    """Another router before the same workers, with no more preference for roles than usual."""
    arguments = ["router", "--host", "127.0.0.1", "--port", "0", "--readiness-grace-s", "0"]
    arguments += ["--model", str(system.options.model), "--served-model-name", MODEL_NAME]
    for worker in system.workers.values():
        arguments += ["--worker", f"127.0.0.1:{worker.port}"]
    process = Process("other", arguments, directory / "other.log")
    process.start()
    try:
        client = Client(process.wait_for_line("listening on ", deadline_s=60.0), MODEL_NAME)
        workers = len(system.workers)
        until(
            lambda: len(metrics(client).find("tasuki_worker_prefix_chunks")) == workers,
            "all workers",
        )
        yield client
        client.close()
    finally:
        process.kill()


def converse(first: Client, second: Client, seed: int, holder: int) -> tuple[Answer, Answer]:
    """A turn by each of two routers; the second when it knows that the turn's worker has it all.

    Args:
        first: Serves the first turn.
        second: Serves the second one.
        seed: Of the prompt.
        holder: Which worker of the first turn's placement is to have it all.
    """
    workers = ("0", "1")
    before = {worker: known_chunks(second, worker) for worker in workers}
    prompt = prompt_of(seed)
    answer = first.complete(prompt, max_tokens=ANSWER_TOKENS)
    place = placed(answer)[holder]
    until(lambda: known_chunks(second, place) >= before[place] + STORED_CHUNKS, "its chunks")
    until(lambda: are_idle(second), "a report of idle workers")
    following = [*prompt, *answer.tokens, 7, 8, 9]
    return answer, second.complete(following, max_tokens=2)


def test_another_routers_conversation_goes_where_its_kv_is(
    tiny_model: Path, deploy: Callable[[Options], Deployment], tmp_path: Path
) -> None:
    system = deploy(Options(tiny_model, mixed=2, worker=MEMORY))
    places: set[str] = set()
    with other_router(system, tmp_path) as other:
        teach(other)
        for seed in range(30):
            if len(places) == 2 and seed > 2:
                break
            first, second = converse(system.http, other, seed, holder=1)
            (place, _) = placed(first)
            places.add(place)
            assert placed(second) == (place, place)
            assert cached(second) >= STORED_CHUNKS * CHUNK_TOKENS
    assert len(places) == 2, "both workers have conversations"


def test_a_conversations_next_turn_goes_whole_to_the_decode_worker_that_holds_it(
    tiny_model: Path, deploy: Callable[[Options], Deployment], tmp_path: Path
) -> None:
    system = deploy(Options(tiny_model, prefill=1, decode=1, worker=MEMORY))
    with other_router(system, tmp_path) as other:
        teach(other)
        for seed in range(3):
            first, second = converse(system.http, other, seed, holder=1)
            assert placed(first) == ("0", "1"), "the deployment's roles bind"
            assert placed(second) == ("1", "1")
            assert cached(second) >= STORED_CHUNKS * CHUNK_TOKENS


def test_flushed_caches_are_empty_and_every_router_knows(
    tiny_model: Path, deploy: Callable[[Options], Deployment], tmp_path: Path
) -> None:
    system = deploy(Options(tiny_model, prefill=1, decode=1, worker=MEMORY))
    workers = ("0", "1")
    with other_router(system, tmp_path) as other:
        system.http.complete(prompt_of(0), max_tokens=2)
        until(lambda: all(known_chunks(other, w) for w in workers), "both hold the prompt")
        assert cached(system.http.complete(prompt_of(0), max_tokens=2)) > 0
        flushed = system.http.http.post("/flush_cache")
        assert (flushed.status_code, flushed.text) == (200, "Cache flushed.\n")
        assert cached(system.http.complete(prompt_of(0), max_tokens=2)) == 0
        until(lambda: all(known_chunks(other, w) for w in workers), "the prompt again")
        system.http.http.post("/flush_cache")
        until(lambda: not any(known_chunks(other, w) for w in workers), "no chunk is known")


def test_a_router_that_comes_later_knows_what_is_cached(
    tiny_model: Path, deploy: Callable[[Options], Deployment], tmp_path: Path
) -> None:
    system = deploy(Options(tiny_model, mixed=2, worker=MEMORY))
    answers = [system.http.complete(prompt_of(seed), max_tokens=2) for seed in range(6)]
    with other_router(system, tmp_path) as other:
        chunks = dict.fromkeys(("0", "1"), 0)
        for answer in answers:
            chunks[placed(answer)[0]] += TURN_TOKENS // CHUNK_TOKENS
        until(lambda: all(known_chunks(other, w) == chunks[w] for w in chunks), f"{chunks}")
        teach(other)
        for seed, answer in enumerate(answers):
            until(lambda: are_idle(other), "a report of idle workers")
            again = other.complete([*prompt_of(seed), 7, 8, 9], max_tokens=2)
            assert set(placed(again)) <= set(placed(answer))
            assert cached(again) == TURN_TOKENS
