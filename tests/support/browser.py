"""A headless browser, told what to do over a pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NO_BROWSER = f"no browser to render with: {', '.join(BROWSERS)}"
HEADLESS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")

_ANSWER_DEADLINE_S = 60.0
# The browser reads commands from file descriptor 3 and writes answers to 4.
_COMMANDS, _ANSWERS = 3, 4


class BrowserError(Exception):
    """The browser refused a command, ended, or a script in the page failed."""


class Browser:
    """A browser's process; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None, NO_BROWSER
        (command_end, self._commands), (self._answers, answer_end) = os.pipe(), os.pipe()
        self._readable = select.poll()
        self._readable.register(self._answers, select.POLLIN)
        # Above the two numbers, so that neither is overwritten by the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_end, answer_end)]
        log = str(folder / "browser.log")
        actions = [
            (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, ends[0], _COMMANDS),
            (os.POSIX_SPAWN_DUP2, ends[1], _ANSWERS),
        ]
        words = [BROWSER, *HEADLESS, "--remote-debugging-pipe"]
        words += [f"--user-data-dir={folder / 'profile'}"]
        self._process = os.posix_spawn(
            BROWSER, words, os.environ, file_actions=actions, setpgroup=0
        )
        for end in (command_end, answer_end, *ends):
            os.close(end)
        self._number = 0
        self._received = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and gives its result; events that come meanwhile go to `events`.

        Raises:
            BrowserError: It was refused, or there is no answer.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _ANSWER_DEADLINE_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            ready = self._readable.poll(1e3 * left_s)
            some = os.read(self._answers, 1 << 20) if ready else b""
            if not some:
                raise BrowserError("the browser ended" if ready else "the browser does not answer")
            self._received += some
        message, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        """Ends the browser and all its processes."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._answers)


class Page:
    """A page of a width that prefers a color scheme, open at a URL."""

    def __init__(self, browser: Browser, url: str, width: int, scheme: str) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[preference])
        self._call("Page.navigate", url=url)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for.

        Raises:
            BrowserError: It throws.
        """
        more = {"returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", expression=script, **more)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Writes a PNG of the whole page, or of its first `height` pixels."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        options = {"captureBeyondViewport": True, "clip": {**clip, "scale": 1}}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))

    def complaints(self) -> Sequence[str]:
        """Errors and warnings of the console, and exceptions, so far."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            what = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and what["entry"]["level"] != "info":
                found.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(what["args"]))
        return found
