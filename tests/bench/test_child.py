"""Children that end, are ended, and say why; a load run from its command line to its result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import serve_result

from tasuki.bench import load as load_module
from tasuki.bench.child import end_child, explain, start_child
from tasuki.bench.errors import NothingAnsweredError, RunFailedError
from tasuki.bench.load import LoadRun, run_load

pytestmark = pytest.mark.system


def test_a_child_that_fails_is_explained_by_its_own_last_words(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    for arguments in (["model", "path", "/nowhere"], ["bench", "sweep"]):
        process = start_child(arguments, log)
        assert process.wait(60) == 1
    assert "topologies" in explain(log)
    assert "nowhere" not in explain(log)


def test_a_log_that_cannot_be_written_fails_one_run(tmp_path: Path) -> None:
    full, file = tmp_path / "full.log", tmp_path / "file"
    full.symlink_to("/dev/full")
    file.write_text("")
    for log, why in ((full, "No space left on device"), (file / "x.log", "exists")):
        with pytest.raises(RunFailedError, match=f"{log.name} cannot be written .*{why}"):
            start_child(["model", "list"], log)


def test_a_thread_starts_children_too(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        process = threads.submit(start_child, ["model", "list"], tmp_path / "x.log").result()
        assert process.wait(60) == 0


def test_a_log_has_no_key(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    start_child(["model", "list", "--api-key", "K1", "--seed", "1"], log).wait(60)
    assert log.read_text().startswith("--- tasuki model list --api-key *** --seed 1\n")


def test_a_child_that_does_not_listen_is_killed() -> None:
    body = "import signal; signal.signal(2, signal.SIG_IGN); print('deaf', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"deaf\n"
    end_child(process, grace_s=0.2)
    assert process.returncode == -signal.SIGKILL
    end_child(process, grace_s=0.2)  # harmless when it is gone
    process.stdout.close()


INTERRUPTED = """
import os, pathlib, signal, subprocess, sys
from tasuki.bench import child

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run with it ignored
when, folder = sys.argv[1], pathlib.Path(sys.argv[2])
serve = '''
import pathlib, signal, sys, time
from tasuki.launch.parent_death import follow_parent
def end(*_):
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit()
signal.signal(signal.SIGINT, end)
follow_parent()
pathlib.Path(sys.argv[1], "begun").touch()
time.sleep(600)
'''

class Popen(subprocess.Popen):
    def __init__(self, words, **more):
        super().__init__([sys.executable, "-c", serve, str(folder)], **more)
        while not (folder / "begun").exists():
            pass
        if when == "spawning":
            os.kill(os.getpid(), signal.SIGINT)

child.subprocess.Popen = Popen
child.start_child(["serve"], folder / "serve.log")
raise KeyboardInterrupt  # before its caller can end it
"""


@pytest.mark.parametrize("when", ["spawning", "spawned"])
def test_a_child_is_ended_in_order_when_its_start_is_interrupted(tmp_path: Path, when: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED, when, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in done.stderr
    assert (tmp_path / "ended").exists()


class Script:
    """Stands in for `tasuki bench serve`: runs Python with the same words."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.arguments: list[str] = []
        self.environment: dict[str, str] = {}

    def start(self, arguments: list[str], log: Path, environment: dict[str, str]) -> Any:
        self.arguments, self.environment = list(arguments), environment
        with log.open("ab") as output:
            output.write(b"--- tasuki\n")
            output.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.body, *arguments],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return self.process


WRITE = """
import sys
words = sys.argv[1:]
path = words[words.index("--output") + 1]
open(path, "w").write('''{}''')
"""


def run_of(tmp_path: Path, **changes: Any) -> LoadRun:
    said: dict[str, Any] = {
        "url": "http://x",
        "model": "m",
        "options": {"input-tokens": 5},
        "topology": {"name": "1m"},
        "label": "1m",
        "result": tmp_path / "1m" / "a.json",
        "log": tmp_path / "a.log",
        "timeout_s": 60.0,
    }
    return LoadRun(**{**said, **changes})


def test_a_run_leaves_its_result_only_when_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(WRITE.format(json.dumps(serve_result())))
    monkeypatch.setattr(load_module, "start_child", script.start)
    run = run_of(tmp_path)
    result = run_load(run, {"tokenizer": "/t", "input-tokens": 1})
    assert result == json.loads(run.result.read_text())
    assert [path.name for path in run.result.parent.iterdir()] == ["a.json"]
    words = script.arguments
    assert words[:2] == ["bench", "serve"]
    said = dict(zip(words[2::2], words[3::2], strict=True))
    assert json.loads(said.pop("--topology")) == {"name": "1m"}
    assert said.pop("--output").endswith(".part")
    assert said == {
        "--tokenizer": "/t",
        "--input-tokens": "5",
        "--base-url": "http://x",
        "--model": "m",
        "--label": "1m",
    }


@pytest.mark.parametrize("name", ["api-key", "api_key"])
def test_no_command_line_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script = Script(WRITE.format(json.dumps(serve_result())))
    monkeypatch.setattr(load_module, "start_child", script.start)
    run_load(run_of(tmp_path, options={"input-tokens": 5, name: "K1"}))
    assert not any("K1" in word or "key" in word for word in script.arguments)
    assert script.environment == {"OPENAI_API_KEY": "K1"}
    run_load(run_of(tmp_path, options={"input-tokens": 5, name: None}))
    assert script.environment == {}
    run_load(run_of(tmp_path, options={"header": "x-api-key:K2"}))
    assert not any("K2" in word or "header" in word for word in script.arguments)
    assert script.environment == {"TASUKI_BENCH_HEADERS": "x-api-key:K2"}


def test_headers_of_the_variable_are_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    words = ["bench", "serve", "--dry-run", "--num-requests", "1"]
    for headers, code in (("x-api-key: K2\nx-tenant:a", 0), ("x-tenant:a\nx-tenant", 2)):
        assert start_child(words, log, {"TASUKI_BENCH_HEADERS": headers}).wait(60) == code
    assert "it must be NAME:VALUE" in log.read_text()
    assert "K2" not in log.read_text()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print('tasuki: error: no server'); raise SystemExit(1)", "exit status 1.*no server"),
        ("pass", "no result in"),
        (WRITE.format('{"kind": "batch", "schema": "tasuki.bench/1"}'), "its kind is 'batch'"),
        (WRITE.format(json.dumps({**serve_result(), "interrupted": True})), "interrupted"),
        (
            WRITE.format(json.dumps({**serve_result(), "metrics": {"completed": 0}})),
            "no request was answered",
        ),
    ],
)
def test_a_run_that_gives_no_result_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    monkeypatch.setattr(load_module, "start_child", Script(body).start)
    run = run_of(tmp_path)
    with pytest.raises(RunFailedError, match=says):
        run_load(run)
    assert not run.result.exists()


def test_a_run_that_nobody_answered_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {**serve_result(), "metrics": {"completed": 0}, "failures": []}
    result["failures"] = [{"kind": "HTTP 503", "count": 4, "first": "HTTP 503: busy"}]
    body = WRITE.format(json.dumps(result)) + "raise SystemExit(1)"
    monkeypatch.setattr(load_module, "start_child", Script(body).start)
    with pytest.raises(NothingAnsweredError, match="4 x HTTP 503: busy") as error:
        run_load(run_of(tmp_path))
    assert error.value.result["failures"] == result["failures"]


# With Python's own handler of SIGINT: where pytest has it ignored, so would the child.
SLEEP = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
time.sleep(600)
"""


def test_a_run_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(SLEEP)
    monkeypatch.setattr(load_module, "start_child", script.start)
    with pytest.raises(RunFailedError, match=r"longer than 0.5 s"):
        run_load(run_of(tmp_path, timeout_s=0.5))
    assert script.process.returncode is not None
