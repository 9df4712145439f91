"""What UCX writes in this process: the ways that it chose for reads, and its warnings.

UCX has no call that tells which way a connection uses, but it prints a table for each kind of
operation when it chooses (UCX_PROTO_INFO). Its output goes to memory (UCX_LOG_FILE), from where
the tables are read; other lines go to our log.

    | tasuki-1f0c… intra-node cfg#1                                    |   whose connection
    | remote memory read by ucp_get*(multi) into host memory from host |   what for
    | Range  | Description |                  Config                   |
    | 0..inf | zero-copy   | cma/memory                                |   how, by size

UCX prints a table once for each configuration, which the connections of an agent share. Any
thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Mapping

from tasuki.kv.ways import Way

log = logging.getLogger(__name__)

FILE = "UCX_LOG_FILE"
_OURS = "/proc/self/fd/"
_OPERATORS = (FILE, "UCX_LOG_LEVEL", "UCX_PROTO_INFO")
_NAME_LENGTH = 31  # of a worker, as UCX keeps it
_PREFIX = re.compile(r"^\[[\d.]+\] \[[^\]]*\] *")
_CELLS = re.compile(r"\|([^|]*)")


class UcxLog:
    """UCX's output of this process, in memory; made once, before UCX loads."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ucx-log")
        self._libc = ctypes.CDLL(None)
        self._at = 0
        self._rest = b""
        self._lock = threading.Lock()
        self._ways: defaultdict[str, list[Way]] = defaultdict(list)
        self._agent = ""
        self._is_read = False

    @property
    def variables(self) -> dict[str, str]:
        """What UCX must be told."""
        return {FILE: f"{_OURS}{self._fd}", "UCX_PROTO_INFO": "*memory read*"}

    def ways(self, agent: str) -> list[Way]:
        """The ways that an agent's reads of large blocks use, in the order of their first use.

        A read is described before the call returns that begins it.
        """
        with self._lock:
            self._take()
            return list(self._ways[agent[:_NAME_LENGTH]])

    def said(self) -> list[str]:
        """What UCX wrote since the last look, without tables."""
        with self._lock:
            return self._take()

    def _take(self) -> list[str]:
        """Read what is new; the lines that are of no table, which are logged."""
        self._libc.fflush(None)  # UCX's stream has a buffer
        data = b""
        while piece := os.pread(self._fd, 1 << 16, self._at):
            self._at += len(piece)
            data += piece
        *lines, self._rest = (self._rest + data).split(b"\n")
        os.ftruncate(self._fd, 0)  # UCX goes on behind what was read
        texts = [self._on_line(line.decode(errors="replace")) for line in lines]
        return [text for text in texts if text]

    def _on_line(self, line: str) -> str:
        """Take note of a line; what it says, if it is of no table."""
        text = _PREFIX.sub("", line)
        cells = [cell.strip() for cell in _CELLS.findall(text)][:-1]
        if len(cells) == 1 and "cfg#" in cells[0]:
            self._agent, self._is_read = cells[0].split(" ")[0], False
        elif len(cells) == 1 and "memory read" in cells[0]:
            self._is_read = True
        elif len(cells) == 3 and cells[0].endswith("..inf") and self._is_read:
            way = Way.of(cells[2])
            if way not in self._ways[self._agent]:
                self._ways[self._agent].append(way)
        elif text and not text.startswith(("|", "+")):
            text = re.sub(r"\s+", " ", text)
            log.warning("%s", text)
            return text
        return ""


_log: UcxLog | None = None


def capture(own: Mapping[str, str]) -> dict[str, str]:
    """Variables by which UCX's output comes to us; none if the operator directs it.

    Args:
        own: The environment as it is.
    """
    global _log
    if _log is None:
        inherited = own.get(FILE, "").startswith(_OURS)  # a parent's: it names nothing here
        if not inherited and any(name in own for name in _OPERATORS):
            return {}
        _log = UcxLog()
    return _log.variables


def ways(agent: str) -> list[Way]:
    """See `UcxLog.ways`; empty where the operator directs UCX's output."""
    return [] if _log is None else _log.ways(agent)


def said() -> list[str]:
    """See `UcxLog.said`; nothing where the operator directs UCX's output."""
    return [] if _log is None else _log.said()
