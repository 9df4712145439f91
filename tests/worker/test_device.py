"""The device and the dtypes that a worker settles on."""

from __future__ import annotations

import os
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
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs 4 and 6."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.parametrize(
    ("wanted", "seen"), [("auto", "4,6"), ("cuda", "4,6"), ("cuda:0", "4"), ("cuda:1", "6")]
)
def test_a_worker_sees_the_gpu_that_it_is_told(gpus: None, wanted: str, seen: str) -> None:
    assert choose_device(wanted) == GPU
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_ranks_see_their_workers_gpus(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"device is cuda:1 for 2 ranks, .* it names 2"):
        choose_device("cuda:1", ranks=2)
    assert choose_device("cuda:0", ranks=2) == GPU
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    with pytest.raises(ConfigError, match="tp is 3, 2 GPUs can be seen"):
        choose_device("cuda", ranks=3)


def test_a_gpu_that_is_not_there_is_refused(gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"device is cuda:2, .* is '4,6': it names 2"):
        choose_device("cuda:2")
    assert choose_device("cpu") == torch.device("cpu")


def test_where_all_gpus_are_seen_the_number_is_the_name(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_device("cuda:3") == GPU
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


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


def test_the_log_names_the_dtype_that_was_chosen_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tasuki.worker.device")
    choose_dtypes(config(), SPEC, GPU)
    assert caplog.messages == ["dtype bfloat16: the default on cuda"]


def test_a_cache_of_another_dtype_is_refused_on_the_cpu() -> None:
    given = config(dtype="float32", kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"kv-dtype is bfloat16, .*\(float32\) or fp8: use auto"):
        choose_dtypes(given, SPEC, torch.device("cpu"))
    fp8 = choose_dtypes(config(dtype="float32", kv_dtype="fp8"), SPEC, torch.device("cpu"))
    assert fp8 == Dtypes(torch.float32, torch.float8_e4m3fn)
