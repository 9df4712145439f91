"""The launcher's signals under `nohup`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tasuki.launch import serve
from tasuki.launch.supervisor import Supervisor


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_hangup_that_is_ignored_stays_ignored(before: signal.Handlers, tmp_path: Path) -> None:
    original = signal.signal(signal.SIGHUP, before)
    try:
        with serve._signals(Supervisor(tmp_path, echo=False)):
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert is_ignored == (before == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, original)
