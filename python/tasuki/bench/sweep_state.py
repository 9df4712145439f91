"""`sweep.json`: the plan and how far it got; what an interrupted sweep resumes from.

A point counts as done when the file says so with the point's fingerprint and
its result is there. Written whole after every point.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.header import SCHEMA, header, own_command, read_result, write_result
from tasuki.bench.plan import Goal, Plan, Point

FILE = "sweep.json"
PENDING, DONE, FAILED = "pending", "done", "failed"


@dataclass(slots=True)
class PointState:
    """How one point stands.

    Attributes:
        fingerprint: Of what was, or is to be, measured.
        state: `pending`, `done` or `failed`.
        reason: Why it failed.
        took_s: How long it ran.
    """

    fingerprint: str
    state: str = PENDING
    reason: str | None = None
    took_s: float | None = None


class SweepState:
    """The states of a plan's points, in a folder.

    Attributes:
        folder: Of the sweep.
        points: By key, in the order of the plan.
    """

    def __init__(self, plan: Plan, folder: Path, fresh: bool = False) -> None:
        """Take over what the folder holds of this very plan.

        Args:
            plan: What is to be measured.
            folder: Made when something is written.
            fresh: Forget what was measured.

        Raises:
            BenchError: The folder holds results that this plan would not give.
        """
        self._plan = plan
        self.folder = folder
        self.points = {p.key: PointState(plan.fingerprint(p)) for p in plan.all_points()}
        before = _read(folder / FILE)
        if fresh:
            paths = [_result_path(folder, key) for key in before]
            for path in paths:
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise BenchError(
                        f"{folder / FILE} has a point whose result is {path}, outside its folder: "
                        "choose another --output, or remove the file"
                    )
            for path in paths:
                path.unlink(missing_ok=True)
            return
        for key, old in before.items():
            now = self.points.get(key)
            if old.state == DONE and (now is None or now.fingerprint != old.fingerprint):
                what = "is not in this plan" if now is None else "was measured with other settings"
                raise BenchError(
                    f"{folder} holds another sweep: {key} {what}; "
                    "choose another --output, or --fresh to measure all anew"
                )
        for point in plan.all_points():
            known = before.get(point.key)
            if known is not None and self._is_done(point, known):
                self.points[point.key] = known

    def path(self, point: Point) -> Path:
        """Of the point's result."""
        return _result_path(self.folder, point.key)

    def is_done(self, point: Point) -> bool:
        """Whether there is nothing to do for the point."""
        return self.points[point.key].state == DONE

    def finish(self, point: Point, took_s: float, reason: str | None = None) -> None:
        """The point was measured, or failed for `reason`; kept at once."""
        state = self.points[point.key]
        state.state = DONE if reason is None else FAILED
        state.reason, state.took_s = reason, round(took_s, 1)
        self.save()

    def save(self) -> None:
        """Write `sweep.json`."""
        command, model = own_command(), self._plan.model
        content = header("sweep", command=command, label="", topology=None, model=model)
        content["plan"] = self._plan.describe()
        content["points"] = {key: asdict(state) for key, state in self.points.items()}
        write_result(self.folder / FILE, content)

    def _is_done(self, point: Point, known: PointState) -> bool:
        if known.state != DONE:
            return False
        try:
            read_result(self.path(point), "goodput" if isinstance(point.work, Goal) else "serve")
        except RunFailedError:
            return False
        return True


def _result_path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _read(file: Path) -> dict[str, PointState]:
    if not file.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        points = {key: PointState(**state) for key, state in content["points"].items()}
        if content["schema"] != SCHEMA:
            raise BenchError(
                f"{file} is of {content['schema']!r}, this version reads {SCHEMA!r}: choose another"
                " --output, or remove it"
            )
        return points
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(
            f"{file} cannot be read ({reason}): choose another --output, or remove it"
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{file} is no sweep's: choose another --output, or remove it") from error
