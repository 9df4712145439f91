"""A fleet becomes another revision under load: no request fails, and none goes on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.chaos import cases
from support.chaos.load import Load
from support.chaos.ties import Ties
from support.two_revisions import HEAD, Fleet, Revision
from support.waiting import until

pytestmark = [pytest.mark.upgrade, pytest.mark.system, pytest.mark.timeout(1800)]

CLIENTS = 12
KINDS = 12
"""Of 15; a run has some hundred requests."""
Way = tuple[Revision, Revision]


@pytest.fixture(scope="module")
def known(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[cases.Case]:
    """Requests of every kind with the answers of one mixed worker of head."""
    fleet = Fleet(tiny_model, tmp_path_factory.mktemp("known"))
    try:
        fleet.add_workers(("mixed", HEAD))
        router = fleet.add_router(HEAD)
        known = asyncio.run(cases.known(router.port, Ties(tiny_model)))
        fleet.shut_down()
        return known
    finally:
        fleet.destroy()


@dataclass
class Watched:
    """What a fleet did under load.

    Attributes:
        legs: of each worker that ended, when it was told to.
    """

    legs: list[int] = field(default_factory=list)


@contextlib.contextmanager
def load_on(fleet: Fleet, known: list[cases.Case]) -> Iterator[Watched]:
    """Asks without a break: every answer must be right, and no request placed again."""
    watched = Watched()
    load = Load(fleet.port, known, CLIENTS, seed=5)
    try:
        until(lambda: len(load.tally.outcomes) > CLIENTS, fleet.logs)
        yield watched
        asked = load.asked + CLIENTS  # some of them after all is done
        until(lambda: len(load.tally.outcomes) > asked, fleet.logs)
    finally:
        tally = load.end(240)
    told = f"{len(tally.outcomes)} requests, {tally.by_manner()}, {watched.legs} legs"
    print(f"{told}, longest {tally.longest().took_s:.1f} s")
    assert not (troubles := tally.troubles()), "\n".join((*troubles[:20], fleet.logs()))
    assert len(tally.kinds()) > KINDS
    replacements = fleet.replacements()
    assert len(replacements) >= sum(each.answered for each in tally.outcomes)
    assert not any(replacements), fleet.logs()
    assert all(watched.legs), "a worker was idle when it was told to end"


@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in-place"])
def test_a_rolling_update_of_all_workers_and_routers(
    way: Way, make_fleet: Callable[[], Fleet], known: list[cases.Case], in_place: bool
) -> None:
    old, new = way
    fleet = make_fleet()
    fleet.add_workers(*[(role, old) for role in ("prefill", "decode") for _ in range(2)])
    for _ in range(2):
        fleet.add_router(old)

    def replace_workers() -> None:
        for worker in list(fleet.workers):
            watched.legs.append(fleet.replace_worker(worker, new, in_place=in_place))

    def replace_routers() -> None:
        for router in list(fleet.routers):
            fleet.add_router(new)
            fleet.end_router(router)

    order = [replace_workers, replace_routers]  # no router is newer than a worker
    with load_on(fleet, known) as watched:
        for replace in order if new == HEAD else reversed(order):
            replace()
    assert {each.revision for each in (*fleet.workers, *fleet.routers)} == {new}


def test_pools_of_both_revisions_grow_and_shrink(
    way: Way, make_fleet: Callable[[], Fleet], known: list[cases.Case]
) -> None:
    """1 -> 3 -> 1 of each role: two of the other revision come, and one of them stays."""
    old, new = way
    fleet = make_fleet()
    fleet.add_workers(("prefill", old), ("decode", old))
    fleet.add_router(old)
    with load_on(fleet, known) as watched:
        for role in ("prefill", "decode"):
            fleet.add_workers((role, new), (role, new))
        for router in fleet.routers:
            fleet.wait_known(router, fleet.workers)
        for role in ("prefill", "decode"):
            for worker in [each for each in fleet.workers if each.role == role][:2]:
                watched.legs.append(fleet.end_worker(worker))
    assert [each.revision for each in fleet.workers] == [new, new]
