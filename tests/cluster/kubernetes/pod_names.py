"""Names of pods that have a Service for that, in /etc/hosts: there is no DNS server here.

Tests give the cluster an /etc/hosts of its own (`control_plane.own_hosts_file`), which all kubelets
share.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILE = Path("/etc/hosts")


def set_name(spec: dict[str, Any], ip: str) -> None:
    """Give a pod its name, if it has one: `HOSTNAME.SUBDOMAIN`."""
    if "subdomain" in spec:
        name = f"{spec['hostname']}.{spec['subdomain']}"
        _rewrite(lambda line: line.split()[1:] == [name], f"{ip} {name}\n")


def remove_name(ip: str) -> None:
    """Take the name of a pod that is gone."""
    _rewrite(lambda line: line.split()[:1] == [ip], "")


def _rewrite(is_old: Callable[[str], bool], new: str) -> None:
    with _FILE.open("r+") as file:  # in place: it is mounted
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = [line for line in file if not is_old(line)]
        file.seek(0)
        file.truncate()
        file.write("".join(lines) + new)
