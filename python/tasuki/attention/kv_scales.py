"""What keys and values in an fp8 cache are multiplied by, for each layer.

Scales are powers of two: fp8 keeps as many bits of a number whatever its scale, so that these
only bring a layer's numbers into its range, and what is multiplied by them stays exact in
bfloat16. So queries may take in the keys' scale, and results the values'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8
MARGIN = 2.0  # of a cache's largest number over the largest that was measured


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales by layer of the pool; a number in the cache stands for itself times its scale.

    Attributes:
        exponents: Of two, for a layer's keys and values; empty: all scales are 1.
    """

    exponents: tuple[tuple[int, int], ...] = ()

    def of(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's keys and values."""
        if not self.exponents:
            return 1.0, 1.0
        key, value = self.exponents[layer]
        return 2.0**key, 2.0**value

    def seen(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, kept: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a cache of the dtype `kept` gives them back: so attention sees the
        same in the step that writes them as in any later one.
        """
        if kept != FP8:
            return key, value
        key_scale, value_scale = self.of(layer)
        return rounded(key, key_scale), rounded(value, value_scale)

    @staticmethod
    def holding(largest: Sequence[Sequence[float]], margin: float = 1.0) -> KvScales:
        """The least scales with which fp8 holds numbers up to `largest`, times `margin`.

        Args:
            largest: Of each layer's keys and values, absolute.
            margin: At least 1.
        """
        return KvScales(
            tuple((_exponent(key * margin), _exponent(value * margin)) for key, value in largest)
        )


UNSCALED = KvScales()


def _exponent(largest: float) -> int:
    return math.ceil(math.log2(largest / LARGEST)) if 0 < largest < math.inf else 0


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Numbers as an fp8 cache keeps them; beyond its range the largest, NaN as it is."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Numbers as they are read from an fp8 cache, in the dtype of `x`."""
    return from_fp8(to_fp8(x, scale), scale, x.dtype)


def from_fp8(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What an fp8 cache has of numbers, in `dtype`."""
    return x.to(dtype) * scale
