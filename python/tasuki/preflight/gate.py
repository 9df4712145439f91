"""Before a worker starts: check the machine, say what is wrong, and end the start if told to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tasuki.preflight import termination
from tasuki.preflight.local import Subject, local_checks
from tasuki.preflight.result import Check, PreflightError, as_line, failures

log = logging.getLogger(__name__)


def gate(
    subject: Subject,
    strict: bool,
    hold: Callable[[list[Check]], None] | None = None,
    termination_log: Path = termination.DEFAULT,
) -> None:
    """Check, and log what is not well.

    Args:
        subject: What is checked.
        strict: Whether a failure ends the start.
        hold: Called with all checks before anything else happens; returns when the start may
            go on.
        termination_log: Gets the failures that end the start.

    Raises:
        PreflightError: There are failures, and they end the start.
    """
    begun_s = time.monotonic()
    checks = local_checks(subject, slow=False)
    took_ms = 1e3 * (time.monotonic() - begun_s)
    for check in checks:
        if check.status != "ok":
            log.warning("preflight: %s: %s", check.status, as_line(check))
    failed = failures(checks)
    log.info("preflight: %d checks, %d failed, %.0f ms", len(checks), len(failed), took_ms)
    if hold is not None:
        hold(checks)
    if failed and strict:
        termination.tell(failed, termination_log)
        more = f" (and {len(failed) - 1} more, see the log)" if len(failed) > 1 else ""
        raise PreflightError(f"preflight{more}: {as_line(failed[0])}")
