"""Private parts of PyTorch that models use; the message names the version that lacks one.

Those of NIXL are in tests/launch/test_requirements.py, FlashInfer's in tests/gpu.
"""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.mark.parametrize(
    ("owner", "name", "user"),
    [
        ("ops.mkldnn", "_linear_pointwise", "models/layers.py"),
        ("ops.mkldnn", "_reorder_linear_weight", "models/layers.py"),
        ("_inductor.async_compile", "shutdown_compile_workers", "models/fallback_compile.py"),
    ],
)
def test_torch_has_it(owner: str, name: str, user: str) -> None:
    found: object = torch
    if owner.startswith("_"):
        found = importlib.import_module(f"torch.{owner}")
    else:
        for part in owner.split("."):
            found = getattr(found, part)
    assert hasattr(found, name), f"torch {torch.__version__} has no {owner}.{name}: see {user}"
