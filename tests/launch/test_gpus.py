"""Which worker gets which GPU."""

from __future__ import annotations

import pytest

from tasuki.errors import TasukiError
from tasuki.launch import gpus, machine
from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.worker.config import WorkerConfig


def test_workers_count_up_from_the_first() -> None:
    config = ServeConfig(model="m", topology=Topology(1, 2))
    assert gpus.assign_gpus(config, ("0", "1", "2", "3")) == [("0",), ("1",), ("2",)]
    later = ServeConfig(model="m", topology=Topology(1, 1), worker=WorkerConfig(device="cuda:2"))
    assert gpus.assign_gpus(later, ("0", "1", "2", "3")) == [("2",), ("3",)]


def test_a_worker_of_several_ranks_gets_as_many() -> None:
    ranks = (("prefill", 2), ("decode", 1), ("mixed", 4))
    config = ServeConfig(model="m", topology=Topology(1, 1), tensor_parallel=ranks)
    assert gpus.assign_gpus(config, ("0", "1", "2", "3")) == [("0", "1"), ("2",)]
    mixed = ServeConfig(model="m", topology=Topology(0, 0, 1), tensor_parallel=ranks)
    assert gpus.assign_gpus(mixed, ("0", "1", "2", "3")) == [("0", "1", "2", "3")]
    with pytest.raises(TopologyError, match="1 mixed needs 4 GPUs, there are 3"):
        gpus.assign_gpus(mixed, ("0", "1", "2"))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "1 prefill [+] 2 decode needs 3 GPUs, there are 2: "),
        ("cuda:1", "needs 3 GPUs, there are 1 from number 1 on"),
    ],
)
def test_too_few_gpus_are_refused_with_both_numbers(device: str, message: str) -> None:
    config = ServeConfig(model="m", topology=Topology(1, 2), worker=WorkerConfig(device=device))
    with pytest.raises(TopologyError, match=message):
        gpus.assign_gpus(config, ("0", "1"))


@pytest.mark.parametrize(
    ("device", "ranks", "count", "expected"),
    [
        ("auto", {}, 0, (1, 1, 0)),
        ("cpu", {}, 2, (1, 1, 0)),
        ("auto", {}, 1, (0, 0, 1)),
        ("cuda", {}, 4, (0, 0, 4)),
        ("cuda:1", {}, 4, (0, 0, 3)),
        ("auto", {"mixed": 2}, 5, (0, 0, 2)),
        ("auto", {"prefill": 1, "decode": 1, "mixed": 1}, 2, (0, 0, 2)),
        ("auto", {"prefill": 2}, 3, (1, 1, 0)),
        ("auto", {"decode": 2, "mixed": 2}, 3, (1, 1, 0)),
        ("auto", {}, 100, (0, 0, 64)),
        # Too few GPUs: one worker, whose error names both numbers.
        ("auto", {"mixed": 4}, 2, (0, 0, 1)),
        ("cuda:3", {}, 2, (0, 0, 1)),
    ],
)
def test_without_roles_each_gpu_is_a_mixed_worker(
    device: str, ranks: dict[str, int], count: int, expected: tuple[int, int, int]
) -> None:
    names = [str(index) for index in range(count)]
    topology, reason = gpus.default_topology(device, ranks, names)
    assert (topology.prefill, topology.decode, topology.mixed) == expected
    assert (reason is None) == (topology.mixed == 0)
    if reason is not None:
        assert f"--mixed {topology.mixed}: " in reason


def test_one_gpu_is_enough_and_the_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "usable_gpus", lambda: ("0",))
    topology = machine.choose_topology(None, None, None)
    assert str(topology) == "1 mixed"
    assert "--mixed 1: no roles are given; GPUs: 1, for each worker: 1" in capsys.readouterr().err
    config = ServeConfig(model="m", topology=topology)
    assert gpus.assign_gpus(config, ("0",)) == [("0",)]
    assert str(machine.choose_topology(1, None, None)) == "1 prefill + 1 decode"
    assert capsys.readouterr().err == ""
    with pytest.raises(TasukiError, match="device is 'cuda:x'"):
        machine.choose_topology(None, None, None, "cuda:x")


def test_gpus_are_used_if_there_are_any_unless_told_otherwise() -> None:
    assert gpus.is_on_gpus("auto", ("0",))
    assert not gpus.is_on_gpus("auto", ())
    assert not gpus.is_on_gpus("cpu", ("0",))
    with pytest.raises(LaunchError, match="--device is cuda:1, no usable GPU"):
        gpus.is_on_gpus("cuda:1", ())


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    assert gpus.usable_gpus() == ()


@pytest.mark.parametrize(
    ("cannot", "expected"), [(set(), True), ({(0, 1)}, False), ({(2, 1)}, False)]
)
def test_every_gpu_must_reach_every_other_one(
    monkeypatch: pytest.MonkeyPatch, cannot: set[tuple[int, int]], expected: bool
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return 0

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            count._obj.value = 3  # type: ignore[attr-defined]
            return 0

        def cuDeviceCanAccessPeer(self, can: object, one: int, other: int) -> int:  # noqa: N802
            can._obj.value = (one, other) not in cannot  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver())
    assert gpus.read_one_another() == expected


@pytest.mark.parametrize(
    ("visible", "shown", "names"),
    [
        (None, 2, ("0", "1")),
        ("3,5", 2, ("3", "5")),
        ("GPU-ab, GPU-cd", 2, ("GPU-ab", "GPU-cd")),
        ("1,-1,2", 1, ("1",)),
        ("", 0, ()),
    ],
)
def test_names_are_those_that_the_user_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, shown: int, names: tuple[str, ...]
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return 0

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            count._obj.value = shown  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver())
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.usable_gpus() == names
