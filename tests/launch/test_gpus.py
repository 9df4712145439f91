"""Which worker gets which GPU."""

from __future__ import annotations

import pytest

from tasuki.launch import gpus
from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.errors import LaunchError, TopologyError


def test_workers_count_up_from_the_first() -> None:
    config = ServeConfig(model="m", topology=Topology(1, 2))
    assert gpus.assign_gpus(config, ("0", "1", "2", "3")) == [("0",), ("1",), ("2",)]
    later = ServeConfig(model="m", topology=Topology(1, 1), device="cuda:2")
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
    config = ServeConfig(model="m", topology=Topology(1, 2), device=device)
    with pytest.raises(TopologyError, match=message):
        gpus.assign_gpus(config, ("0", "1"))


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
