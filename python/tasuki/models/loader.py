"""From a Hugging Face folder to a model that runs, and the dtype to run it in."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Protocol

import torch

from tasuki.engine.collective import ALONE, Collective
from tasuki.models.base import CausalModel
from tasuki.models.checkpoint import Checkpoint
from tasuki.models.dummy import DummyTensors
from tasuki.models.errors import ModelError
from tasuki.models.layers import gathered, make_head, make_linear, summed
from tasuki.models.llama import LlamaLayer, LlamaModel, LlamaWeights
from tasuki.models.shard import Shard, Slice, check_ranks
from tasuki.models.spec import ModelSpec, read_spec

# choose_dtype: rows of its products, and bytes of float32 weights that one pass reads.
_TRIAL_ROWS = (1, 8, 256)
_TRIAL_BYTES = 96e6
_TRIAL_REPEATS = 3
_WORTH = 1.1  # bfloat16 must be this much faster: float32 is exact

WEIGHTS = ("auto", "dummy")
_HEAD = "lm_head.weight"


class Tensors(Protocol):
    """Where a model's tensors come from."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """The tensor of this name and shape, or part of it; the model's dtype and device."""


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    weights: str = "auto",
    collective: Collective = ALONE,
) -> CausalModel:
    """Load a model: on the fast path if its family has one, else through transformers.

    Args:
        path: Hugging Face folder with safetensors.
        dtype: Of weights, activations and cache.
        device: Where the weights go.
        trust_remote_code: Whether code that comes with the folder may run.
        weights: One of WEIGHTS: "auto" reads the folder's; "dummy" makes random
            ones of the config's shape on the device, for benchmarks.
        collective: Joins the ranks that the model is divided among; each loads its part.

    Raises:
        ModelError: The folder is not complete, or its weights do not fit its config,
            or `weights` is not one of WEIGHTS.
        UnsupportedModelError: Neither path runs this model; says why. Or it cannot be
            divided among the ranks.
    """
    if weights not in WEIGHTS:
        raise ModelError(f"weights is {weights!r}, must be one of {', '.join(WEIGHTS)}")
    folder, device = Path(path), torch.device(device)
    dummy = weights == "dummy"
    spec = read_spec(folder, trust_remote_code=trust_remote_code)
    check_ranks(spec, collective.size)
    if not spec.native:
        from tasuki.models.fallback import load_fallback

        return load_fallback(
            folder, spec, dtype, device, trust_remote_code=trust_remote_code, dummy=dummy
        )
    with torch.inference_mode():
        tensors: Tensors
        if dummy:
            tensors = DummyTensors(dtype, device)
        else:
            tensors = checkpoint = Checkpoint(folder, dtype, device)
            _require(spec, checkpoint)
        shard = Shard(spec, collective.rank, collective.size)
        return LlamaModel(shard.local, _read_weights(shard, tensors, collective))


def compile_model(model: CausalModel) -> None:
    """Let torch compile a model that runs through transformers, if it can; the log says which."""
    from tasuki.models.fallback import FallbackModel
    from tasuki.models.fallback_compile import compile_layers

    assert isinstance(model, FallbackModel)
    compile_layers(model)


def choose_dtype(spec: ModelSpec, device: torch.device | str) -> tuple[torch.dtype, str]:
    """Measure whether float32 or bfloat16 is faster on this machine, for this model.

    Times products of the model's shapes at rows like those of decoding (1, 8)
    and of prefill (256), on one thread and in processor time, so that what else
    runs on the machine matters little: a fraction of a second.

    Returns:
        The dtype, and the reason in one line.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return torch.bfloat16, f"bfloat16: what {device.type} devices are made for"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        full, half = (_trial(spec, dtype) for dtype in (torch.float32, torch.bfloat16))
    finally:
        torch.set_num_threads(threads)
    gains = [a / b for a, b in zip(full, half, strict=True)]
    measured = ", ".join(
        f"{gain:.1f}x at {rows}" for gain, rows in zip(gains, _TRIAL_ROWS, strict=True)
    )
    faster = statistics.median(gains) >= _WORTH
    name = "bfloat16" if faster else "float32"
    return (
        torch.bfloat16 if faster else torch.float32,
        f"{name}: bfloat16 measured {measured} rows the speed of float32 here",
    )


def _trial(spec: ModelSpec, dtype: torch.dtype) -> list[float]:
    """Seconds of one pass over some layers' MLP products, for each of _TRIAL_ROWS."""
    inner, hidden = 2 * spec.intermediate_size, spec.hidden_size
    copies = max(1, min(spec.num_layers, int(_TRIAL_BYTES / (4 * inner * hidden))))
    with torch.inference_mode():
        products = [
            make_linear(torch.full((inner, hidden), 0.01, dtype=dtype)) for _ in range(copies)
        ]
        result = []
        for rows in _TRIAL_ROWS:
            x = torch.full((rows, hidden), 0.01, dtype=dtype)
            used = products if rows < 32 else products[: max(1, copies // 8)]
            times = []
            for _ in range(_TRIAL_REPEATS + 1):
                begin = time.thread_time()
                for product in used:
                    product(x)
                times.append(time.thread_time() - begin)
            result.append(min(times[1:]))
    return result


def _read_weights(shard: Shard, tensors: Tensors, collective: Collective) -> LlamaWeights:
    spec = shard.spec
    vocab = (spec.vocab_size, spec.hidden_size)
    embedding = tensors.tensor("model.embed_tokens.weight", vocab)
    layers = tuple(_read_layer(shard, tensors, i, collective) for i in range(spec.num_layers))
    norm = tensors.tensor("model.norm.weight", (spec.hidden_size,))
    rows, padding = shard.vocab_rows()
    table = embedding[rows.begin : rows.end] if spec.tied_head else None
    head = tensors.tensor(_HEAD, vocab, rows) if table is None else table
    if padding:
        head = torch.cat([head, head.new_zeros(padding, spec.hidden_size)])
    return LlamaWeights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=gathered(make_head(head), collective, spec.vocab_size),
    )


def _require(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    parts += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    if spec.attention_bias:
        parts += [f"self_attn.{name}_proj.bias" for name in "qkv"]
    if spec.output_bias:
        parts.append("self_attn.o_proj.bias")
    if spec.qk_norm:
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    wanted = [f"model.layers.{i}.{part}" for i in range(spec.num_layers) for part in parts]
    wanted += ["model.embed_tokens.weight", "model.norm.weight"]
    checkpoint.require(wanted if spec.tied_head else [*wanted, _HEAD], ignored=[_HEAD])


def _read_layer(shard: Shard, tensors: Tensors, index: int, collective: Collective) -> LlamaLayer:
    spec = shard.spec
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def read(name: str, *shape: int, part: Slice | None = None) -> torch.Tensor:
        return tensors.tensor(f"model.layers.{index}.{name}", shape, part)

    heads, kv_heads = shard.even(0, query), shard.kv_rows()
    rows = {"q": (query, heads), "k": (kv, kv_heads), "v": (kv, kv_heads)}
    qkv = torch.cat(
        [read(f"self_attn.{n}_proj.weight", r, hidden, part=p) for n, (r, p) in rows.items()]
    )
    bias = None
    if spec.attention_bias:
        bias = torch.cat(
            [read(f"self_attn.{n}_proj.bias", r, part=p) for n, (r, p) in rows.items()]
        )
    output_bias = None
    if spec.output_bias:
        added = read("self_attn.o_proj.bias", hidden)
        output_bias = added if collective.is_first else None  # once, in the sum of all ranks
    columns = shard.even(0, inner)
    gate_up = torch.cat(
        [read(f"mlp.{n}_proj.weight", inner, hidden, part=columns) for n in ("gate", "up")]
    )
    norms = None
    if spec.qk_norm:
        norms = (
            read("self_attn.q_norm.weight", spec.head_dim),
            read("self_attn.k_norm.weight", spec.head_dim),
        )
    output = read("self_attn.o_proj.weight", hidden, query, part=shard.even(1, query))
    down = read("mlp.down_proj.weight", hidden, inner, part=shard.even(1, inner))
    return LlamaLayer(
        attention_norm=read("input_layernorm.weight", hidden),
        qkv=make_linear(qkv, bias),
        head_norms=norms,
        output=summed(make_linear(output, output_bias), collective),
        mlp_norm=read("post_attention_layernorm.weight", hidden),
        gate_up=make_linear(gate_up),
        down=summed(make_linear(down), collective),
    )


__all__ = ["WEIGHTS", "ModelError", "choose_dtype", "compile_model", "load_model"]
