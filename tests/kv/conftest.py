"""What several tests of the handoff share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from handoff_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Engines of this process that hand requests over."""
    from handoff_rig import Rig  # the engine and torch: not for tests without a rig

    rig = Rig()
    yield rig
    rig.close()
