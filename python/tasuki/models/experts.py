"""A layer's MLP made of experts, of which each token passes a few.

The router scores all experts in float32; the best few of a token add up, weighted by their
scores. Rows are sorted by expert, so that each GEMM of all experts is one grouped GEMM
(`torch.nn.functional.grouped_mm`). How many rows an expert gets stays on the device: a step's
shapes depend on its number of tokens alone, so that it may be captured in a CUDA graph.

The reference path: right on every device, in any dtype; kernels for few rows may replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.execution.collective import Collective
from tasuki.models.spec import ExpertsSpec

_UNIT = 8  # grouped GEMMs take rows of whole 16 bytes

Gate = Callable[[torch.Tensor], torch.Tensor]
"""[rows, 2 x inner] to [rows, inner]; see `Ops.gated`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts, or a rank's columns of each.

    Attributes:
        spec: Of the model.
        router: [count, hidden].
        gate_up: [count, 2 x inner, hidden], the gates' rows first.
        down: [count, hidden, inner].
        collective: Adds up what the ranks make.
    """

    spec: ExpertsSpec
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    collective: Collective

    def __call__(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """[T, hidden] to [T, hidden], T at least 1; `gate` is what lies between the GEMMs."""
        weights, chosen = self._route(x)
        of_row = chosen.flatten()
        experts, order = torch.sort(of_row, stable=True)
        ids = torch.arange(self.spec.count, device=x.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, ids, right=True).to(torch.int32)
        rows = x[order // self.spec.per_token]
        inner = gate(F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends))
        out = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        made = torch.empty_like(out)
        made[order] = out
        each = made.view(x.shape[0], self.spec.per_token, -1)
        result = torch.bmm(weights[:, None], each)[:, 0]
        return result if self.collective.size == 1 else self.collective.all_reduce(result)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in the model's dtype and numbers of each token's experts, [T, per_token]."""
        scores = F.linear(x, self.router).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.spec.per_token, dim=-1)
        if self.spec.renormalise:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen


def make_experts(
    spec: ExpertsSpec,
    router: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: torch.Tensor,
    collective: Collective,
) -> Experts:
    """Put a layer's experts together, their inner layers padded with zeros to `_UNIT` columns.

    Args:
        spec: Of the model.
        router: [count, hidden].
        gate_up: [count, inner, hidden] each.
        down: [count, hidden, inner].
        collective: Joins the ranks.
    """
    missing = -down.shape[2] % _UNIT
    gate, up = (F.pad(part, (0, 0, 0, missing)) for part in gate_up) if missing else gate_up
    down = F.pad(down, (0, missing)) if missing else down
    return Experts(spec, router, torch.cat([gate, up], 1), down, collective)
