"""Compiles every Triton kernel of ours for a GPU that is not there, and prints what it takes.

    TASUKI_EMULATE_CAPABILITY=8.9 python tests/kernels/launches.py thin|full

The code that launches kernels runs as it is, over memory of the CPU that nobody reads: only
Triton's driver is exchanged, and its launches stop after the compilation. So what is compiled
is what would be launched. Prints a JSON object: the names of all kernels there are, and for
each compiled one its name, what it is for, and its bytes of shared memory.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import tasuki
from tasuki.attention import parts, write
from tasuki.attention.batch import Batch
from tasuki.attention.decode import DecodeAttention
from tasuki.device_limits import CAPABILITY, limits_of
from tasuki.execution import draw_kernel, penalty_kernel
from tasuki.kv import digest_kernel
from tasuki.models import fp8_kernels, fp8_linear, kernels, one_row_op
from tasuki.models.fp8_linear import Fp8Linear
from tasuki.models.gemms import LIMIT_ROWS, FewRows
from tasuki.models.layers import PlainLinear
from tasuki.models.weights import Fp8Weight

CPU = torch.device("cpu")
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LIMITS = limits_of(CPU)
CORES = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}

compiled: list[dict[str, object]] = []
_label = ""


@contextmanager
def label(text: str) -> Iterator[None]:
    """What the launches in this block are for."""
    global _label
    _label = text
    yield


class Driver:
    """As much of Triton's driver as compiling takes."""

    utils = SimpleNamespace()
    map_python_to_cpp_type = CudaDriver.map_python_to_cpp_type

    def get_current_target(self) -> GPUTarget:
        major, minor = LIMITS.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """Make launches end after the compilation, noted in `compiled`."""
    driver.set_active(Driver())
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        result = launch(kernel, *args, grid=grid, warmup=True, **options)
        shared = result.metadata.shared
        compiled.append({"kernel": kernel.__name__, "of": _label, "shared_bytes": shared})
        return result

    JITFunction.run = run


def kernels_there_are() -> list[str]:
    """Names of all kernels that such a GPU may run; those that only kernels call are none."""
    package = Path(tasuki.__file__).parent
    found: dict[str, JITFunction] = {}
    for path in package.rglob("*.py"):
        if "@triton.jit" in path.read_text():
            name = ".".join(path.relative_to(package).with_suffix("").parts)
            module = importlib.import_module(f"tasuki.{name}")
            if module is fp8_kernels and not LIMITS.has_fp8:
                continue
            found |= {
                n: f
                for n, f in vars(module).items()
                if isinstance(f, JITFunction) and f.fn.__module__ == module.__name__
            }
    called = {n for n in found for f in found.values() if re.search(rf"(?<!def )\b{n}\(", f.src)}
    return sorted(set(found) - called)


def rows_of(rows: int, size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(rows, size, dtype=dtype)


def linear(out: int, size: int, dtype: torch.dtype = BF16, *, biased: bool = False) -> PlainLinear:
    return PlainLinear(rows_of(out, size, dtype), rows_of(1, out, dtype)[0] if biased else None)


def gemms(full: bool) -> None:
    """`FewRows`: each way to group rows, with everything around a GEMM, whole and divided."""
    shapes = [(2560, 6144, 9728)]  # hidden, qkv, intermediate: Qwen3-4B's
    if full:
        shapes += [(4096, 6144, 14336), (896, 1152, 4864), (8192, 10240, 28672)]
    few = FewRows(1e-5, CPU)
    for (hidden, qkv, inner), rows, dtype, biased in itertools.product(
        shapes,
        (1, 2, 16, 32, 48, 64, 80, 96) if full else (1, 2, 64, 96),
        (BF16, F16) if full else (BF16,),
        (False, True) if full else (False,),
    ):
        for few._programs in (1, CORES[LIMITS.capability]) if full else (CORES[LIMITS.capability],):
            with label(f"{rows} rows of {hidden}, {dtype}, biased={biased}"):
                x, norm = rows_of(rows, hidden, dtype), rows_of(1, hidden, dtype)[0]
                if few.takes(linear(qkv, hidden, dtype), rows, LIMIT_ROWS):
                    few.normed(linear(qkv, hidden, dtype, biased=biased), x, norm)
                    few.plain(linear(hidden, hidden, dtype, biased=biased), x)
                    weighted = few.add(
                        linear(hidden, inner, dtype, biased=biased),
                        rows_of(rows, inner, dtype),
                        x,
                        norm,
                    )
                    few.gated(linear(2 * inner, hidden, dtype), x, norm)
                    if weighted is not None:
                        few.gated(linear(2 * inner, hidden, dtype), weighted, norm)
    with label("one row in float32"):
        few.normed(linear(4096, 2048, F32), rows_of(1, 2048, F32), rows_of(1, 2048, F32)[0])
        few.gated(linear(8192, 2048, F32), rows_of(1, 2048, F32), rows_of(1, 2048, F32)[0])
        few.plain(linear(4096, 2048, F32), rows_of(1, 2048, F32))
    with label("one row of a compiled model"):
        torch.ops.tasuki.one_row(rows_of(1, 2048), rows_of(2048, 2048), None)
    assert one_row_op.gemm_with is not None  # registers the operator


def fp8_gemms(full: bool) -> None:
    """Weights of fp8, and the rounding of rows."""
    if not LIMITS.has_fp8:
        return
    shapes = [(2560, 6144, 9728)]
    if full:
        shapes += [(4096, 6144, 14336), (2048, 3072, 4864)]
    for (hidden, qkv, inner), rows, height, cores in itertools.product(
        shapes,
        (1, 2, 16, 32, 64, 96, 200, 2000) if full else (1, 2, 32, 96, 2000),
        (128, 32) if full else (128,),
        (1, CORES[LIMITS.capability]) if full else (CORES[LIMITS.capability],),
    ):
        with label(f"{rows} rows of {hidden} by fp8, blocks of {height} rows"):
            x, norm = rows_of(rows, hidden), rows_of(1, hidden)[0]
            biased = fp8(qkv, hidden, height, cores, biased=True)
            output = fp8(hidden, hidden, height, cores)
            both, down = fp8(2 * inner, hidden, height, cores), fp8(hidden, inner, height, cores)
            biased(fp8_linear.norm_rounded(x, norm, 1e-5))
            added = output(fp8_linear.rounded(x))
            gate_up = both(fp8_linear.add_norm_rounded(x, added, norm, 1e-5))
            down(fp8_linear.gated_rounded(gate_up))


def fp8(out: int, size: int, height: int, cores: int, *, biased: bool = False) -> Fp8Linear:
    scales = rows_of(-(-out // height), size // 128, F32)
    weight = Fp8Weight(rows_of(out, size, FP8), scales, height, 128, BF16)
    gemm = Fp8Linear(weight, rows_of(1, out)[0] if biased else None)
    gemm._device = replace(gemm._device, programs=cores)
    return gemm


def fused(full: bool) -> None:
    """Norms, gates, and what sampling takes."""
    for size in (2560, 8192, 16384) if full else (2560, 16384):
        for dtype in (BF16, F16, F32) if full else (BF16,):
            with label(f"{size} wide, {dtype}"):
                x, weight = rows_of(4, size, dtype), rows_of(1, size, dtype)[0]
                kernels.norm(x, weight, 1e-5)
                kernels.add_norm(x, x, weight, 1e-5)
                kernels.gated(rows_of(4, 2 * size, dtype))
    for vocab in (151_936, 49_152) if full else (151_936,):
        with label(f"vocabulary {vocab}"):
            logits, best = rows_of(4, vocab, F32), torch.empty(4, dtype=torch.int64)
            draws = rows_of(len(draw_kernel.FIELDS), 4, torch.float64)
            draw_kernel.draw(logits, None, draws, best, -1)
            seen = rows_of(4, vocab, torch.int32)
            penalty_kernel.penalize(logits, seen, rows_of(5, 4, torch.float64))


def attention(full: bool) -> None:
    """Writing to the cache and attending to it, for groups of heads, dimensions and caches."""
    shapes = [(32, 8, 128), (9, 3, 64), (8, 1, 256)]  # query heads, KV heads, head_dim
    if full:
        shapes += [
            (32, 32, 128),
            (28, 4, 128),
            (64, 8, 64),
            (14, 2, 64),
            (16, 8, 256),
            (64, 4, 128),
        ]
    for (heads, kv_heads, dim), block_size, kv_dtype, dtype in itertools.product(
        shapes,
        (16, 32, 48) if full else (32,),
        (None, FP8) if LIMITS.has_fp8 else (None,),
        (BF16, F16) if full else (BF16,),
    ):
        if kv_dtype and not full and dim != 128:
            continue
        pool = torch.empty(8, kv_heads, 2, 2, block_size, dim, dtype=kv_dtype or dtype)
        query = torch.empty(4, heads, dim, dtype=dtype)
        key = torch.empty(4, kv_heads, dim, dtype=dtype)
        for window in (None, 100) if full else (None,):
            with label(f"{heads}/{kv_heads} heads of {dim}, blocks of {block_size}, {pool.dtype}"):
                decode = DecodeAttention(pool, heads)
                plan = decode.plan(decodes(4), window)
                decode.forward(plan, 0, query, 0.1, query)  # the first after a plan waits
                decode.forward(plan, 1, query, 0.1, query)
        slots = torch.empty(4, dtype=torch.int64)
        qkv = torch.empty(4, heads + 2 * kv_heads, dim, dtype=dtype)
        table = torch.empty(64, 2, dim // 2)
        norm = torch.empty(dim, dtype=dtype)
        for norms in ((norm, norm), None):
            write.rotate_and_write(qkv, table, slots, norms, 1e-5, slots, pool, 0)
        write.write(key, key, slots, pool, 0)
    block_tables = torch.empty(4, 8, dtype=torch.int32)
    parts.flatten(block_tables, torch.empty(5, dtype=torch.int32), 8, block_tables.view(-1))


def digests(_full: bool) -> None:
    """Digests of units of a pool's blocks."""
    words, units = torch.empty(4, 2, 6, 64, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
    with label("digests"):
        keys = torch.empty(6, dtype=torch.int64), torch.empty(32, dtype=torch.int64)
        digest_kernel.digest(words, units, 2, 0, 2, *keys)


def decodes(rows: int) -> Batch:
    """A batch of so many decodes, of which nothing but the lists is read."""
    numbers = torch.empty(rows, dtype=torch.int64)
    tables = torch.empty(rows, 8, dtype=torch.int32)
    return Batch(numbers, numbers, numbers, tables, [1] * rows, [40] * rows, numbers, rows)


if __name__ == "__main__":
    assert os.environ[CAPABILITY] and "TRITON_INTERPRET" not in os.environ
    compile_only()
    every = sys.argv[1] == "full"
    for part in (gemms, fp8_gemms, fused, attention, digests):
        part(every)
    print(
        json.dumps(
            {
                "triton": triton.__version__,
                "limit": LIMITS.shared_bytes,
                "kernels": kernels_there_are(),
                "compiled": compiled,
            }
        )
    )
