"""The model that the benchmarks of one process run, with random weights, and its pool."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from shapes import DEFAULT, config_of, write_model

from tasuki.kv.layout import CacheLayout
from tasuki.models.base import CausalModel
from tasuki.models.loader import load_model


def dummy_model(device: torch.device, tiny: bool, shape: str = DEFAULT) -> CausalModel:
    """A model of this shape, or a tiny one; bfloat16 on a GPU, float32 elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), config_of(shape, tiny))
        return load_model(path, dtype=_dtype(device), device=device, weights="dummy")


def pool_for(
    model: CausalModel, device: torch.device, tokens: int, block_size: int
) -> torch.Tensor:
    """A pool of the model's dtype for so many tokens."""
    spec = model.spec
    layout = CacheLayout(
        tokens // block_size,
        spec.num_kv_heads,
        spec.num_layers,
        block_size,
        spec.head_dim,
        _dtype(device),
    )
    return layout.allocate(device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
