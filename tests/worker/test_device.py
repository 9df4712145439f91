"""The device and the dtypes that a worker settles on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasuki.models.spec import ModelSpec
from tasuki.worker.config import ConfigError, WorkerConfig
from tasuki.worker.device import Dtypes, choose_device, choose_dtypes, dtype_name

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    hidden_size=8,
    intermediate_size=8,
    vocab_size=8,
    max_position=8,
    sliding_windows=(None,),
)
GPU = torch.device("cuda:0")


def config(**settings: str) -> WorkerConfig:
    return WorkerConfig(model=Path("m"), **settings)  # type: ignore[arg-type]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs; gives the devices that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return current


def test_gpus_are_used_if_there_are_any(gpus: list[torch.device]) -> None:
    assert choose_device("auto") == GPU
    assert choose_device("cuda") == GPU
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert gpus == [GPU, GPU, torch.device("cuda:1")]
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device is cuda:2, there are 2 GPUs"):
        choose_device("cuda:2")


def test_without_gpus_the_cpu_is_used_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device is cuda, but torch .*: use --device cpu"):
        choose_device("cuda")


def test_the_cache_is_of_the_models_dtype_unless_told() -> None:
    bfloat16 = torch.bfloat16
    assert choose_dtypes(config(), SPEC, GPU) == Dtypes(bfloat16, bfloat16)
    fp8 = choose_dtypes(config(kv_dtype="fp8"), SPEC, GPU)
    assert fp8 == Dtypes(bfloat16, torch.float8_e4m3fn)
    assert dtype_name(fp8.kv) == "float8_e4m3fn"
    on_cpu = choose_dtypes(config(dtype="float32"), SPEC, torch.device("cpu"))
    assert on_cpu == Dtypes(torch.float32, torch.float32)


def test_a_cache_of_another_dtype_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"kv-dtype is fp8, on the CPU .*\(float32\): use auto"):
        choose_dtypes(config(dtype="float32", kv_dtype="fp8"), SPEC, torch.device("cpu"))
