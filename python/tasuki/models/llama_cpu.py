"""The Llama family on the CPU in bfloat16: one native call a step (crates/cpu).

The native model packs the weights when it is made, and then computes everything
from the tokens to the logits, attention over the pool included: of an attention
backend it takes the pool. Owns the rotation's table, which grows with the longest
context seen.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki import _native
from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.errors import AttentionError
from tasuki.attention.kv_scales import UNSCALED
from tasuki.models import cpu_kernels
from tasuki.models.layers import Linear
from tasuki.models.llama_tensors import LlamaTensors, MlpTensors
from tasuki.models.rope import rope_table
from tasuki.models.spec import ModelSpec

_FIRST_POSITIONS = 2048  # rows of the rotation's table before it grows


def why_not(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model of the family cannot run by the native kernels here; None: it can."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}"
    if spec.experts is not None:
        return "the model has experts"
    return _shape(spec).why_not()


def make_native_linear(weight: torch.Tensor) -> Linear:
    """Multiplication with `weight` [out, in], bfloat16, by the kernels; gives float32."""
    outputs, inputs = weight.shape
    native = _native.CpuLinear(cpu_kernels.choose(), False, _bits(weight), inputs)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], outputs)
        native.run(_bits(x), out.numpy())
        return out

    return run


class PoolOnly:
    """`AttentionBackend` that plans nothing and attends for nobody; see attention/base.py."""

    capturable = False
    captures_prompts = False

    def __init__(self, pool: torch.Tensor) -> None:
        """Carry `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim]."""
        self.pool, self.scales = pool, UNSCALED

    def plan(self, batch: Batch) -> None:
        """Nothing: the model's kernels read the batch themselves."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        written: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Refuse.

        Raises:
            AttentionError: Always: whoever calls this has been given the wrong backend.
        """
        raise AttentionError(
            f"layer {layer} asks for attention, but its model attends by kernels of its own"
        )


class CpuLlamaModel:
    """`CausalModel` by the native kernels; see models/base.py."""

    def __init__(self, spec: ModelSpec, tensors: LlamaTensors, *, int8: bool = False) -> None:
        """Pack `tensors`, bfloat16 on the CPU; they are not needed after that.

        Args:
            spec: Of the model.
            tensors: Its weights.
            int8: Round weights to 8 bits, with a scale for each 64 inputs of an output.

        Raises:
            ModelError: This processor cannot run the kernels that were asked for.
        """
        assert spec.rope is not None
        self.kernels = cpu_kernels.choose(int8=int8)
        self.spec = spec
        self._rope = spec.rope
        self._native = _native.CpuModel(
            self.kernels,
            int8,
            _shape(spec),
            _bits(tensors.embedding),
            _bits(tensors.norm),
            _bits(tensors.head),
        )
        for layer in tensors.layers:
            norms, mlp = layer.head_norms, layer.mlp
            assert isinstance(mlp, MlpTensors)
            self._native.push_layer(
                attention_norm=_bits(layer.attention_norm),
                qkv=_bits(layer.qkv.dense()),
                qkv_bias=None if layer.qkv_bias is None else _bits(layer.qkv_bias),
                head_norms=None if norms is None else (_bits(norms[0]), _bits(norms[1])),
                output=_bits(layer.output.dense()),
                output_bias=None if layer.output_bias is None else _bits(layer.output_bias),
                mlp_norm=_bits(layer.mlp_norm),
                gate=_bits(mlp.gate.dense()),
                up=_bits(mlp.up.dense()),
                down=_bits(mlp.down.dense()),
            )
        self._rotations = self._make_rotations(min(_FIRST_POSITIONS, spec.max_position))
        self._pool: tuple[torch.Tensor, NDArray[np.int16]] | None = None

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run one step; see `CausalModel.forward`. Of `attention` it takes the pool."""
        self._reach(max(batch.context_lens))
        pool = attention.pool
        if self._pool is None or self._pool[0] is not pool:
            self._pool = (pool, _bits(pool))
        logits = np.empty((batch.logits_rows.shape[0], self.spec.vocab_size), dtype=np.float32)
        self._native.forward(
            pool=self._pool[1],
            block_size=pool.shape[4],
            tokens=batch.tokens.numpy(),
            positions=batch.positions.numpy(),
            slots=batch.slots.numpy(),
            tables=batch.block_tables.numpy(),
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            logits_rows=batch.logits_rows.numpy(),
            rotations=self._rotations,
            threads=torch.get_num_threads(),
            logits=logits,
        )
        return torch.from_numpy(logits)

    def _reach(self, longest: int) -> None:
        """Let the rotation's table have so many positions."""
        known = self._rotations.shape[0]
        if longest > known:
            positions = min(max(longest, 2 * known), self.spec.max_position)
            self._rotations = self._make_rotations(max(positions, longest))

    def _make_rotations(self, positions: int) -> NDArray[np.float32]:
        """[positions, 2, head_dim / 2]: cosines, and sines without their sign."""
        table = rope_table(self._rope, self.spec.head_dim, positions, torch.float32)
        rotations: NDArray[np.float32] = table[:, :, self.spec.head_dim // 2 :].contiguous().numpy()
        return rotations


def _shape(spec: ModelSpec) -> _native.CpuShape:
    return _native.CpuShape(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        norm_eps=spec.norm_eps,
        windows=list(spec.sliding_windows),
    )


def _bits(tensor: torch.Tensor) -> NDArray[np.int16]:
    """bfloat16 numbers as numpy knows them, in the same memory."""
    bits: NDArray[np.int16] = tensor.contiguous().view(torch.int16).numpy()
    return bits
