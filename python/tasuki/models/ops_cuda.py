"""The steps of a Llama layer by fused kernels.

With many rows there are four launches a layer beside the products. With few the
products are ours as well, and take the norms, the gate and the additions into them.
Nothing here depends on the batch's lists, so that all of it may be captured in a
CUDA graph. Owns the rotation's table, made once for the model's whole context.
"""

from __future__ import annotations

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.write import rotate_and_write
from tasuki.engine.batch import Batch
from tasuki.models import kernels
from tasuki.models.layers import Linear
from tasuki.models.llama_layer import LlamaLayer, Norms
from tasuki.models.ops import Ahead, Ops, Rotation
from tasuki.models.products import FewRows
from tasuki.models.rope import rope_table
from tasuki.models.spec import ModelSpec
from tasuki.models.weighted import Weighted


class CudaOps(Ops):
    """`Ops` for CUDA; see models/ops.py."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        """Prepare for a model of this shape."""
        assert spec.rope is not None
        self._spec = spec
        self._scale = spec.head_dim**-0.5
        self._few = FewRows(spec.norm_eps, device)
        half = spec.head_dim // 2
        # [positions, 2, head_dim / 2] float32: cosines, and sines without their sign.
        table = rope_table(spec.rope, spec.head_dim, spec.max_position, torch.float32)
        self._table = table[:, :, half:].contiguous().to(device)

    def qkv(self, layer: LlamaLayer, hidden: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """See `Ops.qkv`."""
        product = layer.qkv
        if not isinstance(ahead, torch.Tensor) and self._few.takes(product, hidden.shape[0]):
            x = hidden if ahead is None else ahead
            return self._few.normed(product, x, layer.attention_norm)
        return super().qkv(layer, hidden, ahead)

    def rest(
        self, layer: LlamaLayer, hidden: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor
    ) -> Ahead:
        """See `Ops.rest`."""
        product = layer.gate_up
        if not self._few.takes(product, hidden.shape[0]):
            return super().rest(layer, hidden, attended, norm)
        ahead = self._add(hidden, attended, layer.output, layer.mlp_norm)
        x = hidden if ahead is None else ahead
        inner = self._few.gated(product, x, layer.mlp_norm)
        return self._add(hidden, inner, layer.down, norm)

    def _add(
        self, hidden: torch.Tensor, x: torch.Tensor, product: Linear, norm: torch.Tensor
    ) -> Weighted | None:
        if self._few.takes(product, x.shape[0]):
            return self._few.add(product, x, hidden, norm)
        hidden += product(x)
        return None

    def rotation(self, batch: Batch) -> Rotation:
        """The table, and which of its rows."""
        return self._table, batch.positions

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Ops.norm`."""
        return kernels.norm(x, weight, self._spec.norm_eps)

    def add_norm(self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Ops.add_norm`."""
        return kernels.add_norm(hidden, x, weight, self._spec.norm_eps)

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
        table, positions = rotation
        rotate_and_write(
            qkv, table, positions, norms, spec.norm_eps, batch.slots, attention.pool, layer
        )
        query, key, value = torch.split_with_sizes(qkv, (heads, kv_heads, kv_heads), 1)
        attended = attention.forward(
            layer,
            query,
            key,
            value,
            scale=self._scale,
            sliding_window=spec.sliding_windows[layer],
            written=True,
        )
        return attended.view(qkv.shape[0], -1)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.gated`."""
        return kernels.gated(gate_up)
