"""What a worker is told: refused, or filled in for its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.worker.config import ROLES, ConfigError, WorkerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu': use auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "device is 'cuda:'"),
        ({"kv_dtype": "float8"}, "kv-dtype is 'float8': use one of auto, bfloat16, fp8"),
        ({"load_format": "pt"}, "load-format is 'pt'"),
        ({"speculate": "eagle"}, "speculate is 'eagle': use one of none, prompt-lookup"),
        ({"quantization": "int4"}, "quantization is 'int4': use one of none, int8, fp8"),
        ({"quantization": "int8", "dtype": "float32"}, "quantization is int8, dtype is float32"),
        ({"quantization": "int8", "tensor_parallel": 2}, "quantization is int8, tp is 2"),
        ({"all_reduce": "fused"}, "all-reduce is 'fused': use one of auto, nccl, symmetric"),
        ({"gpu_memory_utilization": 0.0}, "gpu-memory-utilization is 0.0: use a value from 0.01"),
        ({"gpu_memory_utilization": 1.5}, "gpu-memory-utilization is 1.5"),
        ({"max_model_len": 1}, "max-model-len is 1: use a value from 2"),
        ({"block_size": 0}, "block-size is 0"),
        ({"itl_target_ms": -1.0}, "itl-target-ms is -1.0: use a value from 0.0 to 60000.0"),
        ({"lease_s": 0.05}, "lease-s is 0.05: use a value from 0.1 to 3600.0"),
        ({"step_timeout_s": float("nan")}, "step-timeout-s is nan: use a value from 2.0"),
    ],
)
def test_bad_settings_are_refused_with_value_and_remedy(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(model=Path("m"), **settings)


def test_what_is_not_said_is_what_is_good_for_the_device_whatever_the_role() -> None:
    plain, *others = (WorkerConfig(model=Path("m"), role=role) for role in ROLES)
    assert plain.limits(on_cuda=False).block_size == 16
    assert plain.limits(on_cuda=True).max_batched_tokens == 4_096
    for other in others:
        assert all(other.limits(cuda) == plain.limits(cuda) for cuda in (False, True))
    asked = WorkerConfig(model=Path("m"), block_size=64, max_running_requests=3)
    for on_cuda in (False, True):
        assert asked.limits(on_cuda).block_size == 64
        assert asked.limits(on_cuda).max_running_requests == 3


def test_steps_are_bounded_in_time_by_device_and_lease() -> None:
    plain = WorkerConfig(model=Path("m"))
    assert plain.itl_target_s(on_cuda=False) == 0.1
    assert plain.itl_target_s(on_cuda=True) == 0.009
    assert plain.longest_step_s == 1.0
    asked = WorkerConfig(model=Path("m"), itl_target_ms=30.0, lease_s=2.0)
    assert asked.itl_target_s(on_cuda=True) == asked.itl_target_s(on_cuda=False) == 0.03
    assert asked.longest_step_s == 0.5
    unbounded = WorkerConfig(model=Path("m"), itl_target_ms=0.0)
    assert unbounded.itl_target_s(on_cuda=True) is None


@pytest.mark.parametrize(
    ("settings", "endpoint"),
    [
        ({}, "127.0.0.1:7001"),
        ({"host": "0.0.0.0", "advertise": "10.88.1.11"}, "10.88.1.11:7001"),
        ({"host": "::", "advertise": "fd00::11"}, "[fd00::11]:7001"),
        ({"host": "[::1]"}, "[::1]:7001"),
    ],
)
def test_peers_are_told_the_advertised_host(settings: dict[str, Any], endpoint: str) -> None:
    assert WorkerConfig(model=Path("m"), **settings).endpoint(7001) == endpoint


def test_a_drain_has_a_limit() -> None:
    with pytest.raises(ConfigError, match="drain-s is -1"):
        WorkerConfig(model=Path("m"), drain_s=-1.0)
