"""Every Triton kernel of ours compiles for every architecture, within its shared memory.

It needs no GPU: launches.py says how. `make test` compiles them for two architectures, with and
without Hopper's instructions and memory; `make test-kernels` compiles every configuration for
all of them. Triton keeps what it compiled, so that only the first run after a change takes long.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasuki.attention.decode_kernels import shared_bytes

pytestmark = pytest.mark.system

# Bytes of shared memory that a thread block may have. Source: CUDA C++ Programming Guide.
LIMITS = {
    "8.0": 166_912,
    "8.6": 101_376,
    "8.9": 101_376,
    "9.0": 232_448,
    "10.0": 232_448,
    "12.0": 101_376,
}
THIN = ("8.9", "9.0")
EXTENT = os.environ.get("TASUKI_TEST_KERNELS", "thin")  # `make test-kernels`: full


def compile_for(capability: str) -> dict[str, Any]:
    """What launches.py tells of an architecture."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launches.py")), EXTENT],
        env={**environment, "TASUKI_EMULATE_CAPABILITY": capability, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=6000.0 if EXTENT == "full" else 850.0,
    )
    assert done.returncode == 0, f"sm {capability}: {done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@functools.cache
def all_compiled() -> dict[str, dict[str, Any]]:
    """By architecture; as many at a time as there are cores."""
    names = tuple(LIMITS) if EXTENT == "full" else THIN
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        results = threads.map(compile_for, names)
        return dict(zip(names, results, strict=True))


@pytest.mark.timeout(6000 if EXTENT == "full" else 900)
def test_every_kernel_compiles_within_the_shared_memory() -> None:
    for capability, result in all_compiled().items():
        names = {each["kernel"] for each in result["compiled"]}
        missing = sorted(set(result["kernels"]) - names)
        assert not missing, f"{missing}: launch them in tests/kernels/launches.py too"
        limit = LIMITS[capability]
        assert result["limit"] == limit
        too_large = [each for each in result["compiled"] if each["shared_bytes"] > limit]
        assert not too_large, f"sm {capability} has {limit} bytes: {too_large}"


def test_two_programs_of_decode_attention_share_a_multiprocessor() -> None:
    """What decode.py plans with is what the compiler takes."""
    per_core = {"8.0": 167_936, "8.9": 102_400, "9.0": 233_472, "10.0": 233_472, "12.0": 102_400}
    for capability, result in all_compiled().items():
        attends = [each for each in result["compiled"] if each["kernel"] == "attend"]
        assert attends
        for each in attends:
            # Heads of 256 cannot on the small ones: one program each there.
            fits = 2 * (each["shared_bytes"] + 1024) <= per_core[capability]
            assert fits or "of 256" in each["of"], (capability, each)


def test_the_estimate_of_decode_attention_is_the_compilers() -> None:
    results = all_compiled()["9.0"]["compiled"]
    of = "32/8 heads of 128, blocks of 32, torch.bfloat16"
    (found,) = {e["shared_bytes"] for e in results if (e["kernel"], e["of"]) == ("attend", of)}
    assert found == shared_bytes(tile=64, head_dim=128, rows=16, itemsize=2)
