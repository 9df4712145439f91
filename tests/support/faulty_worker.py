"""A worker with a fault that a test can switch on.

    python -m support.faulty_worker FAULT SWITCH ARGUMENTS

FAULT says which part fails once the file SWITCH exists; ARGUMENTS are those of
`tasuki`. Everything else of the worker is real. The first time that the fault acts,
the worker prints FAULT_LINE.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import tasuki.worker.build as build
from tasuki.engine.engine import Engine
from tasuki.engine.plan import StepPlan
from tasuki.execution.runner import Launched, ModelRunner
from tasuki.kv.link import DialledLink
from tasuki.kv.puller import Puller

FAULT_LINE = "the fault acts: "


class Fault:
    """Acts while the switch is there."""

    def __init__(self, name: str, switch: Path) -> None:
        self.name = name
        self.switch = switch
        self._told = False

    def acts(self) -> bool:
        if not self.switch.exists():
            return False
        if not self._told:
            self._told = True
            print(f"{FAULT_LINE}{self.name}", flush=True)
        return True


HANG_TOKENS = 5  # so many tokens of an answer are there when a step of it hangs


def _hangs(fault: Fault, plan: StepPlan) -> bool:
    return any(row.sequence.num_outputs >= HANG_TOKENS for row in plan.rows) and fault.acts()


class HangingCall(ModelRunner):
    """A step in mid-answer never returns."""

    fault: Fault

    def launch(self, plan: StepPlan) -> Launched:
        if _hangs(self.fault, plan):
            threading.Event().wait()
        return super().launch(plan)


class HangingDevice(ModelRunner):
    """A step in mid-answer is launched and never over."""

    fault: Fault
    _hung = False

    def launch(self, plan: StepPlan) -> Launched:
        self._hung = self._hung or _hangs(self.fault, plan)
        return super().launch(plan)

    def landed(self, launched: Launched) -> bool:
        return not self._hung and super().landed(launched)


class PacedSteps(ModelRunner):
    """Every step begins as many seconds later as the switch says, while it is there."""

    fault: Fault

    def launch(self, plan: StepPlan) -> Launched:
        with contextlib.suppress(FileNotFoundError, ValueError):
            end_s = time.monotonic() + float(self.fault.switch.read_text())
            while self.fault.switch.exists() and time.monotonic() < end_s:
                time.sleep(0.002)
        return super().launch(plan)


class BrokenWeights(ModelRunner):
    """Logits that are not numbers, whatever is asked."""

    fault: Fault

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        forward = model.forward

        def broken(*inputs: Any) -> Any:
            logits = forward(*inputs)
            return logits * float("nan") if self.fault.acts() else logits

        model.forward = broken
        super().__init__(model, *args, **options)


def raise_in(owner: type[Any], method: str, fault: Fault) -> None:
    """A defect in a method."""
    original = getattr(owner, method)

    def broken(*args: Any) -> Any:
        if fault.acts():
            raise RuntimeError(f"a defect in {method}")
        return original(*args)

    setattr(owner, method, broken)


LEAKED_BYTES = 2048


def leak_in(owner: type[Any], method: str, fault: Fault) -> None:
    """Every call keeps `LEAKED_BYTES` for ever."""
    original = getattr(owner, method)
    kept: list[bytes] = []

    def leaking(*args: Any) -> Any:
        if fault.acts():
            kept.append(os.urandom(LEAKED_BYTES))
        return original(*args)

    setattr(owner, method, leaking)


def hide_ends(fault: Fault) -> None:
    """Transfers under way do not end, as far as the worker can tell."""
    poll = Puller._poll

    def blind(puller: Puller) -> bool:
        hangs = any(peer.inflight for peer in puller._peers.values()) and fault.acts()
        return False if hangs else poll(puller)

    Puller._poll = blind  # type: ignore[method-assign]


def install(fault: Fault) -> None:
    """Build the fault into the worker that this process becomes.

    Raises:
        ValueError: There is no such fault.
    """
    runners: dict[str, type[Any]] = {
        "call": HangingCall,
        "device": HangingDevice,
        "pace": PacedSteps,
        "weights": BrokenWeights,
    }
    if fault.name in runners:
        runner = runners[fault.name]
        runner.fault = fault
        build.ModelRunner = runner  # type: ignore[misc]
    elif fault.name == "transfer-thread":
        raise_in(Puller, "_enqueue", fault)
    elif fault.name == "pull":
        hide_ends(fault)
    elif fault.name == "stream-task":
        raise_in(DialledLink, "_talk", fault)
    elif fault.name == "leak":
        leak_in(Engine, "submit", fault)
    else:
        raise ValueError(f"no fault {fault.name!r}")
    if fault.name == "device":
        original = build._engine_config
        build._engine_config = lambda *args: replace(original(*args), overlap=True)


def main() -> None:
    _, name, switch, *arguments = sys.argv
    install(Fault(name, Path(switch)))
    sys.argv = ["tasuki", *arguments]
    from tasuki.cli import main as tasuki

    tasuki()


if __name__ == "__main__":
    main()
