"""Workers and routers of two revisions: every mixture gives the answers of one revision alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chaos import cases
from support.chaos.load import Load
from support.chaos.ties import Ties
from support.client import Client
from support.deployment import MODEL_NAME
from support.two_revisions import HEAD, Fleet, Member, Revision
from support.waiting import until
from support.workload import known_requests

pytestmark = [pytest.mark.upgrade, pytest.mark.system, pytest.mark.timeout(900)]

ASKED = 120
KINDS = 12
"""Of 15, in so few requests."""
BLOCK = 16
LENGTHS = (3, 16, 40, 333, 1800)
MIXTURES = [
    (router, prefill, decode)
    for router in ("base", "head")
    for prefill in ("base", "head")
    for decode in ("base", "head")
    if len({router, prefill, decode}) > 1
]


@pytest.fixture(scope="module")
def fleet(
    tiny_model: Path, base: Revision, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A prefill and a decode worker of each revision; routers are the tests' own."""
    made = Fleet(tiny_model, tmp_path_factory.mktemp("fleet"))
    try:
        made.add_workers(
            *((role, each) for role in ("prefill", "decode") for each in (base, HEAD)),
            ("mixed", HEAD),
        )
        yield made
        made.add_router(HEAD)
        made.shut_down()
    finally:
        made.destroy()


@pytest.fixture(scope="module")
def known(fleet: Fleet, tiny_model: Path) -> list[cases.Case]:
    """Requests of every kind with the answers of a mixed worker of head, where no KV moves."""
    router = fleet.add_router(HEAD, [fleet.workers[-1]])
    known = asyncio.run(cases.known(router.port, Ties(tiny_model)))
    fleet.end_router(router)
    return known


@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
def test_a_mixture_answers_as_one_revision_does(
    fleet: Fleet, base: Revision, known: list[cases.Case], mixture: tuple[str, str, str]
) -> None:
    revisions = {"base": base, "head": HEAD}
    of_router, *of_halves = (revisions[name] for name in mixture)
    pair = [
        next(w for w in fleet.workers if (w.role, w.revision) == half)
        for half in zip(("prefill", "decode"), of_halves, strict=True)
    ]
    router = fleet.add_router(of_router, pair)
    try:
        check_handoffs(fleet, router)
        check_load(fleet, known, router)
        assert not any(each.value for each in fleet.metrics(router).find("tasuki_retries_total"))
    finally:
        fleet.end_router(router)


def check_handoffs(fleet: Fleet, router: Member) -> None:
    """Answers are those of `transformers`, and the KV of every prompt is read once."""

    def pulled() -> float:
        return fleet.metrics(router).sum("tasuki_worker_kv_pulled_blocks_total")

    seed = router.port  # whose prompts nobody has in a cache
    client = Client(f"http://{router.address}", MODEL_NAME)
    for each in known_requests(fleet.model, 5, prompt_lengths=LENGTHS, steps=40, seed=seed):
        before, blocks = pulled(), -(-len(each.prompt_tokens) // BLOCK)
        answer = client.complete(each.prompt_tokens, max_tokens=40)
        assert answer.tokens == each.tokens, each.name
        assert answer.timings is not None
        assert answer.timings["prefill_worker"] != answer.timings["decode_worker"]
        until(lambda: pulled() >= before + blocks, fleet.logs)  # noqa: B023
        assert pulled() == before + blocks
    client.close()


def check_load(fleet: Fleet, known: list[cases.Case], *routers: Member) -> None:
    """Requests of every kind to all routers at once."""
    loads = [Load(router.port, known, 6, seed=at) for at, router in enumerate(routers)]
    until(
        lambda: min(len(load.tally.outcomes) for load in loads) >= ASKED,
        fleet.logs,
        deadline_s=240,
    )
    for router, load in zip(routers, loads, strict=True):
        tally = load.end(120)
        print(f"{router.name}: {len(tally.outcomes)} requests, {tally.by_manner()}")
        assert not (troubles := tally.troubles()), "\n".join((*troubles[:20], fleet.logs()))
        assert len(tally.kinds()) > KINDS


def test_routers_of_two_revisions_serve_with_the_same_workers(
    fleet: Fleet, base: Revision, known: list[cases.Case]
) -> None:
    routers = [fleet.add_router(each) for each in (base, HEAD)]
    check_load(fleet, known, *routers)
    for router in routers:
        fleet.end_router(router)
