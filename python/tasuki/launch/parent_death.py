"""Children end with their launcher, even if it is killed with SIGKILL (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "TASUKI_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Ask the kernel to kill this process when the launcher that started it dies.

    Does nothing unless the launcher has left its process id in the environment.
    The launcher must start its children from its main thread: the kernel means
    the thread that forked.
    """
    launcher = os.environ.pop(PARENT_VARIABLE, "")
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
