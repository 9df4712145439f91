"""Which backend is chosen, and what is said about it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import pytest
import torch

from tasuki.attention import select
from tasuki.attention.errors import AttentionError
from tasuki.attention.sdpa import SdpaAttention
from tasuki.attention.select import make_attention


def cuda_pool(dtype: torch.dtype) -> Any:
    """What the choice looks at, of a pool on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(4, 2, 1, 2, 16, 64))


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SdpaAttention", lambda pool: "PyTorch's")
    monkeypatch.delitem(sys.modules, "tasuki.attention.flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not installed


def test_the_cpu_needs_no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SdpaAttention", SdpaAttention)
    backend, said = make_attention(torch.zeros(4, 2, 1, 2, 16, 64), 4, torch.float32)
    assert isinstance(backend, SdpaAttention)
    assert said == "attention: PyTorch's, on cpu"


def test_without_flashinfer_a_gpu_says_how_to_get_it() -> None:
    backend, said = make_attention(cuda_pool(torch.bfloat16), 4, torch.bfloat16)
    assert backend == "PyTorch's"
    assert "pip install 'flashinfer-python>=0.6.14'" in said


def test_an_fp8_cache_needs_flashinfer() -> None:
    with pytest.raises(AttentionError, match=r"float8_e4m3fn.*pip install"):
        make_attention(cuda_pool(torch.float8_e4m3fn), 4, torch.bfloat16)


def test_what_flashinfer_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", fake_flashinfer)
    backend, said = make_attention(cuda_pool(torch.float32), 4, torch.float32)
    monkeypatch.delitem(sys.modules, "tasuki.attention.flashinfer")
    assert backend == "PyTorch's"
    assert "computes in bfloat16 or float16" in said
