"""Version 1 of the wire beside version 2: each side refuses in a sentence that names both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.deployment import START_DEADLINE_S
from support.processes import Process, environment
from support.two_revisions import HEAD, Revision
from support.waiting import free_port, until

pytestmark = [pytest.mark.upgrade, pytest.mark.system, pytest.mark.timeout(300)]

Sides = tuple[Revision, Revision]
HELLO = """
import sys
import grpc
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.v1 import kv_pb2, kv_pb2_grpc

hello = kv_pb2.Hello(protocol_version=PROTOCOL_VERSION, engine_id="decode", identity=bytes(16))
stub = kv_pb2_grpc.KvStub(grpc.insecure_channel(sys.argv[1]))
print(next(stub.Handoff(iter([kv_pb2.FromDecode(hello=hello)]))).hello.refusal)
"""
"""What a decode worker says first to a prefill worker; prints the answer."""


@pytest.fixture(params=["first-and-head", "head-and-first"])
def sides(request: pytest.FixtureRequest, first: Revision) -> Sides:
    """The revision of a worker, and that of who comes to it."""
    return (first, HEAD) if request.param == "first-and-head" else (HEAD, first)


@pytest.fixture
def worker(sides: Sides, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """A prefill worker, and its address."""
    port = str(free_port())
    arguments = ["worker", "--model", str(tiny_model), "--role", "prefill", "--name", "w"]
    arguments += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    arguments += ["--kv-memory", "64000000"]
    process = Process("worker", arguments, tmp_path / "worker.log", checkout=sides[0].folder)
    process.start()
    try:
        process.wait_for_line("ready ", deadline_s=START_DEADLINE_S)
        assert sides[0].runs_in(process.pid)
        yield process, f"127.0.0.1:{port}"
    finally:
        process.kill()


def test_a_router_refuses_the_worker(
    sides: Sides, worker: tuple[Process, str], tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ["router", "--host", "127.0.0.1", "--port", "0", "--model", str(tiny_model)]
    arguments += ["--readiness-grace-s", "0", "--worker", worker[1]]
    router = Process("router", arguments, tmp_path / "router.log", checkout=sides[1].folder)
    router.start()
    try:
        url = router.wait_for_line("listening on ", deadline_s=START_DEADLINE_S)
        assert sides[1].runs_in(router.pid)
        theirs, ours = (1, 2) if sides[1] == HEAD else (2, 1)
        words = f"the worker speaks protocol version {theirs}, this router {ours}: run one version"
        until(lambda: words in router.output(), router.tail)
        print(next(line for line in router.output().splitlines() if words in line))
        assert httpx.get(f"{url}/ready").status_code == 503
        assert worker[0].exit_code() is None
    finally:
        router.kill()


def test_a_prefill_worker_refuses_the_decode_worker(
    sides: Sides, worker: tuple[Process, str]
) -> None:
    said = subprocess.run(
        [sys.executable, "-c", HELLO, worker[1]],
        env=environment(sides[1].folder),
        cwd=sides[1].folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    print(said.strip())
    theirs, ours = (1, 2) if sides[0] == HEAD else (2, 1)
    place = "at the prefill worker" if sides[0] == HEAD else "here"  # as earlier ones have it
    assert f"protocol version is {theirs} at the decode worker and {ours} {place}" in said
