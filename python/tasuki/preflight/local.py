"""The checks of one machine: those that take no time, in the order of a start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasuki.kv.rdma_devices import SYSFS, rdma_devices
from tasuki.preflight import gpus, limits, model_folder, network
from tasuki.preflight.environment import log_levels, transports
from tasuki.preflight.result import Check


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked.

    Attributes:
        host: Address that a worker binds.
        port: Of a worker; 0: any.
        model: Its folder; None: not checked.
        weights: Whether the folder's weights are read.
        hashes: Whether their contents are compared with hashes that came with them.
        device: As in `WorkerConfig`.
        own_gpus: PCI addresses of the GPUs that a worker uses; empty: all of the machine count.
        ranks: Of the worker.
        require: What its transfers must use; empty: anything.
        sysfs: Where the kernel describes devices.
        shared_memory: Where /dev/shm is.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: Path | None = None
    weights: bool = True
    hashes: bool = False
    device: str = "auto"
    own_gpus: Sequence[str] = ()
    ranks: int = 1
    require: str = ""
    sysfs: Path = SYSFS
    shared_memory: Path = Path("/dev/shm")


def local_checks(subject: Subject, slow: bool = True) -> list[Check]:
    """Check this machine; reads files and asks the kernel and the driver.

    Args:
        subject: What is checked.
        slow: Also what takes time, or says little about a start: hashes, clock, interfaces.
    """
    on_cpu = subject.device == "cpu"
    there = gpus.Gpus() if on_cpu else gpus.look().only(subject.own_gpus)
    own = dict(os.environ)
    has_rdma = bool(rdma_devices(subject.sysfs))
    checks = [] if on_cpu else gpus.gpu_checks(there, subject.device.startswith("cuda"))
    checks += [
        limits.memlock(has_rdma),
        limits.open_files(),
        limits.shared_memory(subject.ranks, subject.shared_memory),
        log_levels(own),
        *network.own_address(subject.host, own),
    ]
    if slow:
        checks += [limits.clock(), transports(), *network.interfaces()]
    checks += network.rdma_checks(there.gpus, subject.require == "rdma", subject.sysfs)
    if subject.port:
        checks.append(network.port_free(subject.host, subject.port))
    if subject.model is not None:
        checks += model_folder.model_checks(
            subject.model, subject.weights, slow, slow and subject.hashes
        )
    return checks
