"""Signals to the first process of a container while it loads or computes: it ends.

The kernel discards a signal for process 1 of a PID namespace unless it has a handler.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from support.planning import RATES
from support.processes import REPOSITORY, environment
from support.waiting import until

pytestmark = pytest.mark.system

DEADLINE_S = 60.0
MODEL = "owner/model"
RENDERED = REPOSITORY / "tests/deploy/golden/hub.yaml"
NATIVE_BYTES = 100 << 20  # the import of tasuki takes half of that
TASUKI = (sys.executable, "-m", "tasuki")
# --mount-proc: a process finds itself in /proc by its number in the namespace.
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def silent_hub() -> Iterator[socket.socket]:
    """A hub of models that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(DEADLINE_S)
        yield hub


@contextlib.contextmanager
def first_process(
    *arguments: str, cache: Path, hub: str, program: Sequence[str] = TASUKI
) -> Iterator[subprocess.Popen[str]]:
    """A program as process 1 of a PID namespace; gives the process outside that waits for it."""
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=DEADLINE_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no PID namespace can be made here: {error}")
    command = [*UNSHARE, *program, *arguments]
    own = environment(
        TASUKI_CACHE=str(cache),
        XDG_RUNTIME_DIR=str(cache),
        HF_HOME=str(cache),
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT=hub,
    )
    process = subprocess.Popen(
        command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("worker", "--role", "mixed", "--device", "cpu", "--model", MODEL),
        ("serve", "--mixed", "1", "--device", "cpu", "--port", "0", "--model", MODEL),
        ("router", "--worker", "127.0.0.1:1", "--model", MODEL),
        ("model", "fetch", MODEL),
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_ends_while_the_model_is_fetched(
    arguments: tuple[str, ...], silent_hub: socket.socket, tmp_path: Path
) -> None:
    hub = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
    with first_process(*arguments, cache=tmp_path, hub=hub) as outside:
        connection, _ = silent_hub.accept()
        with connection:
            (inside,) = psutil.Process(outside.pid).children()
            inside.terminate()
            assert outside.wait(DEADLINE_S) == 143


def test_the_routers_init_container_ends(silent_hub: socket.socket, tmp_path: Path) -> None:
    rendered = yaml.safe_load_all(RENDERED.read_text())
    router = next(
        each
        for each in rendered
        if each["metadata"]["name"] == "demo-tasuki-router" and each["kind"] == "Deployment"
    )
    (fetches,) = router["spec"]["template"]["spec"]["initContainers"]
    *shell, script = fetches["command"]
    script = script.replace("/tmp", str(tmp_path))
    script = f'tasuki() {{ {shlex.join(TASUKI)} "$@"; }}\n{script}'
    hub = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
    words = (script, MODEL)
    with first_process(*words, cache=tmp_path, hub=hub, program=shell) as outside:
        connection, _ = silent_hub.accept()
        with connection:
            (inside,) = psutil.Process(outside.pid).children()
            inside.terminate()
            assert outside.wait(DEADLINE_S) == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_while_native_code_runs(number: signal.Signals, tmp_path: Path) -> None:
    load = ("--lengths", "500:50", "--num-requests", "100000000", "--request-rate", "8")
    words = ("simulate", "--rates", RATES, *load)
    with first_process(*words, cache=tmp_path, hub="") as outside:

        def runs() -> psutil.Process | None:
            """The simulator, once it has taken memory for its requests."""
            for inside in psutil.Process(outside.pid).children():
                if inside.memory_info().rss > NATIVE_BYTES:
                    return inside
            return None

        until(runs, "the run", deadline_s=DEADLINE_S).send_signal(number)
        assert outside.wait(DEADLINE_S) == 128 + number


ROUTER = ("router", "--worker", "127.0.0.1:1", "--readiness-grace-s", "0", "--model")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("arguments", [ROUTER, ("bench", "fake-server")], ids=["router", "bench"])
def test_servers_in_native_code_end_in_order(
    arguments: tuple[str, ...], number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    words = (*arguments, str(tiny_model)) if arguments == ROUTER else arguments
    with first_process(*words, "--port", "0", cache=tmp_path, hub="") as outside:
        assert outside.stdout is not None
        assert outside.stdout.readline().startswith("listening on ")
        (inside,) = psutil.Process(outside.pid).children()
        inside.send_signal(number)
        assert outside.wait(DEADLINE_S) == 0
