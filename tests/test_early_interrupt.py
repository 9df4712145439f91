"""Ctrl-C before the command line has begun: while its modules are imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from support.processes import REPOSITORY, environment

# Interrupts the process at the import of a module, as Ctrl-C does there.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tasuki.bench.command":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["tasuki", "--version"]
import {module}
{call}
"""


def script() -> tuple[str, str]:
    """The module and the function of the installed command."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["tasuki"].partition(":")
    return module, function


@pytest.mark.system
@pytest.mark.parametrize("way", ["script", "module"])
def test_there_is_no_traceback(way: str) -> None:
    module, function = script()
    as_module = "runpy.run_module('tasuki', run_name='__main__', alter_sys=True)"
    call = f"sys.modules[{module!r}].{function}()" if way == "script" else as_module
    code = INTERRUPTED.format(module=module if way == "script" else "runpy", call=call)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
