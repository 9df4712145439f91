"""The places of workers on a Ray cluster that is a fake: its placement groups are always there."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("ray", reason="ray is not installed: there is no wheel for this Python")
from tasuki.launch import on_ray, ray_process
from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.errors import LaunchError
from tasuki.launch.placement import Node
from tasuki.launch.supervisor import Stop, StoppedError, Supervisor
from tasuki.launch.topology import ProcessSpec
from tasuki.launch.worker_set import WorkerSet
from tasuki.launch.workers_file import WorkersFile

MODEL = Path("/models/m")


class FakeGroup:
    """A placement group."""

    def __init__(self, cluster: FakeCluster, bundles: list[dict[str, float]]) -> None:
        self.id = object()
        self.cluster, self.bundles = cluster, bundles

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return self.cluster.free_cpus() >= 0


class FakeCluster:
    """One node; groups are held from when they are made."""

    def __init__(self, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpus = cpus
        self.groups: list[FakeGroup] = []
        monkeypatch.setattr(on_ray, "_join", lambda on: None)
        monkeypatch.setattr(on_ray, "_nodes", lambda: [Node("10.0.0.1", cpus, 0)])
        monkeypatch.setattr(on_ray, "placement_group", self.make)
        monkeypatch.setattr(on_ray, "remove_placement_group", self.groups.remove)
        monkeypatch.setattr(on_ray, "placement_group_table", lambda group: {})

    def make(self, bundles: list[dict[str, float]], **_: Any) -> FakeGroup:
        self.groups.append(FakeGroup(self, bundles))
        return self.groups[-1]

    def free_cpus(self) -> float:
        held = sum(bundle["CPU"] for group in self.groups for bundle in group.bundles)
        return self.cpus - held


def engine(topology: Topology, **more: Any) -> on_ray.RayEngine:
    config = ServeConfig(model="m", on="ray", topology=topology, startup_timeout_s=0.0, **more)
    return on_ray.RayEngine(config)


def names(specs: tuple[Any, ...]) -> list[str]:
    return [spec.name for spec in specs]


def no_wait(seconds: float) -> None:
    raise AssertionError(f"nothing to wait for, asked for {seconds} s")


def test_a_worker_that_joins_has_the_place_of_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = FakeCluster(4, monkeypatch)
    made = engine(Topology(1, 3))
    made.place(MODEL, "float32", None, no_wait)
    for _ in range(2):
        made.release(["decode-1", "decode-2"])
        assert cluster.free_cpus() == 0, "Ray takes no bundle back from a group"
        back = made.place(
            MODEL, "float32", [("decode-1", "decode"), ("prefill-1", "prefill")], no_wait
        )
        assert names(back) == ["decode-1", "prefill-1"]
        made.release(["prefill-1"])
        made.place(MODEL, "float32", [("decode-2", "decode")], no_wait)
    assert len(cluster.groups) == 1
    made.release(["prefill-0", "decode-0", "decode-1", "decode-2"])
    assert not cluster.groups


def test_what_has_no_room_leaves_the_freed_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(2, monkeypatch)
    made = engine(Topology(1, 1))
    made.place(MODEL, "float32", None, no_wait)
    made.release(["decode-0"])
    two = [("decode-0", "decode"), ("decode-1", "decode")]
    with pytest.raises(LaunchError, match="no room for decode-1"):
        made.place(MODEL, "float32", two, no_wait)
    assert names(made.place(MODEL, "float32", two[:1], no_wait)) == ["decode-0"]
    assert len(cluster.groups) == 1


def test_other_spreads_and_sizes_get_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(9, monkeypatch)
    spread = Topology(1, 2).spread_as(["decode=spread", "prefill=spread"])
    made = engine(spread, tensor_parallel=(("mixed", 2),))
    made.place(MODEL, "float32", None, no_wait)
    made.release(["decode-1"])
    made.place(MODEL, "float32", [("prefill-1", "prefill"), ("mixed-0", "mixed")], no_wait)
    assert [len(group.bundles) for group in cluster.groups] == [1, 2, 1, 1]
    made.place(MODEL, "float32", [("decode-1", "decode")], no_wait)
    assert len(cluster.groups) == 4


def test_events_are_handled_while_others_have_the_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = FakeCluster(2, monkeypatch)
    config = ServeConfig(model="m", on="ray", topology=Topology(1, 1))
    made = on_ray.RayEngine(config)
    cluster.make([{"CPU": 1.0}])  # another user's
    supervisor = Supervisor(tmp_path, echo=False, starter=made.start)
    supervisor.post(Stop(3))
    workers = WorkerSet(config, made, supervisor, WorkersFile(tmp_path / "workers.txt"))
    with pytest.raises(StoppedError) as stopped:
        workers.start(MODEL, "float32")
    assert stopped.value.code == 3
    assert len(cluster.groups) == 1, "what was reserved is removed"


def test_a_worker_that_waits_for_a_place_ends_at_the_first_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actor, killed = MagicMock(), MagicMock()
    monkeypatch.setattr(ray_process.ray, "kill", killed)
    monkeypatch.setattr(ray_process.ray, "get", lambda _: ["node 10.0.0.1, pid 1"])
    with (tmp_path / "output").open("wb") as output:
        spec = ProcessSpec("mixed-0", (), (), "ready ")
        process = ray_process.RayProcess(spec, [actor], output.fileno(), str)
        process.signal(signal.SIGTERM)
        killed.assert_called_once_with(actor)
        actor.signal.remote.assert_not_called()

        process._start(["10.0.0.1"])
        process.signal(signal.SIGTERM)
        actor.signal.remote.assert_called_once_with(signal.SIGTERM)
        killed.assert_called_once_with(actor)


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined = MagicMock()
    monkeypatch.setattr(on_ray.ray, "init", joined)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        says = rf"\(ray://{address}\): no connection within 10 s \(.*; give ray://HOST:PORT"
        with pytest.raises(LaunchError, match=says):
            on_ray.count_gpus(f"ray://{address}")
        joined.assert_not_called()
        bound.listen()
        on_ray._join(f"ray://{address}")
    joined.assert_called_once()
