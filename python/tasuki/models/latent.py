"""Latent attention (MLA) of transformers' classes on a cache of latents.

Such a layer makes keys and values of all heads from one short vector per token, the
latent, and gives all heads the same rotated part of their keys:

    key of head h    [ U_h latent | rotated ]       value of head h    V_h latent

The cache holds latent and rotated part, once for all heads. A query is brought to the
latent's side instead of every cached token to the head's (*absorption*):

    query_h . key_h  =  [ U_h^T query_h | its rotated part ] . [ latent | rotated ]

and what the attention sums up are latents, which V_h then makes values of. U and V are the
rows of `kv_b_proj`. Layers of transformers expand keys and values themselves before they call
the attention; what they made of new tokens is not used but for the rotated part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def keep_latents(module: nn.Module) -> None:
    """Let each layer's norm of the latents keep its last result, as `absorbed` reads it."""
    for child in module.modules():
        if isinstance(norm := getattr(child, "kv_a_layernorm", None), nn.Module):
            norm.register_forward_hook(_keep)


def _keep(norm: Any, arguments: Any, latents: torch.Tensor) -> None:
    norm.last_latents = latents


def absorbed(
    layer: Any, query: torch.Tensor, key: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries on the latents' side, and what the cache holds of the tokens.

    Args:
        layer: The attention of transformers.
        query: [T, heads, own + rotated].
        key: [T, heads, own + rotated].
        rank: Elements of a latent.

    Returns:
        Queries [T, heads, rank + rotated]; keys, which are the values too,
        [T, 1, rank + rotated].
    """
    own = _own(layer)
    up = _heads(layer, rank)[:, :own]
    turned = torch.einsum("tho,hor->thr", query[..., :own], up)
    latents = layer.kv_a_layernorm.last_latents.reshape(-1, 1, rank)
    slots = torch.cat((latents, key[:, :1, own:]), -1)
    return torch.cat((turned, query[..., own:]), -1), slots, slots


def unabsorbed(layer: Any, attended: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Values [T, heads, size] of the sums [T, heads, rank + rotated] that the attention gave."""
    values = _heads(layer, rank)[:, _own(layer) :]
    assert values.shape[1] == size, "kv_b_proj has keys, then values"
    return torch.einsum("thr,hvr->thv", attended[..., :rank], values)


def _own(layer: Any) -> int:
    """Elements of a head's key that are not rotated."""
    return int(layer.qk_nope_head_dim)


def _heads(layer: Any, rank: int) -> torch.Tensor:
    """[heads, own + value, rank]: the rows of `kv_b_proj`."""
    weight: torch.Tensor = layer.kv_b_proj.weight
    return weight.view(-1, _own(layer) + int(layer.v_head_dim), rank)
