"""A network namespace with a loopback device: what a test starts there reaches nothing else."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000


class Namespace:
    """A thread in a network namespace of its own; sockets and processes it makes are there.

    Args:
        devices: Commands of `ip` that set it up, besides the loopback device.
    """

    def __init__(self, *devices: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="namespace")
        if shutil.which("ip") is None or not self.run(_leave):
            pytest.skip("network namespaces need `ip`, `mount` and CAP_SYS_ADMIN")
        self._others = ThreadPoolExecutor(4, initializer=_join, initargs=(self.path(),))
        # Libraries look for an address of this machine by its route to the Internet.
        self.ip("link set lo up", "route add default dev lo", *devices)

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip` in it."""
        for words in commands:
            self.command(f"ip {words}")

    def command(self, words: str) -> str:
        """Runs a program in it; what it prints.

        Raises:
            AssertionError: It failed; with what it said.
        """
        command = words.split()
        done = self.run(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call it in the namespace."""
        return self._thread.submit(function, *arguments, **options).result()

    def begin(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call it in one of four further threads of the namespace."""
        return self._others.submit(function, *arguments)

    def path(self) -> str:
        """The namespace, as `ip link set DEVICE netns` takes it."""
        return self.run(lambda: f"/proc/{os.getpid()}/task/{_thread_id()}/ns/net")

    def close(self) -> None:
        self._others.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown()


def _leave() -> bool:
    """Whether this thread is now in a namespace of its own, with a /sys that shows its devices.

    No name server answers there. With none in /etc/resolv.conf a look-up fails at once; else
    torch waits 10 s for the name of each peer.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET | _CLONE_NEWNS) != 0:
        return False
    os.chdir("/")  # this thread's alone; tests fork workers only from the repository's folder
    mounts = ["--make-rprivate /", "-t sysfs sysfs /sys"]
    if os.path.exists("/etc/resolv.conf"):
        mounts.append("--bind /dev/null /etc/resolv.conf")
    for words in mounts:
        if subprocess.run(["mount", *words.split()], check=False).returncode != 0:
            return False
    return True


def _join(path: str) -> None:
    """Take this thread to a namespace."""
    with open(path) as network:
        failed = ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET)
    assert not failed, os.strerror(ctypes.get_errno())


def _thread_id() -> int:
    return threading.get_native_id()
