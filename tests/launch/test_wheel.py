"""The wheel of `make wheel`: what it says of itself, and that it serves where it is installed."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client import Client
from support.processes import REPOSITORY
from support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.system]

MOST_BYTES = 15_000_000  # a build with debug information has several times as many
BUILD_S = 1800
COMMAND_S = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    scripts = Path(sys.executable).parent  # maturin is there
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [REPOSITORY / "tools" / "build_wheel.sh", folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, which finds the dependencies in this one.

    This checkout is installed here for editing: by a line of a .pth file, which the new
    environment does not read.
    """
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", str(home))
    run(str(home / "bin" / "pip"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (home / "lib").glob("python*/site-packages")
    ours = packages / "dependencies.pth"
    ours.write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return home / "bin"


def run(*command: str) -> str:
    """What a command prints that must end well."""
    done = subprocess.run(
        command, env=bare(), capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def bare() -> dict[str, str]:
    """An environment without this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_is_small_and_for_every_python_and_many_linuxes(wheel: Path) -> None:
    name = re.fullmatch(r"tasuki-(.+)-cp311-abi3-manylinux_2_(\d+)_x86_64\.whl", wheel.name)
    assert name, wheel.name
    # No older glibc than it requires, and not the newest of all.
    assert 17 <= int(name[2]) <= 39
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        assert "tasuki/_native.abi3.so" in names and "tasuki/py.typed" in names
        assert not [each for each in names if each.endswith(".pyc") or "/tests/" in each]


def test_the_wheels_metadata_is_complete(wheel: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as files:
        (found,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(files.read(found))
    assert said["Name"] == "tasuki" and said["Summary"] == project["description"]
    assert said["License-Expression"] == "Apache-2.0" and said["License-File"] == "LICENSE"
    assert set(said.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert said["Description-Content-Type"].startswith("text/markdown")
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"## {said['Version']}" in changes, "the changelog names the version"


def test_the_command_runs_where_the_wheel_is_installed(installed: Path) -> None:
    assert "serve" in run(str(installed / "tasuki"), "--help")
    where = run(str(installed / "python"), "-c", "import tasuki; print(tasuki.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)


@pytest.fixture
def server(installed: Path, tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    """The log of `tasuki serve` with the tiny model, run from the wheel."""
    log = tmp_path / "serve.log"
    command = [installed / "tasuki", "serve", "--model", tiny_model, "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--kv-memory", "64000000", "--dtype", "float32", "--device", "cpu"],
            env=bare() | {"TASUKI_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        yield log
    finally:
        process.terminate()
        assert process.wait(timeout=COMMAND_S) == 0, log.read_text()


def test_the_wheel_serves(server: Path) -> None:
    found = until(
        lambda: re.search(r"at (http://127\.0\.0\.1:\d+)$", server.read_text(), re.M),
        lambda: f"a URL in\n{server.read_text()}",
        deadline_s=COMMAND_S,
    )
    client = Client(found[1], "")
    model = client.http.get("/v1/models").json()["data"][0]["id"]
    answer = client.http.post(
        "/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 3}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] >= 1
