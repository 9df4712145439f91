"""What the fault tests share: requests whose right answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pace import Pace
from support.reference import Reference
from support.workload import known_requests

IN_FLIGHT = 16
STEPS = 300


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Pace:
    """Slows the workers of deployments that are started with it."""
    return Pace(tmp_path_factory.mktemp("pace"))


@pytest.fixture(scope="session")
def sixteen(tiny_model: Path) -> list[Reference]:
    """Prompts of one block to forty, 300 output tokens each."""
    lengths = (16, 40, 150, 333, 640)
    return known_requests(tiny_model, IN_FLIGHT, prompt_lengths=lengths, steps=STEPS)


@pytest.fixture(scope="session")
def short_ones(tiny_model: Path) -> list[Reference]:
    """As many of few tokens, where what is disturbed comes early."""
    return known_requests(tiny_model, IN_FLIGHT, prompt_lengths=(16, 40, 90), steps=24)
