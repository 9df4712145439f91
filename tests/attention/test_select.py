"""Which backend is chosen, and what is said about it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import pytest
import torch

from tasuki.attention import own, select
from tasuki.attention.errors import AttentionError
from tasuki.attention.sdpa import SdpaAttention
from tasuki.attention.select import make_attention


def cuda_pool(dtype: torch.dtype, head_dim: int = 64) -> Any:
    """What the choice looks at, of a pool on a GPU."""
    shape = (4, 2, 1, 2, 16, head_dim)
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=shape, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SdpaAttention", lambda *_: "PyTorch's")
    monkeypatch.setattr(own, "OwnAttention", lambda *_: "our own")
    for name in ("tasuki.attention.flashinfer", "tasuki.attention.flashinfer_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed


def install(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", library)


def test_the_cpu_needs_no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SdpaAttention", SdpaAttention)
    backend, said = make_attention(torch.zeros(4, 2, 1, 2, 16, 64), 4, torch.float32)
    assert isinstance(backend, SdpaAttention)
    assert said == "attention: PyTorch's, on cpu"


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_without_flashinfer_our_decode_kernels_still_run(cache: torch.dtype) -> None:
    backend, said = make_attention(cuda_pool(cache), 4, torch.bfloat16)
    assert backend == "our own"
    assert "our own kernels for decodes" in said
    assert "pip install 'flashinfer-python>=0.6.14,<0.7'" in said


def test_an_fp8_cache_needs_a_backend_that_reads_it() -> None:
    with pytest.raises(AttentionError, match=r"float8_e4m3fn.*pip install.*head_dim is 96"):
        make_attention(cuda_pool(torch.float8_e4m3fn, 96), 4, torch.bfloat16)


def test_what_neither_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_flashinfer)
    backend, said = make_attention(cuda_pool(torch.float32), 4, torch.float32)
    assert backend == "PyTorch's"
    assert "FlashInfer computes in bfloat16 or float16" in said
    assert "our decode kernels compute in bfloat16 or float16" in said


def test_a_flashinfer_that_breaks_at_import_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('CUDA 14\\nis unknown')")
    monkeypatch.syspath_prepend(str(tmp_path))
    backend, said = make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)
    assert backend == "our own"
    assert "RuntimeError: CUDA 14)" in said


def test_a_flashinfer_of_another_version_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer, "__version__", "0.7.1")
    backend, said = make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)
    assert backend == "our own"
    assert "FlashInfer is 0.7.1" in said


@pytest.mark.parametrize(
    "error", [TypeError("takes 9 arguments"), FileNotFoundError("nvcc"), AttentionError("has no x")]
)
def test_a_flashinfer_that_cannot_be_made_is_done_without(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    install(monkeypatch, fake_flashinfer)
    module = importlib.import_module("tasuki.attention.flashinfer")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(module, "FlashInferAttention", fail)
    backend, said = make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)
    assert backend == "our own"
    assert f"{type(error).__name__}: {error}" in said


def test_memory_that_is_short_is_no_reason_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_flashinfer)
    module = importlib.import_module("tasuki.attention.flashinfer")

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("256 MiB")

    monkeypatch.setattr(module, "FlashInferAttention", fail)
    with pytest.raises(torch.OutOfMemoryError):
        make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)


def test_absence_can_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_flashinfer)
    monkeypatch.setenv("TASUKI_EMULATE_NO_FLASHINFER", "1")
    backend, said = make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)
    assert backend == "our own"
    assert "TASUKI_EMULATE_NO_FLASHINFER" in said
