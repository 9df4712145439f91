"""The floor of a decode step on the CPU: how fast all threads read memory, and how much."""

from __future__ import annotations

import time

import torch

from tasuki.models.spec import ModelSpec

READ_BYTES = 1 << 30


def read_bytes_per_s(repeats: int = 15) -> float:
    """Bytes per second of a sum over more than any cache holds, the best of several."""
    data = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return READ_BYTES / min(times)


def weights(spec: ModelSpec) -> tuple[int, int]:
    """Elements of the layers' products, and of the head."""
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * query + 2 * kv)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp), spec.vocab_size * spec.hidden_size
