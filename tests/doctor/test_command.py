"""Options of `tasuki doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.pictures import worker
from typer.testing import CliRunner

from tasuki.cli import app
from tasuki.doctor.command import doctor
from tasuki.doctor.look import Look
from tasuki.doctor.picture import Fleet
from tasuki.doctor.report import exit_code
from tasuki.doctor.result import DoctorError, Finding, Outcome


def test_an_expectation_that_holds_for_single_peers_is_refused(tmp_path: Path) -> None:
    """`tasuki preflight --expect` takes such a file; here no link would be judged by it."""
    file = tmp_path / "preflight.json"
    checks = [{"name": "transfer 10.0.0.2:7000", "figures": {"bytes_per_s": 2e10}}]
    file.write_text(json.dumps({"checks": checks}))
    for said in (str(file), "0GB/s"):
        with pytest.raises(DoctorError, match="no rate that every link must reach"):
            doctor(["http://127.0.0.1:1"], expect=said)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["doctor", "http://127.0.0.1:1"], "--window-s"),
        (["doctor", "http://127.0.0.1:1"], "--probe-budget-s"),
        (["doctor", "http://127.0.0.1:1"], "--timeout-s"),
        (["preflight"], "--timeout-s"),
    ],
)
def test_no_time_is_without_end(command: list[str], option: str) -> None:
    done = CliRunner().invoke(app, [*command, option, "inf"])
    assert done.exit_code == 2 and f"'{option}'" in done.output, done.output


@pytest.mark.parametrize("no_probes", [False, True])
def test_fleet_certificates_that_cannot_be_read_are_refused(
    tmp_path: Path, no_probes: bool
) -> None:
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    with pytest.raises(DoctorError, match=rf"--fleet-ca {ca} cannot be used: .*No such file"):
        doctor(
            ["http://127.0.0.1:1"],
            no_probes=no_probes,
            fleet_cert=cert,
            fleet_key=key,
            fleet_ca=ca,
        )


def test_a_log_that_cannot_be_read_is_refused_before_the_look(tmp_path: Path) -> None:
    log = tmp_path / "none.log"
    with pytest.raises(DoctorError, match=rf"--request-log {log} cannot be read \(No such file"):
        doctor(["http://127.0.0.1:1"], request_log=log)


@pytest.mark.parametrize("json_wanted", [False, True])
@pytest.mark.parametrize(("load", "code"), [(25.0, 1), (0.0, 2)])
def test_a_log_that_cannot_be_replayed_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_wanted: bool, load: float, code: int
) -> None:
    idle = {"running": 1.0, "waiting": 0.0, "kv_used": 0.1}
    waits = {"running": 4.0, "waiting": load, "kv_used": 0.1}
    prefill = worker("p", *[waits] * 6, role="prefill")
    fleet = Fleet([prefill, worker("d", *[idle] * 6, role="decode")])
    monkeypatch.setattr(Look, "at", lambda addresses, settings: Look(settings, fleet))

    def fail(log: Path, prefill: int, decode: int) -> str:
        raise DoctorError(f"{log} cannot be replayed: it has no request")

    monkeypatch.setattr("tasuki.doctor.advice.advice", fail)
    log = tmp_path / "requests.log"
    log.write_text("")
    words = ["doctor", "http://127.0.0.1:1", "--request-log", str(log)]
    done = CliRunner().invoke(app, [*words, "--json"] if json_wanted else words)
    assert ("requests wait for prefill" in done.stdout) == bool(load), done.stdout
    assert done.stderr == f"tasuki: error: {log} cannot be replayed: it has no request\n"
    assert done.exit_code == code


@pytest.mark.parametrize("key", ["secret\n", "sécret"])
def test_a_key_that_no_header_carries_is_refused_and_not_told(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for said in (key, None):
        with pytest.raises(DoctorError, match="correct --api-key, or OPENAI_API_KEY") as error:
            doctor(["http://127.0.0.1:1"], api_key=said)
        assert key.strip() not in str(error.value)


def test_a_look_that_saw_nothing_is_not_called_healthy() -> None:
    found = Finding("it is slow", (), "start it again", ("w",))
    nothing = {"workers": Outcome(), "ratio": Outcome(unseen=["one role"])}
    for outcome, code in (
        (Outcome(looked_at=["w"]), 0),
        (Outcome(findings=[found]), 1),
        (Outcome(), 2),
    ):
        assert exit_code({**nothing, "errors": outcome}) == code
