"""The process of a tree that `revisions.py` compares: started, asked, ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = Path(__file__).with_name("revision_steps.py")
ANSWER_LIMIT_S = 300.0  # the first one waits for the model and for kernels to be compiled
_TAIL_CHARACTERS = 1000


class TreeFailedError(Exception):
    """A tree failed at what it was asked, or gave no answer; says why."""


class TreeProcess:
    """Runs a tree's `Steps`, see `revision_steps.py`; ends at the end of its context."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], log: Path) -> None:
        """Start it.

        Args:
            name: Of the tree.
            folder: Its root; holds python/tasuki, with the extension, and benchmarks/gpu.
            settings: What its `Steps` are made of.
            log: Where it writes what it has to say.
        """
        self.name, self._log = name, log
        folder = folder.resolve()
        modules = [str(folder / "python"), str(folder / "benchmarks" / "gpu")]
        others = os.environ.get("PYTHONPATH")
        environment = {"PYTHONPATH": os.pathsep.join([*modules, others] if others else modules)}
        self._connection, theirs = Pipe()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno()), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                pass_fds=[theirs.fileno()],
            )
        self._send(dict(settings))

    def __enter__(self) -> TreeProcess:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def ask(self, method: str, *arguments: Any) -> None:
        """Ask for what `answer` will give; questions may be several, answers come in turn."""
        self._send((method, arguments))

    def answer(self) -> Any:
        """Wait for the earliest question's answer.

        Raises:
            TreeFailedError: It failed, the process has ended, or was ended here: it took longer
                than ANSWER_LIMIT_S.
        """
        try:
            if not self._connection.poll(ANSWER_LIMIT_S):
                self._process.kill()
                raise TreeFailedError(f"no answer for {ANSWER_LIMIT_S:.0f} s; its process is ended")
            answer, failure = self._connection.recv()
        except (EOFError, OSError):
            said = self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
            raise TreeFailedError(f"its process has ended: {said.strip()}") from None
        if failure is not None:
            raise TreeFailedError(failure.strip())
        return answer

    def do(self, method: str, *arguments: Any) -> Any:
        """Ask and wait; see `answer`."""
        self.ask(method, *arguments)
        return self.answer()

    def _send(self, question: object) -> None:
        with suppress(OSError):  # it has ended: `answer` tells
            self._connection.send(question)
