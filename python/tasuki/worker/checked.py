"""Preflight of one worker: what its settings make of the checks."""

from __future__ import annotations

from tasuki.nvidia_driver import pci_address
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
        own_gpus=_own_gpus(config),
        ranks=config.tensor_parallel,
        require=config.require_transport,
    )
    gate(
        subject,
        strict=config.preflight == "strict",
        hold=pause if config.pause else None,
        termination_log=config.termination_log or termination.DEFAULT,
    )


def _own_gpus(config: WorkerConfig) -> list[str]:
    """PCI addresses of the GPUs of this host's ranks; empty: the driver tells none."""
    if config.device == "cpu":
        return []
    first = int(config.device.partition(":")[2] or 0)
    addresses = [pci_address(first + index) for index in range(config.ranks_here)]
    return addresses if all(addresses) else []
