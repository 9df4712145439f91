"""The gate of a worker's start: what it says, when it ends the start, and how it holds it."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki.preflight.expect import Expectation
from tasuki.preflight.gate import gate
from tasuki.preflight.local import Subject
from tasuki.preflight.pause import TOKEN_VARIABLE, Pause, hold
from tasuki.preflight.result import Check, PreflightError, as_json, as_table, fail, ok, warn

CHECKS = [ok("good", "all of it"), warn("slow", "half", "all", "wait"), fail("bad", "0", "1", "do")]
DEADLINE_S = 30.0


@pytest.fixture
def broken(tmp_path: Path) -> Subject:
    """A worker whose model folder is empty."""
    return Subject(device="cpu", model=tmp_path)


def test_a_failure_ends_a_strict_start_and_is_left_for_kubernetes(
    broken: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = tmp_path / "termination-log"
    with pytest.raises(PreflightError, match=r"preflight \(and 1 more, see the log\): model"):
        gate(broken, strict=True, termination_log=message)
    first, second = message.read_text().splitlines()
    assert first.startswith("model config: ") and second.startswith("model weights: ")
    assert "preflight: fail: model config" in caplog.text
    assert PreflightError.exit_code == 78


def test_a_failure_is_only_logged_otherwise(
    broken: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = tmp_path / "termination-log"
    with caplog.at_level(logging.INFO):
        gate(broken, strict=False, termination_log=message)
    assert "preflight: fail: model config" in caplog.text and ", 2 failed," in caplog.text
    assert not message.exists()


def test_a_report_is_for_people_and_for_machines() -> None:
    lines = as_table(CHECKS).splitlines()
    assert [line[:4] for line in lines if line[0] != " "] == ["ok  ", "warn", "fail"]
    assert sum("remedy: " in line for line in lines) == 2
    checks = json.loads(as_json(CHECKS))["checks"]
    assert checks[2]["name"] == "bad" and checks[2]["remedy"] == "do"


@pytest.fixture
def pause() -> Iterator[Callable[[str], Pause]]:
    """Starts the server of a pause with a token, or without one."""
    servers: list[Pause] = []

    def start(token: str) -> Pause:
        servers.append(Pause(("127.0.0.1", 0), CHECKS, token))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _ask(server: Pause, method: str, path: str, token: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.server_address[1]}{path}",
        method=method,
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def test_a_pause_ends_when_it_is_told(pause: Callable[[str], Pause]) -> None:
    server = pause("")
    status, body = _ask(server, "GET", "/")
    assert (status, len(json.loads(body)["checks"])) == (200, len(CHECKS))
    assert _ask(server, "POST", "/")[0] == 404
    assert not server.ended.is_set()
    assert _ask(server, "POST", "/exit")[0] == 200
    assert server.ended.wait(DEADLINE_S)


def test_a_pause_that_others_can_reach_requires_its_token(pause: Callable[[str], Pause]) -> None:
    server = pause("secret")
    for wrong in ("", "secre", "secrets"):
        assert _ask(server, "POST", "/exit", wrong)[0] == 401
        assert _ask(server, "GET", "/", wrong)[0] == 401
    assert not server.ended.is_set()
    assert _ask(server, "POST", "/exit", "secret")[0] == 200
    assert server.ended.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("host", "token", "named"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:"),
        ("0.0.0.0", "from outside", "http://0.0.0.0:"),
        ("::1", "", "http://[::1]:"),
        ("::", "from outside", "http://[::]:"),
    ],
)
def test_only_beyond_loopback_a_token_is_asked_for(
    host: str,
    token: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens: list[str] = []

    class Recorded(Pause):
        def __init__(self, address: tuple[str, int], checks: list[Check], token: str) -> None:
            tokens.append(token)
            super().__init__(address, checks, token)
            self.ended.set()

    monkeypatch.setenv(TOKEN_VARIABLE, "from outside")
    monkeypatch.setattr("tasuki.preflight.pause.Pause", Recorded)
    hold(CHECKS, host)
    assert tokens == [token]
    assert named in caplog.text


def test_a_pause_on_no_address_of_ours_is_refused() -> None:
    with pytest.raises(PreflightError, match="--pause-host"):
        hold(CHECKS, "192.0.2.77")


@pytest.mark.parametrize(
    ("said", "bytes_per_s"),
    [
        ("20GB/s", 20e9),
        ("100Gb/s", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("1.5MiB/s", 1.5 * 1024**2),
        ("7B/s", 7.0),
    ],
)
def test_a_rate_is_expected_of_every_peer(said: str, bytes_per_s: float) -> None:
    assert Expectation.of(said).of_peer("a:1") == pytest.approx(bytes_per_s)


def test_what_was_measured_before_is_expected_again(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(as_json([ok("transfer a:1", "10 GB/s", bytes_per_s=10e9), *CHECKS]))
    expected = Expectation.of(str(before))
    assert (expected.of_peer("a:1"), expected.of_peer("b:1")) == (8e9, 0.0)
    [unknown] = expected.unknown(["a:1", "b:1", "b:1"])
    assert (unknown.name, unknown.status, unknown.expected) == ("expect b:1", "warn", "one of a:1")
    before.write_text(as_json(CHECKS))
    with pytest.raises(PreflightError, match="has no transfer from a peer"):
        Expectation.of(str(before))
    rows = [{"payload_bytes": 1, "block_bytes": 1, "bytes_per_s": rate} for rate in (3e9, 5e9)]
    before.write_text(json.dumps({"rows": rows}))  # of linkbench
    assert Expectation.of(str(before)).of_peer("b:1") == 4e9
    assert Expectation.of(str(before)).unknown(["b:1"]) == []
    assert Expectation.of(None).of_peer("a:1") == 0.0
    other = tmp_path / "other.json"
    for content in ("{", "[1]", "{}", '{"checks": [{"name": 1, "figures": {"bytes_per_s": 1}}]}'):
        other.write_text(content)
        with pytest.raises(PreflightError, match=r"--expect is .* \(a file of another kind\)"):
            Expectation.of(str(other))
    for wrong in ("20 apples/s", "1.2.3GB/s", str(tmp_path)):
        with pytest.raises(PreflightError, match=r"--expect is .* \(no rate, and no file: [A-Z]"):
            Expectation.of(wrong)
