"""A container that is a local process: its start, its probes, its restarts, its end.

The image is ignored: programs are those of the node's PATH. An `emptyDir` is a folder of the
pod's own, and where the container's environment or arguments name a path below its mount, they
get that folder's path. Other volumes must be there under the same path as on the node.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forks import Forked, fork
from support.processes import REPOSITORY

from tasuki.worker.health import is_serving

Object = dict[str, Any]

_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_LONGEST_BACKOFF_S = 8.0
_TERMINATION_LINES = 15


@dataclass
class Sandbox:
    """What all containers of a pod share.

    Attributes:
        ip: Of the pod.
        environment: From the node.
        fields: Values of `fieldRef`, by path.
        folders: Mount paths of emptyDirs and what they stand for, by volume.
        logs: Folder for output.
        name: Of the pod.
        secret: Gives the value of a Secret by name and key.
    """

    ip: str
    environment: Mapping[str, str]
    fields: Mapping[str, str]
    folders: Mapping[str, Path]
    logs: Path
    name: str
    secret: Callable[[str, str], str]


@dataclass
class Container:
    """One container of a pod; `tick` it often."""

    spec: Object
    sandbox: Sandbox
    restarts: int = 0
    process: subprocess.Popen[bytes] | Forked | None = None
    started: bool = False
    ready: bool = False
    last_exit: Object | None = None
    _began_s: float = 0.0
    _restart_s: float = 0.0
    _probed_s: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _successes: dict[str, int] = field(default_factory=dict)
    _log_start: int = 0
    _variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name: str = self.spec["name"]
        return name

    @property
    def log(self) -> Path:
        return self.sandbox.logs / f"{self.sandbox.name}.{self.name}.log"

    def start(self) -> None:
        """Start its process."""
        self._variables = environment = self._environment()
        argv = [self._word(w, environment) for w in self._words()]
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self.process = self._begin(argv, environment, output)
        self._began_s = time.monotonic()
        self.started, self.ready = "startupProbe" not in self.spec, False
        self._probed_s.clear()
        self._failures.clear()
        self._successes.clear()

    def _begin(self, argv: list[str], environment: dict[str, str], output: Any) -> Any:
        if argv[:2] == ["tasuki", "worker"]:
            forked = fork(self.name, argv, environment, output)
            if forked is not None:
                return forked
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            start_new_session=True,
        )

    def _words(self) -> list[str]:
        return [*self.spec.get("command", []), *self.spec.get("args", [])]

    def _environment(self) -> dict[str, str]:
        environment = dict(self.sandbox.environment)
        for each in self.spec.get("env", []):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                value = self.sandbox.fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self.sandbox.secret(**source["secretKeyRef"])
            else:
                value = self._word(each.get("value", ""), environment)
            environment[each["name"]] = value
        return environment

    def _word(self, word: str, environment: Mapping[str, str]) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], m[0]), word)
        flag, equals, path = word.rpartition("=")
        mounts = [m for m in self.spec.get("volumeMounts", []) if is_below(path, m["mountPath"])]
        inmost = max(mounts, key=lambda mount: len(mount["mountPath"]), default=None)
        if inmost is None or inmost["name"] not in self.sandbox.folders:
            return word
        folder = self.sandbox.folders[inmost["name"]]
        return f"{flag}{equals}{folder}{path[len(inmost['mountPath']) :]}"

    def tick(self) -> None:
        """Start it, restart it, probe it: whatever is due."""
        if self.process is None:
            if time.monotonic() >= self._restart_s:
                self.start()
            return
        code = self.process.poll()
        if code is not None:
            self._on_exit(code)
            return
        for kind in _PROBES:
            probe = self.spec.get(kind)
            if probe is not None and (kind == "startupProbe") != self.started:
                self._take_probe(kind, probe)

    def _take_probe(self, kind: str, probe: Object) -> None:
        now_s = time.monotonic()
        period_s = probe.get("periodSeconds", 10)
        if now_s - self._probed_s.get(kind, self._began_s - period_s) < period_s:
            return
        self._probed_s[kind] = now_s
        succeeded = self._ask(probe)
        self._failures[kind] = 0 if succeeded else self._failures.get(kind, 0) + 1
        self._successes[kind] = self._successes.get(kind, 0) + 1 if succeeded else 0
        failed = self._failures[kind] >= probe.get("failureThreshold", 3)
        passed = self._successes[kind] >= probe.get("successThreshold", 1)
        match kind:
            case "startupProbe" if succeeded:
                self.started = True
                self.ready = "readinessProbe" not in self.spec
            case "readinessProbe":
                self.ready = passed or (self.ready and not failed)
            case _ if failed:
                self.signal(signal.SIGKILL)

    def _ask(self, probe: Object) -> bool:
        timeout_s, ip = probe.get("timeoutSeconds", 1), self.sandbox.ip
        try:
            if "httpGet" in probe:
                port = self._port(probe["httpGet"]["port"])
                connection = http.client.HTTPConnection(ip, port, timeout=timeout_s)
                connection.request("GET", probe["httpGet"]["path"])
                return 200 <= connection.getresponse().status < 400
            if "tcpSocket" in probe:
                port = self._port(probe["tcpSocket"]["port"])
                socket.create_connection((ip, port), timeout_s).close()
                return True
            if "exec" in probe:
                ran = subprocess.run(
                    probe["exec"]["command"],
                    env=self._variables,  # a Secret may be gone since
                    capture_output=True,
                    timeout=timeout_s,
                )
                return ran.returncode == 0
            return is_serving(f"{ip}:{probe['grpc']['port']}", timeout_s)
        except (OSError, http.client.HTTPException, subprocess.TimeoutExpired):
            return False

    def _port(self, port: int | str) -> int:
        ports = {each.get("name"): each["containerPort"] for each in self.spec.get("ports", [])}
        return port if isinstance(port, int) else int(ports[port])

    def _on_exit(self, code: int) -> None:
        self.process, self.ready, self.started = None, False, False
        self.restarts += 1
        pause_s = min(_LONGEST_BACKOFF_S, 0.25 * 2**self.restarts)
        self._restart_s = time.monotonic() + pause_s
        self.last_exit = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Completed" if code == 0 else "Error",
            "message": self.last_words() if code else "",
        }

    def last_words(self) -> str:
        """As `terminationMessagePolicy: FallbackToLogsOnError` has it."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TERMINATION_LINES:])[-2000:]

    def signal(self, number: signal.Signals) -> None:
        """To its whole process group, if it runs."""
        if self.process is not None and self.process.poll() is None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def status(self) -> Object:
        """As the API has it."""
        if self.process is not None:
            state: Object = {"running": {}}
        elif self.restarts:
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
        else:
            state = {"waiting": {"reason": "ContainerCreating"}}
        last = {"terminated": self.last_exit} if self.last_exit else {}
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": state,
            "lastState": last,
        }


def is_below(path: str, mount: str) -> bool:
    """Whether a path is a mount or something in it."""
    return path == mount or path.startswith(mount + "/")
