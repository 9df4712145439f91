"""How `tasuki scale` reaches the launcher: a Unix socket that its own user alone can open.

One connection is one order: a line of JSON there, `{"role": "decode", "count": 3}`, and a
line back when it is done, `{"done": TEXT}` or `{"error": TEXT}`. An order that has
`"acknowledge": true` gets `{"taken": true}` at once, too, so that its sender need not wait for
another service without end.

Threads: one accepts connections, one serves each; the launcher's main thread obeys.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from tasuki.errors import TasukiError
from tasuki.launch.errors import LaunchError

_MAX_PATH_BYTES = 107  # of a Unix socket's path (Linux)
_MAX_ORDER_BYTES = 4096
_MAX_ANSWER_BYTES = 1 << 20
_ORDER_S = 10.0  # for an order to come over an open connection
_TAKEN_S = 10.0  # for a launcher to say that it has an order
_SUFFIX = ".sock"
_CLOSED = (errno.EINVAL, errno.EBADF)  # of a listening socket, after `close`
_REFUSED_S = 1.0  # the same, where no thread waits for it
_ACCEPT_AGAIN_S = 0.2
_TEMPORARY = Path("/tmp")  # not TMPDIR, which `tasuki scale` may have otherwise than the launcher

Obey = Callable[[str, int], str]
"""Carries out an order, on the main thread: role, count; gives what was done."""


class ControlError(TasukiError):
    """The launcher cannot be reached, or refuses an order."""


def runtime_folder() -> Path:
    """Where launchers have their sockets unless they are told another place.

    Raises:
        LaunchError: It is in the temporary folder, and cannot be made or is another user's.
    """
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base, "tasuki")
    folder = _TEMPORARY / f"tasuki-{os.getuid()}"
    _own(folder)  # any user may have made it first
    _own(folder / "tasuki")
    return folder / "tasuki"


def _own(folder: Path) -> None:
    """Make a folder that this user alone can write to, unless it is there.

    Raises:
        LaunchError: It cannot be made, or something else is there.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_folder, user = stat.S_ISDIR(found.st_mode), os.getuid()
        if is_folder and found.st_uid == user:
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                folder.chmod(0o700)
            return
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder of control sockets: {error}; set XDG_RUNTIME_DIR to a folder"
            " of this user"
        ) from error
    what = f"a folder of user {found.st_uid}" if is_folder else "a link"
    raise LaunchError(
        f"{folder} is {what}, and control sockets must be in a folder of user {user}, who runs"
        " this: remove it, or set XDG_RUNTIME_DIR to a folder of this user"
    )


class ControlServer:
    """Takes orders from construction to `close`. They are carried out from `begin`.

    Args:
        path: Of the socket; None: one named after this process in `runtime_folder`.

    Raises:
        LaunchError: See `check_socket`, or the socket cannot be made.
    """

    _obey: Obey
    _call: Callable[[Callable[[], None]], None]

    def __init__(self, path: Path | None) -> None:
        self.path = path or runtime_folder() / f"{os.getpid()}{_SUFFIX}"
        if path is None:
            _remove_abandoned(self.path.parent)
        self._socket = _listen(self.path)
        self._begun, self._ends = threading.Event(), False
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def begin(self, obey: Obey, call: Callable[[Callable[[], None]], None]) -> None:
        """Carry out orders, those that wait first.

        Args:
            obey: Carries out an order.
            call: Has a function called on the main thread.
        """
        self._obey, self._call = obey, call
        self._begun.set()

    def close(self) -> None:
        """Take no more orders. A second call does nothing."""
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self._ends = not self._begun.is_set()
        self._begun.set()  # those that wait get their answer

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                time.sleep(_ACCEPT_AGAIN_S)  # no descriptor is left, or this one has gone
                continue
            serving = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            try:
                serving.start()
            except RuntimeError as error:
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_REFUSED_S)
                    connection.recv(_MAX_ORDER_BYTES)  # unread, it resets the connection
                    _send(connection, {"error": f"the launcher cannot take an order: {error}"})

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ORDER_S)
            with connection.makefile("rb") as lines:
                line = lines.readline(_MAX_ORDER_BYTES)
            try:
                order = json.loads(line)
                role, count = str(order["role"]), int(order["count"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                _send(connection, {"error": 'an order is {"role": "decode", "count": 3}'})
                return
            if order.get("acknowledge"):
                _send(connection, {"taken": True})
            _send(connection, self._answer(role, count))

    def _answer(self, role: str, count: int) -> dict[str, str]:
        self._begun.wait()
        if self._ends:
            return {"error": "the launcher ends"}
        answers: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()

        def run() -> None:
            answer = {"error": "the launcher ends"}  # unless it gets further
            try:
                answer = {"done": self._obey(role, count)}
            except TasukiError as error:
                answer = {"error": str(error)}
            finally:
                answers.put(answer)

        self._call(run)
        return answers.get()


def _send(connection: socket.socket, answer: Mapping[str, object]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def send_order(path: Path | None, role: str, count: int) -> str:
    """Have a launcher scale a role, and wait until that is done; says what was done.

    Args:
        path: Of its socket; None: that of the only launcher of this user.
        role: prefill, decode or mixed.
        count: Workers of that role.

    Raises:
        ControlError: There is no such launcher, there are several, it refuses, or something else
            is there.
        LaunchError: The path is too long.
    """
    if path is not None:
        _check_length(path)
    path = path or _only_socket(runtime_folder())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TAKEN_S)
        try:
            connection.connect(str(path))
        except OSError as error:
            raise ControlError(
                f"no `tasuki serve` answers at {path} ({error.strerror}): start it, or correct"
                " --control-socket"
            ) from error
        try:
            with contextlib.suppress(ConnectionError):  # then there is nothing to read
                _send(connection, {"role": role, "count": count, "acknowledge": True})
            with connection.makefile("rb") as lines:
                answer = _read(lines, path)
                if answer.get("taken"):
                    connection.settimeout(None)
                    answer = _read(lines, path)
        except TimeoutError:
            raise ControlError(
                f"nothing answers at {path} within {_TAKEN_S:g} s: another service listens there,"
                " or a `tasuki serve` of an older version, which may still carry it out: correct"
                " --control-socket, or start it again"
            ) from None
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    return str(answer["done"])


def _read(lines: BinaryIO, path: Path) -> dict[str, object]:
    """A launcher's next answer.

    Raises:
        ControlError: It has ended, or is none.
        TimeoutError: Nothing came in time.
    """
    try:
        line = lines.readline(_MAX_ANSWER_BYTES)
    except ConnectionError:
        line = b""  # it ended, and reset the connection
    if not line:
        raise ControlError("`tasuki serve` ended before that was done")
    try:
        answer = json.loads(line)
        if isinstance(answer, dict) and answer.keys() & {"taken", "done", "error"}:
            return answer
    except (ValueError, RecursionError):
        pass
    raise ControlError(
        f"another service answers at {path}, with {line[:60]!r}: correct --control-socket"
    )


def _only_socket(folder: Path) -> Path:
    found = [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if _is_served(path)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ControlError(
            f"no `tasuki serve` of this user runs (none listens in {folder}): start it first, or"
            " give its --control-socket"
        )
    names = ", ".join(str(path) for path in found)
    raise ControlError(f"several `tasuki serve` run: choose one by --control-socket: {names}")


def _remove_abandoned(folder: Path) -> None:
    """Remove the sockets of launchers that were killed."""
    for path in folder.glob(f"*{_SUFFIX}"):
        # A process of another container may listen; one of this host may be about to.
        if path.stem.isdecimal() and not _runs(int(path.stem)) and not _is_served(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # else it waits where as many wait as may
        try:
            probe.connect(str(path))
        except (PermissionError, BlockingIOError):
            return True  # for all we know: it is another user's
        except OSError:
            return False
    return True


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise LaunchError(
            f"--control-socket {path} has {len(os.fsencode(path))} bytes, the limit is"
            f" {_MAX_PATH_BYTES}: choose a shorter path"
        )


def check_socket(path: Path) -> None:
    """Refuse a path that `ControlServer` could not have. Creates and removes nothing.

    Raises:
        LaunchError: The path is too long, something other than a socket is there, or a
            launcher listens there.
    """
    _check_length(path)
    try:
        is_other = (path.exists() or path.is_symlink()) and not path.is_socket()
    except OSError as error:
        raise LaunchError(
            f"cannot listen at {path}: {error}; choose a --control-socket, or another"
            " XDG_RUNTIME_DIR"
        ) from error
    if is_other:
        raise LaunchError(f"--control-socket {path} exists and is no socket: choose another path")
    if _is_served(path):
        raise LaunchError(f"another `tasuki serve` listens at {path}: choose another path")


def _listen(path: Path) -> socket.socket:
    """A socket at `path`, for this user alone.

    Raises:
        LaunchError: See `check_socket`, or the folder or the socket cannot be made.
    """
    check_socket(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by one that was killed
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
        listening.listen()
    except OSError as error:
        listening.close()
        raise LaunchError(
            f"cannot listen at {path}: {error}; choose a --control-socket, or another"
            " XDG_RUNTIME_DIR"
        ) from error
    return listening
