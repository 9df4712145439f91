"""Result files say where they come from, and an edit afterwards is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.bench import provenance
from tasuki.bench.header import header, write_result

pytestmark = pytest.mark.system

CHECKOUT = Path(__file__).resolve().parents[2]
CHECK = CHECKOUT / "tools" / "check_results.py"


def check(*paths: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CHECK, *paths], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.fixture
def result(tmp_path: Path) -> Path:
    described = header("steps", label="a", topology=None, model="m")
    write_result(tmp_path / "result.json", described | {"steps": [1.5, 2.25, float("inf")]})
    return tmp_path / "result.json"


def test_a_written_result_passes_and_says_where_it_comes_from(result: Path) -> None:
    assert check(result) == (0, "")
    content = json.loads(result.read_text())
    assert content["versions"]["torch"]
    assert content["machine"]["cores"] > 0
    if content["git_revision"] is not None:  # a checkout, not an archive
        assert content["git_dirty"] in (True, False)


@pytest.mark.parametrize("field", ["steps", "command", "git_dirty", "machine"])
def test_an_edited_result_is_found(result: Path, field: str) -> None:
    content = json.loads(result.read_text())
    content[field] = "edited"
    result.write_text(json.dumps(content))
    code, said = check(result)
    assert code == 1
    assert "was edited after it was written: run its command again" in said


def test_a_file_that_no_program_wrote_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"speed": 9000}')
    (tmp_path / "broken.json").write_text("{")
    code, said = check(tmp_path / "mine.json", tmp_path / "broken.json")
    assert code == 1
    assert "mine.json has no digest" in said
    assert "broken.json is not JSON" in said


def test_a_result_without_its_origin_is_found(tmp_path: Path) -> None:
    write_result(tmp_path / "bare.json", {"steps": []})
    code, said = check(tmp_path / "bare.json")
    assert code == 1
    assert "bare.json lacks schema, kind" in said


def test_a_script_of_the_checkout_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    script = CHECKOUT / "benchmarks" / "gpu" / "steps.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--only", "decode"])
    assert provenance.own_command() == ["python", "benchmarks/gpu/steps.py", "--only", "decode"]
    monkeypatch.setattr(sys, "argv", ["/anywhere/bin/tasuki", "bench", "batch"])
    assert provenance.own_command() == ["tasuki", "bench", "batch"]
    monkeypatch.setattr(sys, "argv", ["tasuki", "/a/model", "--output", "/anywhere/it.json"])
    assert provenance.own_command() == ["tasuki", "/a/model", "--output", "it.json"]


def test_no_key_gets_into_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["--api-key", "K1", "--api-key=K2", "--header", "X:K3", "--seed", "1"]
    loads = ["--load", "a --api-key K4 --seed 2", "--load=b --header='X: K5'", "--load", "c -k '"]
    each = ["--each", "api_key=K6,K7", "--each=header=X:K8", "--each", "seed=1,2"]
    monkeypatch.setattr(sys, "argv", ["/bin/tasuki", "bench", "sweep", *said, *loads, *each])
    hidden = ["--api-key", "***", "--api-key=***", "--header", "***", "--seed", "1"]
    shown = ["--load", "a --api-key '***' --seed 2", "--load=b '--header=***'", "--load", "***"]
    shown += ["--each", "api_key=***", "--each=header=***", "--each", "seed=1,2"]
    assert provenance.own_command() == ["tasuki", "bench", "sweep", *hidden, *shown]
