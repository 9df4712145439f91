"""Runs a plan: each target started, warmed, measured point by point, stopped.

What fails is one point's business: it is noted with its reason and the sweep
goes on, with a fresh deployment if that was what broke. Ctrl-C leaves the point
under way pending. Main thread only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tasuki.bench.errors import BenchError, NothingAnsweredError, RunFailedError
from tasuki.bench.goodput_run import Found, search_goodput
from tasuki.bench.header import write_result
from tasuki.bench.load import LoadRun
from tasuki.bench.plan import HOW_MUCH, WARMUP_SEED, Goal, Plan, Point
from tasuki.bench.sweep_state import SweepState
from tasuki.bench.sweep_table import one_line
from tasuki.bench.topologies import Target


class Deployment(Protocol):
    """What serves a target; `serving.Serving` is the real one."""

    url: str
    model: str

    def ended(self) -> str | None:
        """Why it serves no more; None while it runs."""

    def stop(self) -> None:
        """End it."""


Deploy = Callable[[Target, Path], Deployment]
"""Starts a target, its output to a log; raises `RunFailedError`."""

Measure = Callable[[LoadRun], Mapping[str, Any]]
"""Runs a load and writes its result; raises `RunFailedError`."""


class _Session:
    """A target's deployment: started when it is needed, and again when it ended by itself."""

    def __init__(self, start: Callable[[Point], Deployment]) -> None:
        self._start = start
        self._deployment: Deployment | None = None
        self._broken: str | None = None

    def deployment(self, first: Point) -> Deployment:
        """What serves now; `first` is what it will be loaded with.

        Raises:
            RunFailedError: It does not come up, now or at an earlier point.
        """
        if self._broken is not None:
            raise RunFailedError(self._broken)
        if self._deployment is None or self._deployment.ended() is not None:
            self.close()
            try:
                self._deployment = self._start(first)
            except RunFailedError as error:
                self._broken = str(error)  # the next points need not try again
                raise
        return self._deployment

    def why_ended(self) -> str | None:
        """Why the deployment serves no more, if it does not."""
        return None if self._deployment is None else self._deployment.ended()

    def close(self) -> None:
        """Stop what serves."""
        if self._deployment is not None:
            self._deployment.stop()
        self._deployment = None


class Sweep:
    """One pass over a plan.

    Args:
        plan: What to do.
        state: What is done; kept up to date in its folder.
        deploy: Starts a target.
        measure: Runs a load.
        say: Gets one line of news at a time.
        gpus: Of the machine, or of the Ray cluster.
    """

    def __init__(
        self,
        plan: Plan,
        state: SweepState,
        deploy: Deploy,
        measure: Measure,
        say: Callable[[str], None],
        gpus: int = 0,
    ) -> None:
        self._plan = plan
        self._state = state
        self._deploy = deploy
        self._measure = measure
        self._say = say
        self._gpus = gpus
        self._total = len(plan.all_points())
        self._number = 0

    def run(self) -> int:
        """Measure what is not done yet.

        Returns:
            How many points failed.
        """
        self._state.save()
        failed = 0
        for target in self._plan.targets:
            failed += self._run_target(target)
        return failed

    def _run_target(self, target: Target) -> int:
        failed = 0
        with closing(_Session(lambda first: self._start(target, first))) as session:
            for point in self._plan.points(target):
                self._number += 1
                if self._state.is_done(point):
                    self._news(point, "done before")
                    continue
                begun_s = time.monotonic()
                try:
                    deployment = session.deployment(point)
                    begun_s = time.monotonic()
                    news, reason = self._run_point(point, deployment), None
                except (BenchError, OSError) as error:
                    reason = session.why_ended() or str(error)
                    news = f"FAILED: {reason}"
                    failed += 1
                self._state.finish(point, time.monotonic() - begun_s, reason)
                self._news(point, news)
        return failed

    def _start(self, target: Target, first: Point) -> Deployment:
        self._say(f"{target.name}: starting {target.topology}")
        deployment = self._deploy(target, self._log(target, "serve"))
        try:
            if self._plan.warmup_requests:
                self._warm(target, first, deployment)
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def _warm(self, target: Target, first: Point, deployment: Deployment) -> None:
        """Requests of the first load's kind, all at once; their result is thrown away."""
        options = {
            **{name: value for name, value in first.work.options.items() if name not in HOW_MUCH},
            "num-requests": self._plan.warmup_requests * target.topology.workers,
            "seed": WARMUP_SEED,
        }
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "warmup.json")
            run = self._load_run(first, deployment, options, result)
            self._measure(replace(run, log=self._log(target, "warmup")))

    def _run_point(self, point: Point, deployment: Deployment) -> str:
        path = self._state.path(point)
        if isinstance(point.work, Goal):

            def probe(options: Mapping[str, Any]) -> Mapping[str, Any]:
                with tempfile.TemporaryDirectory() as folder:
                    result = Path(folder, "probe.json")
                    try:
                        run = self._load_run(point, deployment, options, result)
                        return self._served(run, deployment)
                    except NothingAnsweredError as error:
                        if deployment.ended() is not None:
                            raise
                        return error.result  # the rate is too high

            def write(found: Found) -> None:
                write_result(path, found.result(self._describe(point.target), deployment.model))

            def keep(found: Found) -> None:
                try:
                    write(found)
                except BenchError as error:  # the search has failed for another reason
                    self._say(f"  {point.key}: {error}")

            found = search_goodput(point, probe, self._say, self._plan.timeout_s, keep)
            try:
                write(found)
            except BenchError as error:
                raise BenchError(f"{error}; it was {found.one_line()}") from error
            return found.one_line()
        run = self._load_run(point, deployment, point.work.options, path)
        return one_line(self._served(run, deployment))

    def _served(self, run: LoadRun, deployment: Deployment) -> Mapping[str, Any]:
        """Measure; a deployment that ended meanwhile has not served the load."""
        result = self._measure(run)
        if (reason := deployment.ended()) is not None:
            run.result.unlink(missing_ok=True)
            raise RunFailedError(reason)
        return result

    def _load_run(
        self, point: Point, deployment: Deployment, options: Mapping[str, Any], result: Path
    ) -> LoadRun:
        return LoadRun(
            url=deployment.url,
            model=deployment.model,
            options=options,
            topology=self._describe(point.target),
            label=point.target.name,
            result=result,
            log=self._log(point.target, point.name),
            timeout_s=self._plan.timeout_s,
        )

    def _describe(self, target: Target) -> dict[str, Any]:
        return target.describe(self._gpus)

    def _log(self, target: Target, name: str) -> Path:
        return self._state.folder / target.name / f"{name}.log"

    def _news(self, point: Point, news: str) -> None:
        self._say(f"[{self._number}/{self._total}] {point.key}: {news}")
