"""Fixtures of the whole-system tests.

`deployment` (the real model) and `tiny` (random weights, fast) are shared: one
prefill and one decode worker in float32 behind one router, for the whole
session. `deploy` makes others. Every deployment ends with the idle integrity
check: nothing running, no block referenced, leased or in quarantine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Children inherit these; set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():  # no GPU: our Triton kernels run on the CPU, interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
from support import models, searches
from support.deployment import Deployment, Options
from support.kinds import Kinds
from support.lanes import LanePlugin
from support.processes import Process
from support.serving import Serve
from support.times import TimeByFolder


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Registers our plugins; gives Hypothesis the seed of this run if there is one."""
    config.pluginmanager.register(Kinds())
    config.pluginmanager.register(TimeByFolder())
    config.pluginmanager.register(LanePlugin())
    with contextlib.suppress(ImportError):
        searches.set_up_hypothesis(config)


def pytest_report_header() -> str | None:
    """Names the seed of this run, if it was asked for."""
    if searches.FIRST_SEED is None:
        return None
    return f"random searches: {searches.SEED_VARIABLE}={searches.FIRST_SEED}"


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder; fetched and converted if it is not there yet."""
    from tasuki.models.fetch import resolve_model

    return Path(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a tiny random-weight model of an architecture."""
    base = tmp_path_factory.mktemp("models")
    return lambda architecture: models.save_tiny_model(base / architecture, architecture)


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Callable[[str], Path]) -> Path:
    """The folder of the tiny Llama."""
    return tiny_models("llama")


@pytest.fixture(scope="session")
def deployment(
    default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """1 prefill + 1 decode with the default model in float32, for the whole session."""
    options = Options(
        default_model,
        prefill=1,
        decode=1,
        worker=("--max-model-len", "2048", "--kv-memory", "400000000"),
    )
    yield from _session(options, tmp_path_factory.mktemp("deployment"))


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill + 1 decode with the tiny Llama in float32, for the whole session."""
    options = Options(tiny_model, prefill=1, decode=1, worker=("--kv-memory", "64000000"))
    yield from _session(options, tmp_path_factory.mktemp("tiny"))


def _session(options: Options, directory: Path) -> Iterator[Deployment]:
    deployment = Deployment.launch(options, directory)
    try:
        yield deployment
        deployment.shut_down()
    finally:
        deployment.destroy()


@pytest.fixture(scope="module")
def deploy_for_module(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Options], Deployment]]:
    """Starts deployments that last for the module's tests."""
    yield from _factory(lambda: tmp_path_factory.mktemp("deploy"))


@pytest.fixture
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Options], Deployment]]:
    """Starts deployments that end, with the idle check, after the test."""
    yield from _factory(lambda: tmp_path_factory.mktemp("deploy"))


def _factory(directory: Callable[[], Path]) -> Iterator[Callable[[Options], Deployment]]:
    started: list[Deployment] = []

    def launch(options: Options) -> Deployment:
        started.append(Deployment.launch(options, directory()))
        return started[-1]

    try:
        yield launch
        for deployment in started:
            deployment.shut_down()
    finally:
        for deployment in started:
            deployment.destroy()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts `tasuki serve`, as a user would; ends what a test leaves."""
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))  # logs are kept there
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        log = tmp_path / f"serve-{len(started)}.log"
        started.append(Process("serve", ["serve", *arguments], log))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        if process.exit_code() is None:
            children = process.descendants()
            process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
