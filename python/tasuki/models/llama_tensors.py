"""The tensors of a Llama-family model as its folder holds them, this rank's part of each.

Layers are read one at a time, when somebody asks for the next: whoever repacks
them needs no room for all of them twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tasuki.models.checkpoint import Checkpoint
from tasuki.models.families import FAMILIES
from tasuki.models.ops import Norms
from tasuki.models.shard import Shard, Slice
from tasuki.models.spec import ModelSpec
from tasuki.models.weights import Source, Weight, join

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """One layer's MLP, [out, in] each."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ExpertsTensors:
    """One layer's experts, [experts, out, in] each, and their router, [experts, hidden]."""

    router: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer. GEMMs are [out, in]; norms [hidden], those of heads [head_dim].

    Attributes:
        qkv: rows of queries, keys and values, one after the other.
        output_bias: None also on ranks but the first, for ranks add up their outputs.
    """

    attention_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    head_norms: Norms | None
    output: Weight
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: MlpTensors | ExpertsTensors


@dataclass(frozen=True, slots=True)
class LlamaTensors:
    """All of a model; `head` is [vocab, hidden], padded to what all ranks have alike."""

    embedding: torch.Tensor
    layers: Iterator[LayerTensors]
    norm: torch.Tensor
    head: torch.Tensor


def require_llama(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Check that a folder has all tensors of a model, and no others.

    Raises:
        ModelError: It has not; names them.
    """
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    qkv = [f"self_attn.{name}" for name in FAMILIES[spec.architecture].names.qkv]
    parts += [f"{name}.weight" for name in (*qkv, "self_attn.o_proj")]
    if spec.attention_bias:
        parts += [f"{name}.bias" for name in qkv]
    if spec.output_bias:
        parts.append("self_attn.o_proj.bias")
    if spec.qk_norm:
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    wanted = [
        f"model.layers.{i}.{part}"
        for i in range(spec.num_layers)
        for part in (*parts, *_all_mlp_names(spec, i))
    ]
    wanted += [_EMBEDDING, "model.norm.weight"]
    checkpoint.require(wanted if spec.tied_head else [*wanted, _HEAD], ignored=[_HEAD])


def has_tied_head(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding table.

    Where a folder has both and they differ, it is not, whatever config.json says.
    Source: `tie_weights` of transformers 5.
    """
    if not spec.tied_head or _HEAD not in checkpoint.names:
        return spec.tied_head
    vocab = (spec.vocab_size, spec.hidden_size)
    return torch.equal(checkpoint.tensor(_EMBEDDING, vocab), checkpoint.tensor(_HEAD, vocab))


def read_llama(shard: Shard, source: Source) -> LlamaTensors:
    """Read this rank's part of a model."""
    spec, tensors = shard.spec, source.tensors
    vocab = (spec.vocab_size, spec.hidden_size)
    embedding = tensors.tensor(_EMBEDDING, vocab)
    rows, padding = shard.vocab_rows()
    table = embedding[rows.begin : rows.end] if spec.tied_head else None
    head = tensors.tensor(_HEAD, vocab, rows) if table is None else table
    if padding:
        head = torch.cat([head, head.new_zeros(padding, spec.hidden_size)])
    return LlamaTensors(
        embedding=embedding,
        layers=(_read_layer(shard, source, i) for i in range(spec.num_layers)),
        norm=tensors.tensor("model.norm.weight", (spec.hidden_size,)),
        head=head,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """One GEMM's rows in the tensor that has them, perhaps beside others': `of` rows in all."""

    name: str
    begin: int
    of: int

    def part(self, part: Slice) -> Slice:
        """Of the tensor, those of the GEMM's rows."""
        return Slice(0, self.begin + part.begin, self.begin + part.end)


def _rows(names: Sequence[str], sizes: Sequence[int]) -> list[_Rows]:
    """Where GEMMs of so many rows are: in a tensor each, or all in one."""
    if len(names) == len(sizes):
        return [_Rows(name, 0, size) for name, size in zip(names, sizes, strict=True)]
    [name] = names
    begins = itertools.accumulate((0, *sizes[:-1]))
    return [_Rows(name, begin, sum(sizes)) for begin in begins]


def _mlp_names(spec: ModelSpec, index: int) -> tuple[str | None, list[str]]:
    """The router's name and each expert's folder; else None and the folder of one MLP."""
    experts, mlp = spec.experts, FAMILIES[spec.architecture].names.mlp
    if experts is None or index in experts.dense_layers:
        return None, [mlp]
    return f"{mlp}.gate.weight", [f"{mlp}.experts.{i}" for i in range(experts.count)]


def _all_mlp_names(spec: ModelSpec, index: int) -> list[str]:
    router, mlps = _mlp_names(spec, index)
    names = FAMILIES[spec.architecture].names
    found = [f"{mlp}.{name}.weight" for mlp in mlps for name in (*names.gate_up, names.down)]
    return found if router is None else [router, *found]


def _read_layer(shard: Shard, source: Source, index: int) -> LayerTensors:
    spec, tensors = shard.spec, source.tensors
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def read(name: str, *shape: int, part: Slice | None = None) -> torch.Tensor:
        return tensors.tensor(f"model.layers.{index}.{name}", shape, part)

    def weight(name: str, *shape: int, part: Slice) -> Weight:
        return source.weight(f"model.layers.{index}.{name}", shape, part)

    rows = _rows(FAMILIES[spec.architecture].names.qkv, (query, kv, kv))
    mine = (shard.even(0, query), shard.kv_rows(), shard.kv_rows())
    qkv = [(f"self_attn.{r.name}", r.of, r.part(p)) for r, p in zip(rows, mine, strict=True)]
    output_bias = None
    if spec.output_bias:
        added = read("self_attn.o_proj.bias", hidden)
        output_bias = added if shard.rank == 0 else None
    return LayerTensors(
        attention_norm=read("input_layernorm.weight", hidden),
        qkv=join([weight(f"{name}.weight", of, hidden, part=part) for name, of, part in qkv]),
        qkv_bias=torch.cat([read(f"{name}.bias", of, part=part) for name, of, part in qkv])
        if spec.attention_bias
        else None,
        head_norms=(
            read("self_attn.q_norm.weight", spec.head_dim),
            read("self_attn.k_norm.weight", spec.head_dim),
        )
        if spec.qk_norm
        else None,
        output=weight("self_attn.o_proj.weight", hidden, query, part=shard.even(1, query)),
        output_bias=output_bias,
        mlp_norm=read("post_attention_layernorm.weight", hidden),
        mlp=_read_mlp(shard, source, index),
    )


def _read_mlp(shard: Shard, source: Source, index: int) -> MlpTensors | ExpertsTensors:
    spec, names = shard.spec, FAMILIES[shard.spec.architecture].names
    router, mlps = _mlp_names(spec, index)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if router is not None and spec.experts is not None:
        inner = spec.experts.inner_size

    def read(name: str, *shape: int, part: Slice) -> list[Weight]:
        folders = (f"model.layers.{index}.{mlp}" for mlp in mlps)
        return [source.weight(f"{folder}.{name}.weight", shape, part) for folder in folders]

    gate, up = (
        read(rows.name, rows.of, hidden, part=rows.part(shard.even(0, inner)))
        for rows in _rows(names.gate_up, (inner, inner))
    )
    down = read(names.down, hidden, inner, part=shard.even(1, inner))
    if router is None:
        return MlpTensors(gate[0], up[0], down[0])
    return ExpertsTensors(
        source.tensors.tensor(f"model.layers.{index}.{router}", (len(mlps), hidden)),
        *(torch.stack([each.dense() for each in weights]) for weights in (gate, up, down)),
    )
