"""Applies the bits of tokens that grammars allow to logits (engine/grammar_masks.py makes them)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki.engine.grammar_masks import StepMasks
from tasuki.execution.step_arrays import upload


def forbid(work: torch.Tensor, draws: Sequence[int], masks: StepMasks) -> None:
    """Make the logits of forbidden tokens negative infinity.

    Args:
        work: [n, V] float32; changed.
        draws: Index of the draw of each row.
        masks: Of the step; draws that have no bits stay as they are.
    """
    own = [(row, masks.rows[draw]) for row, draw in enumerate(draws) if draw in masks.rows]
    if not own:
        return
    places, sources = zip(*own, strict=True)
    bits = masks.bits
    if list(sources) != list(range(len(bits))):
        bits = bits[list(sources)]
    forbidden = _forbidden(bits, work.shape[1], work.device)
    if len(own) == len(work):
        work.masked_fill_(forbidden, -torch.inf)
    else:
        at = upload(places, torch.int64, work.device)
        work[at] = work[at].masked_fill_(forbidden, -torch.inf)


def _forbidden(bits: NDArray[np.uint32], vocab: int, device: torch.device) -> torch.Tensor:
    """Whether each token is forbidden: [n, vocab] bool on the device, from bits [n, W]."""
    raw = bits.view(np.uint8)
    if raw.shape[1] * 8 < vocab:
        raw = np.pad(raw, ((0, 0), (0, -(-vocab // 8) - raw.shape[1])))
    each = upload([1 << i for i in range(8)], torch.uint8, device)
    sent = torch.from_numpy(raw)
    if device.type != "cpu":
        sent = sent.pin_memory().to(device, non_blocking=True)
    expanded = sent[:, :, None] & each
    return (expanded == 0).flatten(1)[:, :vocab]
