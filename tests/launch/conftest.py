"""What several tests of the launcher share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.launch.backoff import BackoffPolicy
from tasuki.launch.supervisor import Supervisor


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Starts processes that have ended soon again; all end with the test."""
    logs = tmp_path / "logs"
    logs.mkdir()
    made = Supervisor(logs, echo=False, policy=BackoffPolicy(first_s=0.05))
    yield made
    made.stop(made.names(), grace_s=0.0)
