"""What a model is: its shape and what its layers do. `spec_reader.py` reads it from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tasuki.attention.states import StatePart
from tasuki.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a model.

    Attributes:
        count: In a layer.
        per_token: That a token passes.
        inner_size: Columns of an expert's inner layer.
        renormalise: Whether the chosen experts' weights add up to 1.
        dense_layers: Layers that have an ordinary MLP.
    """

    count: int
    per_token: int
    inner_size: int
    renormalise: bool = True
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a layer keeps of a sequence, whatever its length.

    Attributes:
        recurrent: of a recurrence; else the last inputs of a convolution.
        index: among those of the layer that are of this kind.
        shape: for one sequence.
        float32: kept so in every model; else in the model's dtype.
    """

    recurrent: bool
    index: int
    shape: tuple[int, ...]
    float32: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only model and what its layers do.

    Attributes:
        architecture: class name in config.json.
        max_position: context, in tokens.
        num_kv_heads, head_dim: of what the cache holds.
        sliding_windows: per layer, tokens that a query sees; None: all.
        latent_rank: of latent attention (MLA): the cache holds one head, whose first
            `latent_rank` elements all heads' keys and values are made of, and whose others are
            the rotated part of all keys. None: keys and values.
        rope: rotation; None when the model itself deals with positions.
        qk_norm: queries and keys are normalised per head before the rotation.
        attention_bias: q, k and v GEMMs have a bias.
        output_bias: so has the attention's output GEMM.
        tied_head: the head's weight is the embedding table.
        norm_eps: added to the mean square under the root.
        eos_token_ids: tokens that end a generation, in the folder's order.
        experts: of its MLPs, if they have any.
        fp8_blocks: the folder's weights of GEMMs are in fp8, in blocks of 128 x 128.
        native: runs on the fast path; otherwise through transformers.
        states: of the layers that keep a state, what it is; they may attend as well.
        no_kv: layers that keep no keys and values.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    sliding_windows: tuple[int | None, ...]
    rope: RopeSpec | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    tied_head: bool = False
    norm_eps: float = 1e-6
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertsSpec | None = None
    fp8_blocks: bool = False
    native: bool = True
    latent_rank: int | None = None
    states: Mapping[int, tuple[StateTensor, ...]] = field(default_factory=dict)
    no_kv: frozenset[int] = frozenset()

    def state_parts(self, dtype: torch.dtype) -> dict[int, list[StatePart]]:
        """What each state is where the model computes in `dtype`, by layer."""
        return {
            layer: [StatePart(x.shape, torch.float32 if x.float32 else dtype) for x in state]
            for layer, state in self.states.items()
        }

    def told_states(self, dtype: torch.dtype) -> list[str]:
        """What the bytes of each state are, in words: peers must have the same."""
        return [
            f"layer {layer}: " + ", ".join(f"{part.shape} {part.dtype}" for part in parts)
            for layer, parts in self.state_parts(dtype).items()
        ]

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.no_kv)

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has an ordinary MLP, of `intermediate_size`."""
        return self.experts is None or bool(self.experts.dense_layers)

    @property
    def kv_planes(self) -> int:
        """What a slot of the cache holds of a head: keys and values, or one latent."""
        return 2 if self.latent_rank is None else 1
