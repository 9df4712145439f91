"""A network namespace with a loopback device: what a test starts there reaches nothing else."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


class Namespace:
    """A thread in a network namespace of its own; sockets and processes it makes are there.

    Args:
        devices: Commands of `ip` that set it up, besides the loopback device.
    """

    def __init__(self, *devices: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="namespace")
        if shutil.which("ip") is None or not self.run(_leave):
            pytest.skip("network namespaces need `ip` and CAP_SYS_ADMIN")
        # Libraries look for an address of this machine by its route to the Internet.
        for words in ("link set lo up", "route add default dev lo", *devices):
            self.run(subprocess.run, ["ip", *words.split()], check=True)

    def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call it in the namespace."""
        return self._thread.submit(function, *arguments, **options).result()

    def path(self) -> str:
        """The namespace, as `ip link set DEVICE netns` takes it."""
        return self.run(lambda: f"/proc/{os.getpid()}/task/{_thread_id()}/ns/net")

    def close(self) -> None:
        self._thread.shutdown()


def _leave() -> bool:
    """Whether this thread is now in a namespace of its own."""
    return ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) == 0


def _thread_id() -> int:
    return threading.get_native_id()
