"""From settings to processes, without starting any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.launch import topology
from tasuki.launch.config import ServeConfig, Topology
from tasuki.launch.errors import LaunchError, TopologyError
from tasuki.launch.topology import Machine
from tasuki.worker.config import WorkerConfig

MODEL = Path("/models/smollm2-135m-instruct")
MACHINE = Machine(cores=2.0, free_bytes=16 * 10**9)


def words_after(spec: topology.ProcessSpec, flag: str) -> list[str]:
    return [b for a, b in zip(spec.arguments, spec.arguments[1:], strict=False) if a == flag]


def test_workers_get_role_name_and_one_dtype() -> None:
    config = ServeConfig(model="smollm2-135m", topology=Topology(2, 1))
    specs = topology.worker_specs(config, MODEL, "bfloat16", MACHINE)
    assert [s.name for s in specs] == ["prefill-0", "prefill-1", "decode-0"]
    assert [words_after(s, "--role") for s in specs] == [["prefill"], ["prefill"], ["decode"]]
    assert {tuple(words_after(s, "--dtype")) for s in specs} == {("bfloat16",)}
    assert {tuple(words_after(s, "--port")) for s in specs} == {("0",)}
    assert all("--kv-memory" not in s.arguments for s in specs)
    assert {tuple(words_after(s, "--device")) for s in specs} == {("cpu",)}


def test_given_ports_count_up() -> None:
    config = ServeConfig(model="m", worker_base_port=7000)
    specs = topology.worker_specs(config, MODEL, "float32", MACHINE)
    assert [words_after(s, "--port") for s in specs] == [["7000"], ["7001"]]


def test_base_port_0_gives_every_worker_a_free_port() -> None:
    config = ServeConfig(model="m", worker_base_port=0)
    specs = topology.worker_specs(config, MODEL, "float32", MACHINE)
    assert [words_after(s, "--port") for s in specs] == [["0"], ["0"]]
    highest = ServeConfig(model="m", worker_base_port=65_534)
    specs = topology.worker_specs(highest, MODEL, "float32", MACHINE)
    assert [words_after(s, "--port") for s in specs] == [["65534"], ["65535"]]


def test_many_workers_share_half_of_the_memory() -> None:
    config = ServeConfig(model="m", topology=Topology(0, 0, 8))
    specs = topology.worker_specs(config, MODEL, "float32", MACHINE)
    assert {tuple(words_after(s, "--kv-memory")) for s in specs} == {(str(10**9),)}
    asked = ServeConfig(
        model="m", topology=Topology(0, 0, 8), worker=WorkerConfig(kv_memory=5 * 10**8)
    )
    specs = topology.worker_specs(asked, MODEL, "float32", MACHINE)
    assert {tuple(words_after(s, "--kv-memory")) for s in specs} == {("500000000",)}


def test_pools_that_do_not_fit_beside_one_another_are_refused() -> None:
    fits = ServeConfig(model="m", worker=WorkerConfig(kv_memory=8 * 10**9))
    assert len(topology.worker_specs(fits, MODEL, "float32", MACHINE)) == 2
    wide = ServeConfig(model="m", worker=WorkerConfig(kv_memory=9 * 10**9))
    with pytest.raises(LaunchError, match=r"9000000000 bytes for each of 2 .*less than 8000000000"):
        topology.worker_specs(wide, MODEL, "float32", MACHINE)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 2, 1), (8, 2, 4), (2, 4, 1), (1.5, 1, 1), (7, 2, 3)]
)
def test_threads_never_exceed_the_cores(cores: float, ranks: int, threads: int) -> None:
    assert topology.threads_per_rank(cores, ranks) == threads


def test_the_users_own_environment_wins() -> None:
    (spec, _) = topology.worker_specs(ServeConfig(model="m"), MODEL, "float32", MACHINE)
    merged = topology.merged_environment({"OMP_NUM_THREADS": "7", "X": "y"}, spec)
    assert merged["OMP_NUM_THREADS"] == "7"
    assert merged["X"] == "y"
    assert merged["KMP_BLOCKTIME"] == "0"


def test_each_worker_sees_its_own_gpu_whatever_the_user_sees() -> None:
    machine = Machine(cores=8, free_bytes=10**9, gpus=("4", "GPU-ab", "6"))
    config = ServeConfig(model="m", topology=Topology(1, 1, 1))
    specs = topology.worker_specs(config, MODEL, "bfloat16", machine)
    own = {"CUDA_VISIBLE_DEVICES": "4,GPU-ab,6"}
    seen = [topology.merged_environment(own, s)["CUDA_VISIBLE_DEVICES"] for s in specs]
    assert seen == ["4", "GPU-ab", "6"]
    assert {tuple(words_after(s, "--device")) for s in specs} == {("cuda",)}
    assert all("--kv-memory" not in s.arguments for s in specs)


def test_ranks_share_their_workers_gpus_and_the_machines_cores() -> None:
    machine = Machine(cores=8, free_bytes=10**9, gpus=("4", "5", "6"))
    config = ServeConfig(model="m", tensor_parallel=(("prefill", 2), ("decode", 1)))
    specs = topology.worker_specs(config, MODEL, "bfloat16", machine)
    seen = [topology.merged_environment({}, s) for s in specs]
    assert [s["CUDA_VISIBLE_DEVICES"] for s in seen] == ["4,5", "6"]
    assert [s["OMP_NUM_THREADS"] for s in seen] == ["2", "2"]
    assert [words_after(s, "--tp") for s in specs] == [["2"], []]


def test_handoffs_go_through_host_memory_where_gpus_cannot_read_one_another() -> None:
    def transports(config: ServeConfig, *, peer_access: bool) -> set[tuple[str, ...]]:
        machine = Machine(8, 10**9, gpus=("0", "1"), peer_access=peer_access)
        specs = topology.worker_specs(config, MODEL, "bfloat16", machine)
        return {tuple(words_after(s, "--transport")) for s in specs}

    split = ServeConfig(model="m")
    assert transports(split, peer_access=True) == {()}
    assert transports(split, peer_access=False) == {("host-staged",)}
    said = ServeConfig(model="m", worker=WorkerConfig(transport="nixl"))
    assert transports(said, peer_access=False) == {("nixl",)}
    alone = ServeConfig(model="m", topology=Topology(0, 0, 1))
    assert transports(alone, peer_access=False) == {()}
    on_cpu = ServeConfig(model="m", worker=WorkerConfig(device="cpu"))
    assert transports(on_cpu, peer_access=False) == {()}


def test_gpus_are_left_alone_when_told_so() -> None:
    machine = Machine(cores=8, free_bytes=10**9, gpus=("0",))
    config = ServeConfig(model="m", worker=WorkerConfig(device="cpu"))
    specs = topology.worker_specs(config, MODEL, "float32", machine)
    assert {tuple(words_after(s, "--device")) for s in specs} == {("cpu",)}
    assert all(s.assigned == () for s in specs)


def test_workers_that_join_get_free_gpus_and_ports() -> None:
    machine = Machine(cores=8, free_bytes=10**9, gpus=("0", "1", "2"))
    config = ServeConfig(model="m", worker=WorkerConfig(device="cuda:1"), worker_base_port=7000)
    new = [("decode-1", "decode")]
    (spec,) = topology.worker_specs(config, MODEL, "bfloat16", machine, new, taken=["1"])
    assert (spec.name, spec.assigned) == ("decode-1", (("CUDA_VISIBLE_DEVICES", "2"),))
    assert words_after(spec, "--port") == ["0"]
    with pytest.raises(TopologyError, match=r"decode-1 needs 1 GPUs, there are 0 from number 1 on"):
        topology.worker_specs(config, MODEL, "bfloat16", machine, new, taken=["1", "2"])


def test_the_router_gets_the_workers_file_and_every_name() -> None:
    config = ServeConfig(model="smollm2-135m")
    spec = topology.router_spec(config, MODEL, Path("/logs/workers.txt"), 8000)
    assert words_after(spec, "--discover") == ["file:/logs/workers.txt"]
    assert words_after(spec, "--served-model-name") == ["smollm2-135m-instruct", "smollm2-135m"]


@pytest.mark.parametrize(
    ("asked", "folder", "names"),
    [
        ("smollm2-135m", "/c/smollm2-135m-instruct", ("smollm2-135m-instruct", "smollm2-135m")),
        ("Qwen/Qwen3-0.6B", "/hub/snapshots/abc123", ("Qwen/Qwen3-0.6B",)),
        ("Qwen/Qwen3-0.6B@main", "/hub/snapshots/abc123", ("Qwen/Qwen3-0.6B",)),
        ("/data/my-model", "/data/my-model", ("my-model",)),
        ("./my-model", "/data/my-model", ("my-model",)),
        (".", "/data/my-model", ("my-model",)),
    ],
)
def test_served_names_are_what_a_person_would_type(
    asked: str, folder: str, names: tuple[str, ...]
) -> None:
    assert topology.served_names(ServeConfig(model=asked), Path(folder)) == names


def test_a_restart_keeps_the_address() -> None:
    (spec, _) = topology.worker_specs(ServeConfig(model="m"), MODEL, "float32", MACHINE)
    again = topology.with_port(spec, "127.0.0.1:4321")
    assert words_after(again, "--port") == ["4321"]
    router = topology.router_spec(ServeConfig(model="m"), MODEL, Path("w"), 0)
    assert words_after(topology.with_port(router, "http://127.0.0.1:9/"), "--port") == ["9"]


def test_worker_and_router_get_the_same_certificates() -> None:
    files = {f"fleet_{each}": Path(f"{each}.pem") for each in ("cert", "key", "ca")}
    config = ServeConfig(model="m", worker=WorkerConfig(**files))  # type: ignore[arg-type]
    (worker, _) = topology.worker_specs(config, MODEL, "float32", MACHINE)
    router = topology.router_spec(config, MODEL, Path("w"), 0)
    for spec in (worker, router):
        assert [words_after(spec, f"--fleet-{each}") for each in ("cert", "key", "ca")] == [
            ["cert.pem"],
            ["key.pem"],
            ["ca.pem"],
        ]
