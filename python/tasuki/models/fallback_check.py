"""The trial that a transformers model passes before it may serve on the paged cache.

A class can declare support and still depend on something that the cache does
not hold (shared KV, its own masks, a state that is found nowhere), ignore the positions it
is given, or differ in shape from layer to layer. So two short sequences are run
through a tiny pool, in chunks and with decodes mixed in, and the logits are
compared with those of the unchanged model.
"""

from __future__ import annotations

from typing import Any

import torch

from tasuki.attention.batch import Batch
from tasuki.attention.kv_scales import UNSCALED
from tasuki.attention.sdpa import SdpaAttention
from tasuki.attention.states import StepStates, state_bytes
from tasuki.engine.cache_groups import CacheGroup
from tasuki.models.base import CausalModel
from tasuki.models.errors import UnsupportedModelError, failures_of
from tasuki.models.spec import ModelSpec

_BLOCK_SIZE = 4
# Steps of the trial: tokens of the first and of the second sequence.
_STEPS = ((6, 0), (4, 6), (1, 1), (1, 0))
_LENGTHS = tuple(map(sum, zip(*_STEPS, strict=True)))
# What still is rounding: the difference of a token's logits, relative to the largest logit.
_EXACT = 1e-3  # float32: of every token
_ROUNDED = 0.08  # shorter types: of the median token; a mixture's routing may flip for a few


class _Recorder:
    """`AttentionBackend` that notes which layers write what before passing them on."""

    capturable = False
    captures_prompts = False

    def __init__(self, spec: ModelSpec, pool: torch.Tensor, states: StepStates | None) -> None:
        self.pool, self.scales, self.states = pool, UNSCALED, states
        self._inner = SdpaAttention(pool)
        self._spec = spec
        self.layers: set[int] = set()

    def plan(self, batch: Batch) -> None:
        self.layers.clear()
        self._inner.plan(batch)
        if self.states is not None:
            self.states.plan(batch)

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
        spec = self._spec
        expected = (spec.num_kv_heads, spec.head_dim)
        for name, tensor in (("keys", key), ("values", value)):
            if tuple(tensor.shape[1:]) != expected:
                raise UnsupportedModelError(
                    f"{spec.architecture} is not supported: layer {layer} has {name} of shape"
                    f" {tuple(tensor.shape[1:])}, the cache holds {expected} in every layer"
                )
        if layer in self.layers or not 0 <= layer < spec.num_layers:
            raise UnsupportedModelError(
                f"{spec.architecture} is not supported: layer {layer} of {spec.num_layers}"
                f" attends more than once, or is none"
            )
        self.layers.add(layer)
        return self._inner.forward(
            layer,
            query,
            key,
            value,
            scale=scale,
            sliding_window=sliding_window,
            written=written,
            out=out,
        )


class Trial:
    """What transformers computes, for comparison.

    Args:
        spec: Of the model.
        module: The transformers model, as it came; its attention implementation
            is changed to "eager" for the time of this call.
        implementation: What it is changed back to.
        dtype: Of the model, and of the trial's cache.
        device: Of the model.

    Raises:
        UnsupportedModelError: The model does not run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        module: Any,
        implementation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(spec.vocab_size, (n,), generator=generator) for n in _LENGTHS]
        self._sequences = [sequence.to(device) for sequence in sequences]
        with failures_of(spec.architecture):
            self._want = _plain(module, self._sequences, implementation).cpu()

    def warm_up(self, model: CausalModel, tokens: int) -> None:
        """Run `model` on so many tokens at once and then on one."""
        sequence = torch.zeros(tokens + 1, dtype=torch.int64, device=self._device)
        _paged(model, [sequence], ((tokens,), (1,)), self._dtype, self._device)

    def check(self, model: CausalModel) -> None:
        """Compare `model` on the paged cache.

        Raises:
            UnsupportedModelError: They differ, or the model does not run.
        """
        want = self._want
        with failures_of(self._spec.architecture):
            got = _paged(model, self._sequences, _STEPS, self._dtype, self._device).cpu()
        exact = self._dtype == torch.float32
        limit = _EXACT if exact else _ROUNDED
        differences = (got - want).abs().amax(-1) / want.abs().max().clamp(min=1e-6)
        difference = float(differences.max() if exact else differences.median())
        if not difference <= limit:
            raise UnsupportedModelError(
                f"{self._spec.architecture} is not supported: its logits on the paged cache differ"
                f" from those of transformers by {difference:.1e} of the largest, limit {limit:.0e}"
            )


def _paged(
    model: CausalModel,
    sequences: list[torch.Tensor],
    steps: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Logits of all tokens of the sequences, [sum of lengths, vocab]; `steps`: see _STEPS."""
    spec, count = model.spec, len(sequences)
    width = -(-max(map(len, sequences)) // _BLOCK_SIZE)
    order = torch.randperm(count * width, generator=torch.Generator().manual_seed(1))
    tables = order.view(count, width)
    planes = spec.num_layers, spec.kv_planes
    shape = (count * width, spec.num_kv_heads, *planes, _BLOCK_SIZE, spec.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    recorder = _Recorder(spec, pool, _states(spec, count * width, dtype, device))
    done = [0] * count
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in steps:
        running = [i for i in range(count) if counts[i]]
        positions = [torch.arange(done[i], done[i] + counts[i]) for i in running]
        slots = [
            tables[i][at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE
            for i, at in zip(running, positions, strict=True)
        ]
        for i in running:
            done[i] += counts[i]
        tokens = [sequences[i][done[i] - counts[i] : done[i]] for i in running]
        batch = Batch(
            tokens=torch.cat(tokens),
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots).to(device),
            block_tables=tables[running].to(device=device, dtype=torch.int32),
            query_lens=[counts[i] for i in running],
            context_lens=[done[i] for i in running],
            logits_rows=torch.arange(sum(counts), device=device),
            num_decodes=sum(counts[i] == 1 for i in running),
        )
        if recorder.states is not None:
            batch.more_groups = ((batch.slots, batch.block_tables),)
            batch.cuts = [_cuts(done[i] - counts[i], done[i]) for i in running]
        recorder.plan(batch)
        parts = torch.split(model.forward(batch, recorder), [counts[i] for i in running])
        for i, part in zip(running, parts, strict=True):
            logits[i].append(part)
        if recorder.states is not None:
            recorder.states.commit()
        if absent := sorted(set(spec.kv_layers) - recorder.layers):
            raise UnsupportedModelError(
                f"{spec.architecture} is not supported: layers {absent} keep their state elsewhere"
                f" than in a KV cache"
            )
    return torch.cat([part for parts in logits for part in parts])


def _states(
    spec: ModelSpec, pages: int, dtype: torch.dtype, device: torch.device
) -> StepStates | None:
    """Room for the states of the trial's sequences, a page for each block."""
    if not spec.states:
        return None
    parts = spec.state_parts(dtype)
    most = max(map(state_bytes, parts.values()))
    pool = torch.zeros(pages, most * len(parts), dtype=torch.uint8, device=device)
    groups = CacheGroup(spec.kv_layers), CacheGroup(tuple(parts), state_bytes=most)
    return StepStates(pool, groups, parts, _BLOCK_SIZE)


def _cuts(start: int, end: int) -> list[int]:
    """Where blocks end between two tokens, and `end`, counted from `start`."""
    ends = range(start // _BLOCK_SIZE * _BLOCK_SIZE + _BLOCK_SIZE, end, _BLOCK_SIZE)
    return [*(at - start for at in ends), end - start]


def _plain(module: Any, sequences: list[torch.Tensor], implementation: str) -> torch.Tensor:
    """The same logits by transformers alone, each sequence whole."""
    module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            parts = [
                module(input_ids=sequence[None], use_cache=False).logits[0].float()
                for sequence in sequences
            ]
    finally:
        module.set_attn_implementation(implementation)
    return torch.cat(parts)
