"""What a worker is told: refused, or filled in for its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasuki.worker.config import ConfigError, WorkerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu': use auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "device is 'cuda:'"),
        ({"kv_dtype": "float8"}, "kv-dtype is 'float8': use one of auto, bfloat16, fp8"),
        ({"load_format": "pt"}, "load-format is 'pt'"),
        ({"all_reduce": "fused"}, "all-reduce is 'fused': use one of auto, nccl, symmetric"),
        ({"gpu_memory_utilization": 0.0}, "gpu-memory-utilization is 0.0: use a value from 0.01"),
        ({"gpu_memory_utilization": 1.5}, "gpu-memory-utilization is 1.5"),
        ({"max_model_len": 0}, "max-model-len is 0"),
        ({"block_size": 0}, "block-size is 0"),
    ],
)
def test_bad_settings_are_refused_with_value_and_remedy(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkerConfig(model=Path("m"), **settings)


def test_what_is_not_said_is_what_is_good_for_the_role_on_the_device() -> None:
    plain, prefill = (WorkerConfig(model=Path("m"), role=role) for role in ("mixed", "prefill"))
    assert plain.limits(on_cuda=False).block_size == 16
    assert plain.limits(on_cuda=True).max_batched_tokens == 2_048
    assert prefill.limits(on_cuda=True).max_batched_tokens == 4_096
    assert prefill.limits(on_cuda=False) == plain.limits(on_cuda=False)
    asked = WorkerConfig(model=Path("m"), block_size=64, max_running_requests=3)
    for on_cuda in (False, True):
        assert asked.limits(on_cuda).block_size == 64
        assert asked.limits(on_cuda).max_running_requests == 3
