"""A process that imports once and then forks each worker, so that none imports torch again.

    python -m tasuki.launch.fork_server HANDLE MODULE... PADDING

Run by `forking.ForkServer`, which sends a request for each process over the socket
HANDLE and is answered by that process itself. This process has one thread, no CUDA
context and no NIXL agent: only such a process can be forked safely.

It forks twice. The process in between ends at once, so the launcher (a subreaper
meanwhile) becomes the parent of the new process, waits for it as for any other
child, and loses no worker if this process dies.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tasuki.launch.parent_death import PARENT_VARIABLE, follow_parent

REQUEST_BYTES = 1 << 17
_ADOPTED_S = 10.0  # until the process in between has ended


def main(arguments: list[str]) -> None:
    """Import the modules, then fork until the launcher closes its end."""
    follow_parent()
    handle, *modules, _ = arguments
    channel = socket.socket(fileno=int(handle))
    gc.disable()  # while modules are imported it costs a tenth of the time and frees nothing
    for module in modules:
        importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"tasuki: {threads} threads after importing {', '.join(modules)}: cannot fork")
    gc.freeze()  # collections in the children leave the shared pages alone
    atexit.register(gc.unfreeze)  # else Triton reports leaks at the end
    gc.enable()
    set_title("tasuki fork server")
    while True:
        request, handles, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 2)
        if not request:
            return
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            channel.close()
            _become(json.loads(request), *handles)
            return
        os.waitpid(between, 0)
        for each in handles:
            os.close(each)


def _become(request: dict[str, Any], output: int, answer: int) -> None:
    """Be the process that the request asks for: `python -m MODULE ARGUMENTS`."""
    os.setsid()
    _await_parent(request["launcher"])
    os.write(answer, str(os.getpid()).encode())
    for number in (1, 2):
        os.dup2(output, number)
    os.close(answer)
    os.close(output)
    os.environ.update(request["environment"])
    os.environ[PARENT_VARIABLE] = str(request["launcher"])
    sys.argv[1:] = request["arguments"]
    module = request["module"]
    set_title(" ".join((sys.executable, "-m", module, *request["arguments"])))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _await_parent(launcher: int) -> None:
    deadline_s = time.monotonic() + _ADOPTED_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.001)


def set_title(title: str) -> None:
    """What `ps` shows: written over the arguments that this process was started with.

    Longer titles are cut; the argument PADDING is there for the room.
    Source: proc(5), arg_start and arg_end; the last byte tells the kernel that a
    title stands there.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    text = title.encode()[: room - 2]
    ctypes.memmove(start, text.ljust(room - 1, b"\0") + b".", room)


if __name__ == "__main__":
    main(sys.argv[1:])
