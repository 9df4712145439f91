"""The fused kernels, and the CUDA path around them with the CPU's attention."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from paged import Paged, Sequence
from support.kernels import DEVICE
from tiny import save

from tasuki.models import gemm_tiles, gemms, kernels, layers
from tasuki.models.kernels import add_norm, gated, norm
from tasuki.models.loader import load_model
from tasuki.models.ops_cuda import CudaOps


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with DEVICE:
        yield


@pytest.mark.parametrize("size", [48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm(size: int, dtype: torch.dtype) -> None:
    hidden, x = torch.randn(2, 3, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    total = hidden + x
    result = add_norm(hidden, x, weight, 1e-5)
    # The interpreter cuts what the device rounds.
    torch.testing.assert_close(hidden, total, atol=0, rtol=2**-7 if dtype.itemsize == 2 else 0)
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    want = torch.rms_norm(hidden.float(), (size,), weight.float(), 1e-5)
    torch.testing.assert_close(result.float(), want, atol=tolerance, rtol=tolerance)


def test_norm_leaves_its_input() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(48)
    x = wide[:, :48]
    before = wide.clone()
    result = norm(x, weight, 1e-5)
    assert torch.equal(wide, before)
    torch.testing.assert_close(result, torch.rms_norm(x, (48,), weight, 1e-5))


@pytest.mark.parametrize("inner", [80, 1500])
def test_gated(inner: int) -> None:
    gate_up = 5 * torch.randn(3, 2 * inner)
    want = F.silu(gate_up[:, :inner]) * gate_up[:, inner:]
    torch.testing.assert_close(gated(gate_up), want)


@pytest.mark.parametrize("name", ["qwen3", "llama-yarn-bias", "qwen2-some-windows"])
def test_model_on_fused_kernels_equals_transformers(name: str, tmp_path: Path) -> None:
    """Prefill, then a chunk beside a decode; the same attention backend as on the CPU."""
    reference = save(name, tmp_path).to(DEVICE)
    model = load_model(tmp_path, dtype=torch.float32, device=DEVICE)
    model._ops = CudaOps(model.spec, DEVICE)  # type: ignore[attr-defined]
    draw = random.Random(4)
    first, second = (Sequence([draw.randrange(3, 256) for _ in range(n)]) for n in (10, 16))
    paged = Paged(model, device=DEVICE)
    parts = [paged.step([(first, 9)]), paged.step([(second, 7)])]
    parts.append(paged.step([(first, 1), (second, 9)]))
    with torch.inference_mode():
        wants = [
            reference(torch.tensor([s.tokens]), use_cache=False).logits[0] for s in (first, second)
        ]
    want = torch.cat((wants[0][:9], wants[1][:7], wants[0][9:], wants[1][7:]))
    got = torch.cat(parts)
    assert got.dtype == torch.float32
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "llama-yarn-bias", "qwen2"])
def test_model_on_gemms_of_few_rows_equals_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one row, where the norms are the GEMMs' own, between steps of more."""
    taken = []
    run = gemms.FewRows._run
    monkeypatch.setattr(gemms, "_COLUMNS_OF_ONE", 16)
    monkeypatch.setattr(gemms.FewRows, "_run", lambda *a, **k: (taken.append(k), run(*a, **k)))
    monkeypatch.setattr(layers, "_packing_works", lambda _: False)
    reference = save(name, tmp_path).to(DEVICE)
    model = load_model(tmp_path, dtype=torch.float32, device=DEVICE)
    model._ops = CudaOps(model.spec, DEVICE)  # type: ignore[attr-defined]
    draw = random.Random(4)
    first, second = (Sequence([draw.randrange(3, 256) for _ in range(n)]) for n in (11, 4))
    paged = Paged(model, device=DEVICE)
    parts = [paged.step([(first, 9)]), paged.step([(first, 1)])]
    parts += [paged.step([(first, 1), (second, 3)]), paged.step([(second, 1)])]
    with torch.inference_mode():
        wants = [
            reference(torch.tensor([s.tokens]), use_cache=False).logits[0] for s in (first, second)
        ]
    want = torch.cat((wants[0], wants[1]))
    assert len(taken) >= 2 * 3 * model.spec.num_layers
    assert float((torch.cat(parts) - want).abs().max() / want.abs().max()) < 1e-4


def test_model_whose_norms_are_its_gemms_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in 16 bits. Of 19 rows a kernel norms what goes to the first GEMM and the head, of
    2 what goes to each GEMM.
    """
    half = torch.float16  # the interpreter's GEMM knows no bfloat16
    normed: list[int] = []
    run = kernels.norm
    monkeypatch.setattr(kernels, "norm", lambda x, *a: (normed.append(x.shape[0]), run(x, *a))[1])
    monkeypatch.setattr(gemm_tiles, "COLUMNS", 16)
    monkeypatch.setattr(gemm_tiles, "COLUMNS_OF_GATED", 16)
    monkeypatch.setattr(gemms, "_WEIGHTED", (half,))
    monkeypatch.setattr(layers, "_packing_works", lambda _: False)
    reference = save("qwen3", tmp_path).to(DEVICE)
    model = load_model(tmp_path, dtype=half, device=DEVICE)
    model._ops = CudaOps(model.spec, DEVICE)  # type: ignore[attr-defined]
    draw = random.Random(4)
    sequences = [Sequence([draw.randrange(3, 256) for _ in range(n)]) for n in (9, 12)]
    paged = Paged(model, half, DEVICE)
    parts = [paged.step([(s, len(s.tokens) - 1) for s in sequences])]
    parts.append(paged.step([(s, 1) for s in sequences]))
    with torch.inference_mode():
        first, second = (
            reference(torch.tensor([s.tokens]), use_cache=False).logits[0] for s in sequences
        )
    want = torch.cat((first[:8], second[:11], first[8:], second[11:]))
    assert normed == [19, 19] + [2] * (2 * model.spec.num_layers + 1)
    assert float((torch.cat(parts) - want).norm() / want.norm()) < 5e-3
