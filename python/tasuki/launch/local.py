"""Workers on this machine: its GPUs, memory and cores divided among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from tasuki.launch import topology
from tasuki.launch.config import ServeConfig
from tasuki.launch.engine import Member, Wait
from tasuki.launch.forking import ForkServer, Process
from tasuki.launch.gpus import VISIBLE, is_on_gpus
from tasuki.launch.machine import look_at_machine
from tasuki.launch.settle import settle_dtype
from tasuki.launch.supervisor import say
from tasuki.nvidia_driver import driver_problem
from tasuki.worker.memory import available_bytes


class LocalEngine:
    """`Engine` of one machine. Must be made by the main thread: see `ForkServer`."""

    def __init__(self, config: ServeConfig) -> None:
        """Look at the machine, and have workers' modules imported meanwhile."""
        self._config = config
        self._machine = look_at_machine()
        if config.worker.device == "auto" and (problem := driver_problem()):
            say(f"using the CPU: {problem}")
        self._environment = topology.worker_environment(config, self._machine)
        self._gpus: dict[str, tuple[str, ...]] = {}  # of each worker, as far as there are any
        preload = topology.preload(is_on_gpus(config.worker.device, self._machine.gpus))
        self._forks = ForkServer(preload, self._environment)

    def settle_dtype(self, model: Path) -> str:
        """See `Engine`."""
        config = self._config
        if is_on_gpus(config.worker.device, self._machine.gpus) and config.worker.dtype == "auto":
            return "bfloat16"  # what GPUs are made for: nothing to measure
        dtype, reason = settle_dtype(
            model,
            config.worker.dtype,
            self._environment,
            on_measure=lambda: say("measuring dtypes …"),
        )
        say(f"dtype {reason}")
        return dtype

    def place(
        self, model: Path, dtype: str, members: Sequence[Member] | None, wait: Wait
    ) -> tuple[topology.ProcessSpec, ...]:
        """See `Engine`; it never waits."""
        del wait
        machine = self._machine
        if members is None:
            if topology.stages_in_host(self._config, machine):
                say("these GPUs cannot read one another: --transport host-staged")
        else:
            machine = replace(machine, free_bytes=available_bytes())
        taken = [gpu for gpus in self._gpus.values() for gpu in gpus]
        specs = topology.worker_specs(self._config, model, dtype, machine, members, taken)
        for spec in specs:
            self._gpus[spec.name] = tuple(dict(spec.assigned).get(VISIBLE, "").split(","))
        return specs

    def start(self, spec: topology.ProcessSpec, output: int) -> Process:
        """See `Engine`."""
        return self._forks.start(spec, output)

    def release(self, names: Collection[str]) -> None:
        """See `Engine`."""
        for name in names:
            self._gpus.pop(name, None)

    def interrupt(self) -> None:
        """See `Engine`."""
        self._forks.close()

    def close(self) -> None:
        """See `Engine`."""
        self._forks.close()
