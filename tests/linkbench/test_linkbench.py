"""A link measured between two processes: numbers, checks, files and comparisons."""

from __future__ import annotations

import errno
import json
import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support.processes import has_ended
from support.waiting import until
from typer.testing import CliRunner

from tasuki.bench.header import write_result
from tasuki.cli import app
from tasuki.kv.measure import Blocks
from tasuki.kv.ways import Way
from tasuki.linkbench import report, run
from tasuki.linkbench.points import LinkbenchError, Point
from tasuki.linkbench.run import Measured, Row, Setup, faster
from tasuki.linkbench.source import Source as KvSource
from tasuki.linkbench.source import SourceClient
from tasuki.plot.figures.registry import figures
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options

pytestmark = pytest.mark.system

POINTS = [Point(4096, 16), Point(65_536, 1), Point(65_536, 4)]
SETUP = Setup(repeats=3)


@pytest.fixture(scope="module", autouse=True)
def unhurried_source() -> Iterator[None]:
    """A source imports torch, which takes minutes at low priority on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_START_S", 600.0)
        yield


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    yield run.measure(POINTS, SETUP)


def test_every_point_is_measured_beside_its_rivals(measured: Measured) -> None:
    assert [row.point for row in measured.rows] == POINTS
    for row in measured.rows:
        assert len(row.seconds) == len(row.post_s) == 3
        assert all(0 < post <= whole for post, whole in zip(row.post_s, row.seconds, strict=True))
        assert report.line(row).split()[-5] == f"{row.bytes_per_s / 1e9:.2f}"
    assert set(measured.rivals) == {65_536, 262_144}
    assert all(found.keys() == {"memcpy", "socket"} for found in measured.rivals.values())
    assert measured.way is not None
    assert measured.way.kind in ("shm", "tcp")


def test_shared_memory_is_measured_and_named() -> None:
    setup = replace(SETUP, transport="shm")
    found = run.measure(POINTS, setup)
    assert [row.point for row in found.rows] == POINTS
    assert (str(found.way), found.warning) == ("shm (memfd)", "")
    assert all("memcpy" in rates for rates in found.rivals.values())


def test_sockets_are_measured_and_shared_memory_is_named() -> None:
    found = run.measure(POINTS, replace(SETUP, transport="tcp"))
    assert [row.point for row in found.rows] == POINTS
    assert str(found.way) == "tcp (socket/127.0.0.1)"
    assert found.warning.endswith("--transport nixl-ucx or shm")


def test_a_result_is_read_again_compared_and_drawn(measured: Measured, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    write_result(path, report.result(measured, SETUP))
    baseline = report.read_baseline(path, POINTS, SETUP)
    lines, lost = report.against(baseline, measured)
    assert (len(lines), lost) == (3, False)
    slow = [replace(row, seconds=tuple(2 * s for s in row.seconds)) for row in measured.rows]
    lines, lost = report.against(baseline, Measured(slow, way=Way.of("tcp/lo")))
    assert lost and all("slower than 0.9" in line for line in lines[:3])
    if measured.way != Way.of("tcp/lo"):
        assert lines[3:] == [f"way tcp (tcp/lo), was {measured.way}"]
    with pytest.raises(LinkbenchError, match="none of these"):
        report.read_baseline(path, [Point(64, 1)], SETUP)
    [figure] = figures(load([Source(path)]), Options(), "links")
    rate, posting = figure.panels
    assert [curve.name for curve in rate.curves][-2:] == ["memcpy", "socket"]
    assert len(posting.curves) == 2, "two payloads"
    saved = json.loads(path.read_text())
    assert saved["way"] == str(measured.way)
    assert [row["descriptors"] for row in saved["rows"]] == [16, 1, 4]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, "rows that are none of this command: measure it again"),
        ([3], "rows that are none"),
        ([{"payload_bytes": 65_536}], "rows that are none"),
        ([{"payload_bytes": 9, "block_bytes": 9, "bytes_per_s": None}], "rows that are none"),
        ([{"payload_bytes": 9, "block_bytes": 8, "bytes_per_s": 0}], "a rate of 0 bytes/s for 9 b"),
    ],
)
def test_a_baseline_without_rates_is_refused(rows: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    saved = report.result(Measured([Row(Point(4096, 16), (1.0,), (0.1,))]), SETUP)
    write_result(path, {**saved, "rows": rows})
    with pytest.raises(LinkbenchError, match=says):
        report.read_baseline(path, POINTS, SETUP)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (Setup(transport="shm"), "with transport nixl-ucx, this run uses transport shm"),
        (Setup(devices=("cpu", "cuda:0")), "devices cpu, cpu, this run uses devices cpu, cuda:0"),
        (Setup(peer="10.0.0.1:7900"), "with hosts 1, this run uses hosts 2"),
    ],
)
def test_a_run_of_another_kind_is_not_compared(setup: Setup, says: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    row = Row(Point(4096, 16), (1.0,), (0.1,))
    write_result(path, report.result(Measured([row]), Setup(transport="nixl")))
    assert report.read_baseline(path, [row.point], Setup()).rates == {(65_536, 4096): 65_536.0}
    with pytest.raises(LinkbenchError, match=f"{says}: repeat it with the same"):
        report.read_baseline(path, [row.point], setup)
    done = CliRunner().invoke(app, ["linkbench", "--against", str(path), "--transport", "shm"])
    assert isinstance(done.exception, LinkbenchError)
    assert done.stdout == "", "nothing was measured"


def test_wrong_bytes_are_an_error_not_a_number(measured: Measured) -> None:
    blocks = Blocks(4096, 32)
    words = blocks.memory.view(-1).view(torch.int64)
    words.copy_(torch.arange(len(words)))
    words.view(16, 2, 512)[:, 1] = 0
    run._check(Point(4096, 16), blocks)
    for place in (5, 512 + 5):  # in a block that was read, and in one that was not
        words[place] ^= 1 << 40
        with pytest.raises(LinkbenchError, match="did not arrive"):
            run._check(Point(4096, 16), blocks)
        words[place] ^= 1 << 40


def test_a_source_ends_with_its_reader_however_that_ends() -> None:
    code = """
import multiprocessing, signal
from tasuki.linkbench.source import be_source
context = multiprocessing.get_context("spawn")
pipe, theirs = context.Pipe()
child = context.Process(target=be_source, args=(theirs, "cpu", "tcp"), daemon=True)
child.start()
print(child.pid, pipe.recv(), flush=True)
signal.pause()
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        number, port = map(int, reader.stdout.readline().split())
        source = psutil.Process(number)
        assert port > 0
        reader.terminate()
    until(lambda: has_ended(source), "the end of the source")


def test_the_source_ends_silently_with_a_reader_that_ended_before_it_began() -> None:
    code = """
import multiprocessing, os, signal
from tasuki.linkbench.source import be_source
context = multiprocessing.get_context("spawn")
pipe, theirs = context.Pipe()
child = context.Process(target=be_source, args=(theirs, "cpu", "tcp"), daemon=True)
child.start()
theirs.close()
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
signal.pause()
"""
    words = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, text=True, stdout=pipe, stderr=pipe) as reader:
        assert reader.stdout is not None
        source = psutil.Process(int(reader.stdout.readline()))
        reader.terminate()
        reader.wait(30)
        source.send_signal(signal.SIGCONT)
        assert reader.communicate(timeout=120) == ("", "")  # until the source has closed them too
    until(lambda: has_ended(source), "the end of the source")


def test_ctrl_c_is_for_the_reader_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with run._source_of(SETUP):
        (source,) = multiprocessing.active_children()
        status = Path(f"/proc/{source.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert ignored & 1 << (signal.SIGINT - 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_nobody_at_the_address_is_said_with_the_remedy() -> None:
    with pytest.raises(LinkbenchError, match=r"tasuki linkbench --listen 127\.0\.0\.1:1"):
        SourceClient("127.0.0.1:1", timeout_s=5.0)


@pytest.mark.parametrize("side", [[], ["--listen", "127.0.0.1:0"]])
def test_an_unknown_transport_is_refused_by_name(side: list[str]) -> None:
    done = CliRunner().invoke(app, ["linkbench", "--transport", "foo", *side])
    assert isinstance(done.exception, LinkbenchError)
    assert str(done.exception).startswith("--transport is 'foo': use one of nixl-ucx, host-staged,")


@pytest.mark.parametrize("option", ["--peer", "--save", "--against"])
def test_a_side_that_is_read_takes_no_option_of_the_reader(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.linkbench.source.Source", lambda *_: pytest.fail("it listens"))
    done = CliRunner().invoke(app, ["linkbench", "--listen", "127.0.0.1:0", option, "127.0.0.1:1"])
    assert isinstance(done.exception, LinkbenchError), done.exception
    assert str(done.exception).startswith(f"{option} is given with --listen, which measures noth")


def test_an_address_that_cannot_be_had_is_said_with_the_remedy() -> None:
    with pytest.raises(LinkbenchError, match=r"cannot listen on 192\.0\.2\.1:7 \(.*another --lis"):
        KvSource("192.0.2.1", 7, "cpu", "shm")


def _line_said(capfd: pytest.CaptureFixture[str]) -> str:
    """What is on stderr up to the end of a line: `print` writes the line and its end apart."""
    said: list[str] = []

    def whole() -> bool:
        said.append(capfd.readouterr().err)
        return said[-1].endswith("\n")

    until(whole, "a line on stderr")
    return "".join(said)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_source_without_memory_says_why_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    source = KvSource("127.0.0.1", 0, "cpu", "no such transport")
    threading.Thread(target=source.serve, daemon=True).start()
    client = SourceClient(f"127.0.0.1:{source.port}")
    with pytest.raises(LinkbenchError, match="the source has ended: its own words say why"):
        client.pool(4096)
    client.close()
    said = _line_said(capfd)
    assert said.startswith("tasuki: error: ") and "Traceback" not in said, said


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1", b"{}", b"7", b'{"ask": "pool", "bytes": -1}', b"\xff"]
)
def test_a_stranger_is_told_in_one_line(line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    source = KvSource("127.0.0.1", 0, "cpu", "tcp")
    threading.Thread(target=source.serve, daemon=True).start()
    with socket.create_connection(("127.0.0.1", source.port), timeout=10.0) as stranger:
        stranger.sendall(line + b"\n")
        assert stranger.recv(1) == b""
    said = _line_said(capfd)
    assert said.startswith("tasuki: error: a connection that begins with ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("accept", OSError(errno.EMFILE, "no descriptor"), "cannot be accepted: .*no descriptor"),
        ("accept", OSError(errno.ECONNABORTED, "it left"), "cannot be accepted: .*it left"),
        ("start", RuntimeError("can't start new thread"), "cannot be served: can't start"),
    ],
)
def test_a_reader_that_cannot_be_served_does_not_end_the_source(
    where: str,
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = KvSource("127.0.0.1", 0, "cpu", "tcp")
    place = socket.socket if where == "accept" else threading.Thread
    real, failed = getattr(place, where), threading.Event()

    def fail_once(this: object) -> object:
        if failed.is_set() or (where == "start" and this is serving):
            return real(this)
        failed.set()
        raise error

    serving = threading.Thread(target=source.serve, daemon=True)
    monkeypatch.setattr(place, where, fail_once)
    serving.start()
    if where == "start":
        SourceClient(f"127.0.0.1:{source.port}").close()
        until(failed.is_set, "the failure")
    client = SourceClient(f"127.0.0.1:{source.port}", timeout_s=10.0)
    client.stream(bytearray(5))
    client.close()
    assert failed.is_set() and re.search(says, caplog.text)


def test_a_faster_way_than_the_one_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "rdma_devices", list)
    tcp, cma, ipc = (Way.of(f"{lane}/x") for lane in ("tcp", "cma", "cuda_ipc"))
    assert "--transport nixl-ucx" in faster(tcp, replace(SETUP, transport="mooncake"))
    gpus = replace(SETUP, devices=("cuda:0", "cuda:1"))
    assert "shared memory" in faster(tcp, SETUP)
    assert "--transport shm" in faster(cma, SETUP)
    shm = replace(SETUP, transport="shm")
    assert faster(cma, shm) == faster(ipc, gpus) == faster(None, gpus) == ""
    assert "CUDA IPC" in faster(tcp, gpus)
    far = replace(SETUP, peer="10.0.0.1:7000")
    assert "--transport tcp is faster than UCX" in faster(tcp, far)
    for other in (replace(far, transport="tcp"), replace(far, devices=gpus.devices)):
        assert faster(tcp, other) == ""
    assert faster(tcp, replace(far, transport="mooncake")) == ""
    monkeypatch.setattr(run, "rdma_devices", lambda: ["mlx5_0:1"])
    assert "tasuki preflight" in faster(tcp, far)


@pytest.mark.parametrize(("ends", "why"), [(True, "reset by peer"), (False, "timed out")])
def test_a_source_that_is_lost_is_said_in_words(ends: bool, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = SourceClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
        reader, _ = listener.accept()
        with reader:
            if ends:  # as a process that is killed: with bytes that it has not read
                client._ask("pool", 4096)
                reader.recv(1)
                reader.close()
            with pytest.raises(LinkbenchError, match=f"connection to the source broke.*{why}"):
                client.pool(4096)
