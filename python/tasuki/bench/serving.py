"""A deployment under measurement: `tasuki serve` as a child process."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.bench.child import end_child, explain, start_child
from tasuki.bench.errors import RunFailedError
from tasuki.bench.serve_options import serve_words
from tasuki.launch.config import Topology
from tasuki.launch.process import describe_exit

_SERVING = re.compile(rb"^Serving (.+) at (https?://\S+)$", re.M)
_LOOK_EVERY_S = 0.1
_END_GRACE_S = 60.0
_START_MARGIN_S = 60.0
_START_TIMEOUT_S = 600.0


class Serving:
    """Runs from construction to `stop`.

    Attributes:
        url: Of the router.
        model: As requests call it.
    """

    def __init__(
        self,
        topology: Topology,
        options: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start, and wait until it serves.

        Args:
            topology: The workers.
            options: Of `tasuki serve`, by name.
            log: Gets its output.
            environment: Variables besides those of this process.

        Raises:
            RunFailedError: It did not come up; says why.
        """
        arguments = ["serve", *serve_words(topology, options)]
        start = log.stat().st_size if log.exists() else 0
        self._log = log
        self._process = start_child(arguments, log, environment)
        try:
            self.model, self.url = self._await_banner(start, options)
        except BaseException:
            end_child(self._process, _END_GRACE_S)
            raise

    def ended(self) -> str | None:
        """Why it serves no more; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"tasuki serve ended ({describe_exit(code)}): {explain(self._log)}"

    def stop(self) -> None:
        """End it and its workers."""
        end_child(self._process, _END_GRACE_S)

    def _await_banner(self, start: int, options: Mapping[str, Any]) -> tuple[str, str]:
        limit_s = _START_TIMEOUT_S + _START_MARGIN_S
        stated: Any = options.get("startup-timeout")
        with contextlib.suppress(TypeError, ValueError):  # `tasuki serve` says what is wrong
            limit_s = float(stated) + _START_MARGIN_S
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            ended = self.ended()
            with self._log.open("rb") as file:
                file.seek(start)
                found = _SERVING.search(file.read())
            if found:
                return found[1].decode(), found[2].decode()
            if ended is not None:
                raise RunFailedError(ended)
            try:
                self._process.wait(_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
        raise RunFailedError(f"tasuki serve was not ready after {limit_s:g} s; see {self._log}")
