"""The message that Kubernetes shows for a container that ended (`kubectl describe pod`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tasuki.preflight.result import Check, as_line

DEFAULT = Path("/dev/termination-log")
_MOST_BYTES = 4096  # Kubernetes shows no more


def tell(checks: Sequence[Check], path: Path = DEFAULT) -> None:
    """Write what failed, one line each, where the file exists or was asked for."""
    if path == DEFAULT and not path.exists():
        return
    text = "\n".join(as_line(check) for check in checks).encode()
    with contextlib.suppress(OSError):  # the log has it too
        path.write_bytes(text[:_MOST_BYTES])
