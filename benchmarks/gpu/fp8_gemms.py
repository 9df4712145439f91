"""The GEMMs of `fp8.py`: each compared with float32, and each timed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fp8_results import Results, relative
from step_bench import Bench

from tasuki.attention.kv_scales import FP8
from tasuki.execution.recorder import CudaRecorder
from tasuki.models.llama import LlamaModel

GEMM_ROWS = (16, 32, 96, 256, 608, 2048, 4096)


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's GEMMs, by the model's config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    return {
        "qkv": (query + 2 * kv, hidden),
        "output": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def check_kernels(
    results: Results, shapes: dict[str, tuple[int, int]], device: torch.device
) -> None:
    """Each GEMM at each kind of number of rows, with random weights and scales."""
    from tasuki.models.fp8_linear import rounded

    for height in (128, 1):
        for rows in (1, 2, 16, 77, 96, 200, 1000) if device.type == "cuda" else (2, 65):
            for name, (out, size) in shapes.items():
                with results.noting(f"{name}, {rows} rows"):
                    torch.manual_seed(rows)
                    gemm = random_linear(out, size, height, device)
                    x = torch.randn(rows, size, device=device).to(gemm.weight.dtype)
                    got, seen = gemm(x), rounded(x).dense()
                    want = seen.float() @ gemm.weight.dense().float().t()
                    found = {"gemm": name, "rows": rows, "scales": f"{height} x 128"}
                    results.checks.append({**found, "error": relative(got, want)})


def random_linear(out: int, size: int, height: int, device: torch.device) -> Any:
    """A GEMM by fp8 whose blocks' scales differ."""
    from tasuki.models.fp8_linear import Fp8Linear
    from tasuki.models.weights import Fp8Weight

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    values = (4 * torch.randn(out, size, device=device)).to(FP8)
    scales = 0.5 + torch.rand(-(-out // height), size // 128, device=device)
    return Fp8Linear(Fp8Weight(values, scales * size**-0.5 / 4, height, 128, dtype), None)


def measure_gemms(
    results: Results, dense_model: LlamaModel, model: LlamaModel, bench: Bench
) -> None:
    """Each GEMM at each number of rows: of a model with dense weights, and of one with fp8."""
    from tasuki.models.fp8_linear import FEW_ROWS, Fp8Linear, rounded

    dense: Any = dense_model.layers
    fp8: Any = model.layers
    gemms: dict[str, Callable[[Any], Any]] = {
        "qkv": lambda layer: layer.qkv,
        "output": lambda layer: layer.output,
        "gate_up": lambda layer: layer.mlp.gate_up,
        "down": lambda layer: layer.mlp.down,
    }
    with torch.inference_mode():
        # The same weights with scales of 128 x 128, as folders have them: of no other one's values.
        square = [
            {
                name: Fp8Linear(
                    replace(of(layer).weight, scales=_squares(of(layer).weight), rows=128), None
                )
                for name, of in gemms.items()
            }
            for layer in fp8
        ]
    for rows in GEMM_ROWS:
        for name, of in gemms.items():
            x = torch.randn(rows, of(dense[0]).weight.shape[1], device=bench.device)
            x = x.to(bench.dtype)
            r = rounded(x)
            works: dict[str, tuple[Any, Callable[[Any], object]]] = {
                "bfloat16": (dense, lambda layer, x=x, of=of: of(layer)(x)),
                "fp8": (fp8, lambda layer, r=r, of=of: of(layer)(r)),
                "fp8, 128 x 128": (square, lambda layer, r=r, name=name: layer[name](r)),
                "many rows": (fp8, lambda layer, r=r, of=of: _own(of(layer), r)),
                "rounding": (fp8, lambda layer, x=x: rounded(x)),
            }
            if rows <= FEW_ROWS:
                works["cuBLAS"] = (fp8, lambda layer, r=r, of=of: of(layer)._multiply(r))
            for way, (layers, work) in works.items():
                what = {"gemm": name, "rows": rows, "way": way}
                with results.noting(f"{name}, {way}, {rows} rows"), torch.inference_mode():
                    results.gemms.append({**what, "us": _us(bench, layers, work)})


def _squares(weight: Any) -> Any:
    """Scales as many as blocks of 128 x 128 have: times are of interest, not results."""
    return weight.scales[::128].contiguous()


def _own(gemm: Any, x: Any) -> Any:
    """By our kernel for many rows."""
    out = torch.empty(x.shape[0], gemm.outs, dtype=x.dtype, device=x.device)
    return gemm._launch_many(out, x)


def _us(bench: Bench, layers: Any, each: Callable[[Any], object]) -> float:
    """Microseconds of one layer's, over all layers, on CUDA in a graph."""

    def all_layers() -> tuple[torch.Tensor, torch.Tensor]:
        for layer in layers:
            each(layer)
        return torch.empty(0), torch.empty(0)

    run: Callable[[], object] = all_layers
    if bench.on_cuda:
        run = CudaRecorder().record(all_layers)[0]
    return 1e3 * bench.device_ms(run) / len(layers)
