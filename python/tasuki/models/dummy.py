"""Random weights of a model's shape: for benchmarks, which need no checkpoint.

Small enough that activations and logits stay finite through any depth: what a
step costs depends on shapes, not on values. This file owns no state but the
generator.
"""

from __future__ import annotations

import torch

from tasuki.models.shard import Slice

_STD = 0.02  # what most models are initialised with


class DummyTensors:
    """`Tensors` made on the device: norms are 1, everything else is normal, seeded.

    A rank makes whole tensors and keeps its parts, so that all ranks' parts
    together are the same model however many they are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Make tensors of `dtype` on `device`; the same in the same order."""
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """Make the tensor of this name, or part of it."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        made.normal_(std=_STD, generator=self._generator)
        if part is None:
            return made
        return made.narrow(part.dim, part.begin, part.end - part.begin).clone()

    def fp8(self, name: str, shape: tuple[int, ...]) -> None:
        """None is: what is made is dense."""
