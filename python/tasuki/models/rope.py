"""Rotary position embedding: what config.json says about it, and the tables it leads to.

The rotation of a token is a function of its position alone, whatever batch or
chunk it is computed in. This holds for "dynamic" scaling too: position p is
rotated with the frequencies of a sequence of p + 1 tokens, which is what
step-by-step decoding with `transformers` gives.

This file owns no state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tasuki.models.config_file import positive
from tasuki.models.errors import ModelError, UnsupportedModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotation.

    Attributes:
        kind: one of KINDS.
        theta: base of the frequencies.
        factor: by how much the context is stretched.
        original_max_position: context before stretching, in tokens.
        low_freq_factor, high_freq_factor: llama3 only.
        attention_factor: yarn only; factor on cos and sin, None: from `factor`.
        beta_fast, beta_slow: yarn only; rotations at the ends of the ramp.
        mscale, mscale_all_dim: yarn only; 0: not given.
        truncate: yarn only; round the ends of the ramp to whole dimensions.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """Read the rotation from a config.json of either age.

    transformers 5 writes `rope_parameters`; before that it was `rope_theta` and
    `rope_scaling` (with `type` instead of `rope_type` before 4.43).

    Raises:
        ModelError: Both are there, and differ.
        UnsupportedModelError: The kind is not one of KINDS, or only a part of
            the head is rotated.
        ValueError: A parameter is not a number, or not one above 0.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    rope = _read(new or old, config, max_position)
    if new and old and rope != _read(old, config, max_position):
        raise ModelError(
            f"config.json has rope_scaling {old}, which differs from its rope_parameters {new}:"
            " write all into rope_parameters, and remove rope_scaling"
        )
    return rope


def _read(parameters: Any, config: Mapping[str, Any], max_position: int) -> RopeSpec:
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_scaling is {parameters!r}, must be an object")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not one of {', '.join(KINDS)}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not 1")

    def number(name: str, default: float) -> float:
        value = parameters.get(name)
        return positive(name, value) if value else default

    context = positive("max_position_embeddings", max_position)
    original = config.get("original_max_position_embeddings")
    if not original:
        original = number("original_max_position_embeddings", context)
    original = int(positive("original_max_position_embeddings", original))
    theta = positive("rope_theta", config.get("rope_theta") or 10000.0)
    return RopeSpec(
        kind=kind,
        theta=number("rope_theta", theta),
        factor=number("factor", context / original),
        original_max_position=max_position if kind == "dynamic" else original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        attention_factor=number("attention_factor", 0.0) or None,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=bool(parameters.get("truncate", True)),
    )


def context_tokens(rope: RopeSpec, max_position: int) -> int:
    """Context of a model, in tokens, whose config.json says `max_position`.

    With linear and dynamic scaling that number is the context before
    stretching; with yarn it may be either.
    """
    if rope.kind in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def rope_table(rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of positions 0 .. positions-1.

    The sine's first half carries a minus sign, so that with x rolled by half of
    the head, `x * table[:, 0] + rolled * table[:, 1]` is the rotation.

    Returns:
        [positions, 2, head_dim] of `dtype`, on the CPU.
    """
    frequencies, scale = _frequencies(rope, head_dim, positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(dtype)


def _frequencies(rope: RopeSpec, head_dim: int, positions: int) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim/2] or [positions, head_dim/2], and the factor on cos and sin."""
    plain = _inverse_powers(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "dynamic" and positions > rope.original_max_position:
        return _dynamic(rope, plain, positions), 1.0
    return plain, 1.0


def _inverse_powers(base: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (base**exponents)


def _dynamic(rope: RopeSpec, plain: torch.Tensor, positions: int) -> torch.Tensor:
    """NTK-aware base that grows with the sequence. Source: transformers, "dynamic"."""
    original, head_dim = rope.original_max_position, 2 * plain.shape[0]
    beyond = torch.arange(original + 1, positions + 1, dtype=torch.float64)
    growth = rope.factor * beyond / original - (rope.factor - 1)
    bases = rope.theta * growth ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    stretched = (1.0 / bases[:, None] ** exponents).float()
    return torch.cat((plain.expand(original, -1), stretched))


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Source: Llama 3.1's reference code: long waves are stretched, short ones kept."""
    wavelengths = 2 * math.pi / plain
    rotations = rope.original_max_position / wavelengths
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Source: Peng et al., YaRN, arXiv 2309.00071, sections 3.2 and 3.4."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _inverse_powers(rope.theta, head_dim)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        ratio = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
        return frequencies, ratio
    return frequencies, magnitude(rope.factor)
