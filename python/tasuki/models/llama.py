"""The Llama family, written out; its architectures are the entries of families.py.

q, k and v are one GEMM, gate and up another; what lies between the GEMMs
is `Ops`, made for the device; modules and their dispatch are left out. In the
last layer only the rows whose logits are wanted go through what follows
attention: there `body`, whose work depends on the number of tokens alone, ends
and `finish` begins.

Weights are frozen after loading. Runs on the engine thread; under graph capture
too, on CUDA.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.execution.collective import Collective
from tasuki.execution.forward import Body
from tasuki.models.experts import Experts, make_experts
from tasuki.models.layers import Linear, make_head, make_linear, summed
from tasuki.models.llama_tensors import ExpertsTensors, LayerTensors, LlamaTensors, MlpTensors
from tasuki.models.ops import DenseMlp, LlamaLayer, Ops
from tasuki.models.ops_torch import TorchOps
from tasuki.models.spec import ModelSpec
from tasuki.models.weights import Fp8Weight, Weight, join

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights; `embedding` is [vocab, hidden], `head` gives the rank's logits in float32."""

    embedding: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    norm: torch.Tensor
    head: Linear


def prepare(spec: ModelSpec, tensors: LlamaTensors, collective: Collective) -> LlamaWeights:
    """Make this rank's GEMMs."""
    return LlamaWeights(
        embedding=tensors.embedding,
        layers=tuple(_prepare_layer(spec, layer, collective) for layer in tensors.layers),
        norm=tensors.norm,
        head=make_head(tensors.head),
    )


def _prepare_layer(spec: ModelSpec, tensors: LayerTensors, collective: Collective) -> LlamaLayer:
    return LlamaLayer(
        attention_norm=tensors.attention_norm,
        qkv=linear_of(tensors.qkv, tensors.qkv_bias),
        head_norms=tensors.head_norms,
        output=summed(linear_of(tensors.output, tensors.output_bias), collective),
        mlp_norm=tensors.mlp_norm,
        mlp=_prepare_mlp(spec, tensors.mlp, collective),
    )


def _prepare_mlp(
    spec: ModelSpec, tensors: MlpTensors | ExpertsTensors, collective: Collective
) -> DenseMlp | Experts:
    if isinstance(tensors, MlpTensors):
        gate_up = linear_of(join([tensors.gate, tensors.up]))
        return DenseMlp(gate_up, summed(linear_of(tensors.down), collective))
    assert spec.experts is not None
    both = tensors.gate, tensors.up
    return make_experts(spec.experts, tensors.router, both, tensors.down, collective)


class LlamaModel:
    """`CausalModel` of the fast path; see models/base.py."""

    def __init__(self, spec: ModelSpec, weights: LlamaWeights) -> None:
        """Run `weights`, all of one dtype and on one device, as `spec` says.

        Args:
            spec: Of what this rank computes.
            weights: This rank's.
        """
        self.spec = spec
        self._weights = weights
        table = weights.embedding
        self._ops = make_ops(spec, table.dtype, table.device)

    @property
    def ops(self) -> Ops:
        """What computes the layers' steps."""
        return self._ops

    @property
    def layers(self) -> tuple[LlamaLayer, ...]:
        """This rank's weights of the layers."""
        return self._weights.layers

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Run one step; see `CausalModel.forward`."""
        rows = batch.logits_rows if batch.bucket is None else None
        return self.finish(self.body(batch, attention), rows)

    @torch.inference_mode()
    def body(self, batch: Batch, attention: AttentionBackend) -> Body:
        """All up to the last layer's attention; see `DivisibleModel.body`."""
        ops, layers = self._ops, self._weights.layers
        rotation = ops.rotation(batch)
        hidden = F.embedding(batch.tokens, self._weights.embedding)
        ahead = None
        for index, layer in enumerate(layers):
            qkv = ops.qkv(layer, hidden, ahead)
            attended = ops.attend(index, qkv, layer.head_norms, rotation, batch, attention)
            if index + 1 < len(layers):
                ahead = ops.rest(layer, hidden, attended, layers[index + 1].attention_norm)
        return hidden, attended

    @torch.inference_mode()
    def finish(self, body: Body, rows: torch.Tensor | None) -> torch.Tensor:
        """What follows the last layer's attention; see `DivisibleModel.finish`."""
        hidden, attended = body
        if rows is not None:
            if not rows.shape[0]:
                return hidden.new_empty(0, self.spec.vocab_size, dtype=torch.float32)
            hidden, attended = hidden[rows], attended[rows]
        ops, weights = self._ops, self._weights
        ahead = ops.rest(weights.layers[-1], hidden, attended, weights.norm)
        return weights.head(ops.normed(hidden, weights.norm, ahead))


def make_ops(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Ops:
    """Fused kernels on CUDA, PyTorch's operators elsewhere."""
    if device.type == "cuda":
        from tasuki.models.ops_cuda import CudaOps  # imports Triton, which others may lack

        return CudaOps(spec, device)
    return TorchOps(spec, dtype, device)


def linear_of(weight: Weight, bias: torch.Tensor | None = None) -> Linear:
    """The GEMM by `weight`; `bias` is [out]. Of fp8 where the device's kernels read it so."""
    if isinstance(weight, Fp8Weight) and weight.values.is_cuda:
        from tasuki.models.fp8_linear import Fp8Linear, why_not  # imports Triton

        reason = why_not(weight)
        if reason is None:
            return Fp8Linear(weight, bias)
        _say_dense(reason, weight.dtype)
    return make_linear(weight.dense(), bias)


@functools.cache
def _say_dense(reason: str, dtype: torch.dtype) -> None:
    log.warning("some fp8 weights are kept in %s: %s", str(dtype).removeprefix("torch."), reason)
