"""GEMMs of few rows at real sizes, one kernel beginning while the one before it ends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tasuki.device_limits import limits_of
from tasuki.models.fp8_linear import Fp8Linear, rounded
from tasuki.models.gemms import MIN_ROWS_WEIGHTED, FewRows
from tasuki.models.layers import PlainLinear
from tasuki.models.llama import linear_of
from tasuki.models.ops import Weighted
from tasuki.models.weights import quantize

DEVICE = torch.device("cuda")
HIDDEN, INNER, QUERY, QKV = 2560, 9728, 4096, 6144
EPS = 1e-6
LAYERS, REPEATS = 3, 20
ERROR = 2**-7  # relative, of a few layers in bfloat16


class Layer:
    def __init__(self) -> None:
        def linear(out: int, size: int) -> PlainLinear:
            weight = torch.randn(out, size, device=DEVICE) * size**-0.5
            return PlainLinear(weight.bfloat16(), None)

        self.qkv, self.output = linear(QKV, HIDDEN), linear(HIDDEN, QUERY)
        self.gate_up, self.down = linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)
        self.norms = [1 + 0.2 * torch.randn(HIDDEN, device=DEVICE).bfloat16() for _ in range(2)]


def chain(few: FewRows, layers: list[Layer], hidden: torch.Tensor) -> None:
    ahead: Weighted | None = None
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        qkv = few.normed(layer.qkv, ahead or hidden, layer.norms[0])
        ahead = few.add(layer.output, qkv[:, :QUERY], hidden, layer.norms[1])
        assert (ahead is not None) == (hidden.shape[0] >= MIN_ROWS_WEIGHTED)
        inner = few.gated(layer.gate_up, ahead or hidden, layer.norms[1])
        ahead = few.add(layer.down, inner, hidden, None if after is None else after.norms[0])


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return torch.rms_norm(x, (HIDDEN,), norm.float(), EPS)


def exact(layers: list[Layer], hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.float()
    for layer in layers:
        attended = (normed(hidden, layer.norms[0]) @ layer.qkv.weight.float().t())[:, :QUERY]
        hidden = hidden + attended @ layer.output.weight.float().t()
        gate, up = (normed(hidden, layer.norms[1]) @ layer.gate_up.weight.float().t()).chunk(2, -1)
        hidden = hidden + (F.silu(gate) * up) @ layer.down.weight.float().t()
    return hidden


@pytest.mark.parametrize("rows", [1, 2, 8, 15, 16, 17, 32, 40, 48, 49, 50, 63, 64, 65, 80, 81, 96])
@torch.inference_mode()
def test_a_graph_of_them_is_right_every_time(rows: int) -> None:
    torch.manual_seed(rows)
    layers = [Layer() for _ in range(LAYERS)]
    few = FewRows(EPS, DEVICE)
    begin = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
    want = exact(layers, begin)
    hidden = begin.clone()
    chain(few, layers, hidden)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(begin)
        chain(few, layers, hidden)
    first = None
    for _ in range(REPEATS):
        graph.replay()
        torch.cuda.synchronize()
        first = hidden.clone() if first is None else first
        assert torch.equal(hidden, first)
    assert float((hidden.float() - want).norm() / want.norm()) < ERROR


@pytest.mark.skipif(not limits_of(DEVICE).has_fp8, reason="fp8 needs compute capability 8.9")
@pytest.mark.parametrize("rows", [1, 2, 17, 48, 64, 65, 96, 128, 300, 2048])
@torch.inference_mode()
def test_weights_of_fp8(rows: int) -> None:
    """Each way to multiply by them, beside float32 of the same rounded numbers."""
    torch.manual_seed(rows)
    for out, size in ((QKV, HIDDEN), (HIDDEN, INNER), (2 * INNER, HIDDEN)):
        weight = quantize(torch.randn(out, size, device=DEVICE).bfloat16() * size**-0.5)
        gemm = linear_of(weight)
        assert isinstance(gemm, Fp8Linear)
        x = torch.randn(rows, size, device=DEVICE).bfloat16()
        rows_seen = rounded(x)
        want = rows_seen.dense().float() @ weight.dense().float().t()
        if rows == 1:  # which is not rounded
            assert torch.equal(rows_seen.dense(), x)
        error = (gemm(x).float() - want).norm() / want.norm()
        assert float(error) < ERROR, (rows, out, size)
