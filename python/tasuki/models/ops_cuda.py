"""The steps of a Llama layer by fused kernels.

With many rows there are four launches a layer beside the GEMMs. With few the
GEMMs are ours as well, and take the norms, the gate and the additions into them; which
implementation computes which of them at how many rows, a table may say (dispatch/).
Nothing here depends on the batch's lists, so that all of it may be captured in a
CUDA graph. Owns the rotation's table, made once for the model's whole context.
"""

from __future__ import annotations

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.write import rotate_and_write
from tasuki.models import kernels
from tasuki.models.dispatch.table import ROWS, Choice, Table, stage_key
from tasuki.models.experts import Experts
from tasuki.models.fp8_linear import (
    Fp8Linear,
    add_norm_rounded,
    gated_rounded,
    norm_rounded,
    rounded,
)
from tasuki.models.gemms import LIMIT_ROWS, FewRows
from tasuki.models.layers import Linear, PlainLinear, SummedLinear
from tasuki.models.ops import Addend, Ahead, DenseMlp, LlamaLayer, Norms, Ops, Rotation
from tasuki.models.rope import rope_table
from tasuki.models.spec import ModelSpec


class CudaOps(Ops):
    """`Ops` for CUDA; see models/ops.py.

    Attributes:
        table: Which implementation computes which GEMMs; empty: the default everywhere.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        """Prepare for a model of this shape."""
        assert spec.rope is not None
        self._spec = spec
        self._scale = spec.head_dim**-0.5
        self._few = FewRows(spec.norm_eps, device)
        self.table = Table()
        half = spec.head_dim // 2
        # [positions, 2, head_dim / 2] float32: cosines, and sines without their sign.
        table = rope_table(spec.rope, spec.head_dim, spec.max_position, torch.float32)
        self._table = table[:, :, half:].contiguous().to(device)

    def qkv(self, layer: LlamaLayer, hidden: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """See `Ops.qkv`."""
        if _is_fp8(layer):
            norm, eps = layer.attention_norm, self._spec.norm_eps
            if isinstance(ahead, Addend):
                return layer.qkv(add_norm_rounded(hidden, ahead.x, norm, eps))
            return layer.qkv(norm_rounded(hidden, norm, eps))
        return self.use_qkv(self._choice("attention", layer, hidden), layer, hidden, ahead)

    def rest(
        self, layer: LlamaLayer, hidden: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor
    ) -> Ahead:
        """See `Ops.rest`."""
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            return super().rest(layer, hidden, attended, norm)
        if _is_fp8(layer):
            output = layer.output(rounded(attended))
            x = add_norm_rounded(hidden, output, layer.mlp_norm, self._spec.norm_eps)
            return Addend(mlp.down(gated_rounded(mlp.gate_up(x))))
        choice = self._choice("mlp", layer, hidden)
        ahead = self.add(choice, layer.output, attended, hidden, layer.mlp_norm)
        inner = self.use_gate_up(choice, mlp, layer.mlp_norm, hidden, ahead)
        return self.add(self._choice("attention", layer, hidden), mlp.down, inner, hidden, norm)

    def normed(self, hidden: torch.Tensor, weight: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """See `Ops.normed`."""
        if isinstance(ahead, Addend):
            return self.add_norm(hidden, ahead.x, weight)
        return super().normed(hidden, weight, ahead)

    def _choice(self, stage: str, layer: LlamaLayer, hidden: torch.Tensor) -> Choice:
        """What computes a stage: of the table if it says so, and always what can."""
        rows = hidden.shape[0]
        if isinstance(layer.mlp, Experts):  # whose sum nothing else takes in
            return Choice("linear", "ours" if self._few.takes(layer.qkv, rows) else "linear")
        first, second = stage_of(stage, layer)
        found = None
        if self.table and rows <= ROWS[-1]:
            shapes = tuple(plain(first).weight.shape), tuple(plain(second).weight.shape)
            found = self.table.choice(stage_key(stage, *shapes, _name(hidden.dtype)), rows)
        if found is not None and self.can(found, first, second, rows):
            return found
        return self.default(first, second, rows)

    def default(self, first: Linear, second: Linear, rows: int) -> Choice:
        """What computes a stage of which nothing is known."""
        if not self._few.takes(second, rows):
            return Choice("linear", "linear")
        return Choice("ours" if self._few.takes(first, rows) else "linear", "ours")

    def can(self, choice: Choice, first: Linear, second: Linear, rows: int) -> bool:
        """Whether so many rows of a stage can be computed so."""
        for way, gemm in ((choice.add, first), (choice.use, second)):
            if way == "ours" and not self._few.takes(gemm, rows, LIMIT_ROWS):
                return False
        return choice.add != "addmm" or (isinstance(first, PlainLinear) and first.bias is None)

    def add(
        self,
        choice: Choice,
        gemm: Linear,
        x: torch.Tensor,
        hidden: torch.Tensor,
        norm: torch.Tensor,
    ) -> Ahead:
        """Add the GEMM of `x` to `hidden` in place; what is left for the norm, as `Ops.rest`."""
        if choice.add == "ours":
            assert isinstance(gemm, PlainLinear)
            return self._few.add(gemm, x, hidden, norm if choice.use == "ours" else None)
        if choice.add == "addmm":
            assert isinstance(gemm, PlainLinear)
            hidden.addmm_(x, gemm.weight.t())
            return None
        if choice.use == "ours" and x.shape[0] == 1:  # which norms its row itself
            hidden += gemm(x)
            return None
        return self.add_norm(hidden, gemm(x), norm)

    def use_gate_up(
        self,
        choice: Choice,
        mlp: DenseMlp,
        norm: torch.Tensor,
        hidden: torch.Tensor,
        ahead: Ahead,
    ) -> torch.Tensor:
        """Norm, the GEMM of gate and up, gate: [rows, inner]."""
        if choice.use != "ours":
            return self.gated(mlp.gate_up(self.normed(hidden, norm, ahead)))
        assert isinstance(mlp.gate_up, PlainLinear)
        assert not isinstance(ahead, Addend)
        if isinstance(ahead, torch.Tensor):
            return self._few.gated(mlp.gate_up, ahead, None)
        return self._few.gated(mlp.gate_up, hidden if ahead is None else ahead, norm)

    def use_qkv(
        self, choice: Choice, layer: LlamaLayer, hidden: torch.Tensor, ahead: Ahead
    ) -> torch.Tensor:
        """Norm, and the GEMM of queries, keys and values."""
        if choice.use != "ours":
            return super().qkv(layer, hidden, ahead)
        assert isinstance(layer.qkv, PlainLinear) and not isinstance(ahead, Addend)
        if isinstance(ahead, torch.Tensor):
            return self._few.plain(layer.qkv, ahead)
        x = hidden if ahead is None else ahead
        return self._few.normed(layer.qkv, x, layer.attention_norm)

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
            qkv,
            table,
            positions,
            norms,
            spec.norm_eps,
            batch.slots,
            attention.pool,
            layer,
            attention.scales.of(layer),
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


def stage_of(stage: str, layer: LlamaLayer) -> tuple[Linear, Linear]:
    """The two GEMMs of a stage; see dispatch/table.py. All layers are alike, without experts."""
    mlp = dense(layer)
    return (layer.output, mlp.gate_up) if stage == "mlp" else (mlp.down, layer.qkv)


def dense(layer: LlamaLayer) -> DenseMlp:
    """The MLP of a layer without experts."""
    assert isinstance(layer.mlp, DenseMlp)
    return layer.mlp


def gemms_of(layer: LlamaLayer) -> tuple[Linear, ...]:
    """All of a layer without experts."""
    mlp = dense(layer)
    return layer.qkv, layer.output, mlp.gate_up, mlp.down


def _is_fp8(layer: LlamaLayer) -> bool:
    """Whether all GEMMs of a layer take rows rounded to fp8."""
    if not isinstance(layer.mlp, DenseMlp):
        return False
    return all(isinstance(part_of(gemm), Fp8Linear) for gemm in gemms_of(layer))


def part_of(gemm: Linear) -> Linear:
    """This rank's part of a GEMM."""
    return gemm.part if isinstance(gemm, SummedLinear) else gemm


def plain(gemm: Linear) -> PlainLinear:
    """This rank's part of a GEMM with a dense weight."""
    part = part_of(gemm)
    assert isinstance(part, PlainLinear)
    return part


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
