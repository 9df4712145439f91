"""The steps of a Llama layer by PyTorch's operators: the CPU's, and the reference anywhere.

Owns the rotation's table, which grows with the longest context seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.models.ops import Norms, Ops, Rotation
from tasuki.models.rope import rope_table
from tasuki.models.spec import ModelSpec

_FIRST_POSITIONS = 2048  # rows of the rotation's table before it grows


class TorchOps(Ops):
    """`Ops` for any device; see models/ops.py."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare for a model of this shape and dtype."""
        assert spec.rope is not None
        self._spec = spec
        self._rope = spec.rope
        self._dtype, self._device = dtype, device
        self._scale = spec.head_dim**-0.5
        self._table = self._make_table(min(_FIRST_POSITIONS, spec.max_position))

    def rotation(self, batch: Batch) -> Rotation:
        """Cosines and signed sines of the batch's tokens, [T, 1, head_dim] each."""
        longest = max(batch.context_lens)
        if longest > self._table.shape[0]:
            positions = min(max(longest, 2 * self._table.shape[0]), self._spec.max_position)
            self._table = self._make_table(max(positions, longest))
        table = self._table[batch.positions]
        return table[:, :1], table[:, 1:]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Ops.norm`; here over the last dimension of any shape."""
        return torch.rms_norm(x, weight.shape, weight, self._spec.norm_eps)

    def add_norm(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Ops.add_norm`."""
        hidden += x
        return self.norm(hidden, weight)

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: Norms | None,
        rotation: Rotation,
        batch: Batch,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        spec = self._spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = qkv.view(qkv.shape[0], heads + 2 * kv_heads, spec.head_dim)
        query, key, value = torch.split_with_sizes(qkv, (heads, kv_heads, kv_heads), 1)
        if norms is not None:
            query.copy_(self.norm(query, norms[0]))
            key.copy_(self.norm(key, norms[1]))
        cos, sin = rotation
        turning = qkv.narrow(1, 0, heads + kv_heads)
        rolled = turning.roll(spec.head_dim // 2, -1)
        turning.mul_(cos).addcmul_(rolled, sin)
        window = spec.sliding_windows[layer]
        attended = attention.forward(
            layer, query, key, value, scale=self._scale, sliding_window=window
        )
        return attended.view(qkv.shape[0], -1)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.gated`."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def _make_table(self, positions: int) -> torch.Tensor:
        table = rope_table(self._rope, self._spec.head_dim, positions, self._dtype)
        return table.to(self._device)
