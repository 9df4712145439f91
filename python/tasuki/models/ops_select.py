"""Which operators compute a Llama layer on a device."""

from __future__ import annotations

import torch

from tasuki.models.ops import Ops
from tasuki.models.ops_torch import TorchOps
from tasuki.models.spec import ModelSpec


def make_ops(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Ops:
    """Fused kernels on CUDA, PyTorch's operators elsewhere."""
    if device.type == "cuda":
        from tasuki.models.ops_cuda import CudaOps  # imports Triton, which others may lack

        return CudaOps(spec, device)
    return TorchOps(spec, dtype, device)
