"""Engines with and without steps that overlap: what is true of one is true of both."""

from __future__ import annotations

import engine_fakes
import pytest

_BOTH = ("test_engine", "test_engine_random", "test_grammar_engine", "test_isolation", "test_legs")


@pytest.fixture(autouse=True)
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether engines made in this test overlap their steps."""
    value: bool = getattr(request, "param", False)
    monkeypatch.setattr(engine_fakes, "overlap", value)
    return value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in _BOTH:
        both = [pytest.param(False, id="in-turn"), pytest.param(True, id="overlapped")]
        metafunc.parametrize("overlap", both, indirect=True)
