"""Two revisions that run together: this checkout, and the one that `make test-upgrade` built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.two_revisions import HEAD, Fleet, Revision


def built(variable: str) -> Revision:
    """A revision as `tools/upgrade_suite.sh` says it: NAME=FOLDER."""
    name, _, folder = os.environ.get(variable, "").partition("=")
    if not folder:
        pytest.skip(f"{variable} is not set: `make test-upgrade` builds and names a revision")
    return Revision(name, Path(folder))


@pytest.fixture(scope="session")
def base() -> Revision:
    """What is upgraded from."""
    return built("TASUKI_UPGRADE_BASE")


@pytest.fixture(scope="session")
def first() -> Revision:
    """A revision that speaks version 1 of the wire."""
    return built("TASUKI_UPGRADE_FIRST")


@pytest.fixture(scope="module", params=["upgrade", "rollback"])
def way(request: pytest.FixtureRequest, base: Revision) -> tuple[Revision, Revision]:
    """From which revision to which."""
    return (base, HEAD) if request.param == "upgrade" else (HEAD, base)


@pytest.fixture
def make_fleet(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Fleet]]:
    """Makes empty fleets, which must be idle at the end of the test."""
    made: list[Fleet] = []

    def make() -> Fleet:
        made.append(Fleet(tiny_model, tmp_path_factory.mktemp("fleet")))
        return made[-1]

    try:
        yield make
        for fleet in made:
            fleet.shut_down()
    finally:
        for fleet in made:
            fleet.destroy()
