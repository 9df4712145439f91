"""Preflight of one worker: what its settings make of the checks."""

from __future__ import annotations

from tasuki.preflight import termination
from tasuki.preflight.gate import gate
from tasuki.preflight.local import Subject
from tasuki.preflight.result import Check
from tasuki.worker.config import WorkerConfig


def check_first(config: WorkerConfig) -> None:
    """Check the machine as the settings say, and hold the worker if they say so.

    Raises:
        PreflightError: The machine is not fit, and `preflight` is `strict`.
    """

    def pause(checks: list[Check]) -> None:
        from tasuki.preflight.pause import hold  # an HTTP server, which few starts need

        hold(checks, config.pause_host, config.pause_port)

    if config.preflight == "off":
        if config.pause:
            pause([])
        return
    subject = Subject(
        host=config.host,
        port=config.port,
        model=config.model,
        weights=config.load_format != "dummy",
        device=config.device,
        ranks=config.tensor_parallel,
        require=config.require_transport,
    )
    gate(
        subject,
        strict=config.preflight == "strict",
        hold=pause if config.pause else None,
        termination_log=config.termination_log or termination.DEFAULT,
    )
