"""The Llama family, written out: Llama, Mistral, Qwen2, Qwen3, SmolLM2.

q, k and v are one product, gate and up another; the rotation works in place on
that product's rows; modules and their dispatch are left out. In the last layer
only the rows whose logits are wanted go through what follows attention.

Weights are frozen after loading; the rotation's table grows with the longest
context seen. Runs on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.models.layers import Linear
from tasuki.models.rope import rope_table
from tasuki.models.spec import ModelSpec

_FIRST_POSITIONS = 2048  # rows of the rotation's table before it grows


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights. Norms are [hidden]; the query's and key's [head_dim] or None."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights; `embedding` is [vocab, hidden]."""

    embedding: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    norm: torch.Tensor
    head: Linear


class LlamaModel:
    """`CausalModel` of the fast path; see models/base.py."""

    def __init__(self, spec: ModelSpec, weights: LlamaWeights) -> None:
        """Run `weights`, all of one dtype and on one device, as `spec` says."""
        assert spec.rope is not None
        self.spec = spec
        self._weights = weights
        self._rope = spec.rope
        self._scale = spec.head_dim**-0.5
        self._rope_table = self._make_rope_table(min(_FIRST_POSITIONS, spec.max_position))

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run one step; see `CausalModel.forward`."""
        weights = self._weights
        cos, sin = self._rotation(batch)
        hidden = F.embedding(batch.tokens, weights.embedding)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, hidden, cos, sin, attention)
            if index == last:
                hidden = hidden[batch.logits_rows]
                if not hidden.shape[0]:
                    break
                attended = attended[batch.logits_rows]
            hidden += layer.output(attended)
            hidden += self._mlp(layer, hidden)
        if not hidden.shape[0]:
            return hidden.new_empty(0, self.spec.vocab_size, dtype=torch.float32)
        return weights.head(self._norm(hidden, weights.norm)).float()

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """[T, heads x head_dim] before the output product."""
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        qkv = qkv.view(hidden.shape[0], heads + 2 * kv_heads, spec.head_dim)
        query, key, value = torch.split_with_sizes(qkv, (heads, kv_heads, kv_heads), 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query.copy_(self._norm(query, layer.query_norm))
            key.copy_(self._norm(key, layer.key_norm))
        turning = qkv.narrow(1, 0, heads + kv_heads)
        rolled = turning.roll(spec.head_dim // 2, -1)
        turning.mul_(cos).addcmul_(rolled, sin)
        window = spec.sliding_windows[index]
        attended = attention.forward(
            index, query, key, value, scale=self._scale, sliding_window=window
        )
        return attended.view(hidden.shape[0], -1)

    def _mlp(self, layer: LlamaLayer, hidden: torch.Tensor) -> torch.Tensor:
        both = layer.gate_up(self._norm(hidden, layer.mlp_norm))
        gate, up = both.chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _rotation(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of the batch's tokens, [T, 1, head_dim] each."""
        longest = max(batch.context_lens)
        if longest > self._rope_table.shape[0]:
            positions = min(max(longest, 2 * self._rope_table.shape[0]), self.spec.max_position)
            self._rope_table = self._make_rope_table(max(positions, longest))
        table = self._rope_table[batch.positions]
        return table[:, :1], table[:, 1:]

    def _make_rope_table(self, positions: int) -> torch.Tensor:
        embedding = self._weights.embedding
        table = rope_table(self._rope, self.spec.head_dim, positions, embedding.dtype)
        return table.to(embedding.device)
