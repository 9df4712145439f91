"""Attention on CUDA: chunks of prompts by FlashInfer's kernels, decodes by our own.

A step's parts are one call a layer each:

    decodes     decode.py; in a CUDA graph too, when the batch has a bucket
    chunks      paged, on the strided view of one layer; or "ragged" when all of
                them begin their sequences, for then the step's own keys and values
                are all there is

A step with `limits` is all but planned in a CUDA graph: its chunks are paged, at
fixed places and with work for one fixed grid. FlashInfer's FA3 kernels (Hopper, a cache
in the model's dtype) run one program on each multiprocessor, which finds its work on the
device. Its FA2 kernels (any GPU and cache) run as many programs as there may be tiles;
those beyond a plan's tiles find what lies in the integer workspace behind them: zeros,
which name an empty sequence (parts.py). Neither splits a sequence there; how many tokens
and sequences there may be fixes where the work lies.

FlashInfer plans on the host: lengths in, a division of the work out, which goes
to an integer workspace on the device with one copy. What is shared how:

    one float workspace           calls of a stream follow one another
    per kind, on the device       one integer workspace: copies to it wait on the
                                  stream for whoever reads it
    the same, pinned host memory  two, in turn: a step in flight may still have
                                  its copy before it

A *kind* is a scale and a sliding window: layers of a kind share a plan. Kinds
become known at their first forward.

`flashinfer_kernels.py` chooses and compiles the kernels. FlashInfer allocates 8 MB for
integers anew for every wrapper; ours are put in their place through two attributes that it does not
document. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import flashinfer
import torch

from tasuki.attention.batch import Batch, StepLimits
from tasuki.attention.decode import DecodeAttention, DecodePlan
from tasuki.attention.errors import AttentionError
from tasuki.attention.flashinfer_kernels import FlashInferOptions, Kernels, why_not
from tasuki.attention.kv_scales import UNSCALED, KvScales
from tasuki.attention.parts import Chunks, Divider, fixed_sequences
from tasuki.attention.quick_call import QuickCall, QuickPlan
from tasuki.attention.write import write
from tasuki.device_limits import limits_of

_LEAST_TILE = 16  # query rows of a program of FA2
_INTEGER_BYTES = 8 << 20  # what FlashInfer takes itself
_INTEGER_BUFFERS = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")


class _Integers:
    """Integer workspace of one kind: on the device, and twice in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        # Made on a layer's first call, in inference mode, and written by plans outside of it.
        with torch.inference_mode(False):
            self._device = torch.empty(_INTEGER_BYTES, dtype=torch.uint8, device=device)
            self._pinned = tuple(
                torch.empty(_INTEGER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
                for _ in range(2)
            )

    def lend(self, wrapper: Any, turn: int, clear_bytes: int = 0) -> torch.Tensor:
        """Let the wrapper's next plan use it, so many bytes of it zero before: the pinned part."""
        pinned = self._pinned[turn]
        pinned[:clear_bytes].zero_()
        for name, buffer in zip(_INTEGER_BUFFERS, (self._device, pinned), strict=True):
            setattr(wrapper, name, buffer)
        return pinned


@dataclass(slots=True)
class _Kind:
    """Layers of one scale and window: their wrappers, and the calls of this step."""

    scale: float
    window: int | None
    integers: _Integers
    # By whether keys and values are paged, and what graphs they are for.
    wrappers: dict[tuple[bool, StepLimits | None], Any] = field(default_factory=dict)
    plans: dict[StepLimits, QuickPlan] = field(default_factory=dict)  # of the wrappers for graphs
    call: QuickCall | None = None
    decodes: DecodePlan | None = None

    @property
    def window_left(self) -> int:
        """Tokens before its own that a query sees; -1: all."""
        return -1 if self.window is None else self.window - 1


class FlashInferAttention:
    """`AttentionBackend` over one pool on one CUDA device; see attention/base.py."""

    capturable = True

    def __init__(
        self,
        pool: torch.Tensor,
        heads: int,
        dtype: torch.dtype,
        options: FlashInferOptions | None = None,
        windows: Iterable[int | None] = (None,),
        scales: KvScales = UNSCALED,
    ) -> None:
        """Attend over `pool`, [num_blocks, kv_heads, layers, 2, block_size, head_dim].

        Args:
            pool: of `dtype`, or float8_e4m3fn.
            heads: query heads.
            dtype: of queries, keys and values as the model gives them: bfloat16
                or float16.
            options: None: the defaults.
            windows: sliding windows of the model's layers, None for a layer
                without: kernels that were never compiled on this machine are
                compiled here, all at once.
            scales: of an fp8 pool.

        Raises:
            AttentionError: FlashInfer has no kernels for this.
        """
        _, kv_heads, layers, _, self._block_size, self._head_dim = pool.shape
        if reason := why_not(heads, kv_heads, self._head_dim, dtype, pool.dtype):
            raise AttentionError(reason)
        self.pool, self.scales = pool, scales
        self._heads, self._kv_heads, self._dtype = heads, kv_heads, dtype
        options = FlashInferOptions() if options is None else options
        self._options = options
        self.captures_prompts = pool.is_cuda
        self._kernels = Kernels(pool, dtype, options)
        if pool.is_cuda:
            self._kernels.compile({window is not None for window in windows})
        self._graphs_of_fa2 = self._kernels.backend(pool.dtype) == "fa2"
        self._layers = [(pool[:, :, i, 0], pool[:, :, i, 1]) for i in range(layers)]
        self._workspace = torch.zeros(
            options.workspace_bytes, dtype=torch.uint8, device=pool.device
        )
        for paged in (True, False):  # says now what is missing, not in a step
            self._new_wrapper(paged, pool.dtype)
        self._divider = Divider(
            self._block_size, pool.device, joint=options.joint, exact=self._graphs_of_fa2
        )
        self._decode = DecodeAttention(pool, heads, scales=scales)
        self._batch: Batch | None = None
        self._chunks: Chunks | None = None
        self._kinds: dict[tuple[float, int | None], _Kind] = {}
        self._slots = torch.empty(0, dtype=torch.int64, device=pool.device)

    def plan(self, batch: Batch) -> None:
        """Divide the step into parts and plan them for every known kind; see base.py."""
        self._slots, self._batch = batch.slots, batch
        self._chunks = self._divider.chunks(batch)
        for kind in self._kinds.values():
            self._plan_kind(kind)

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
        """Write key and value to their slots, then attend causally; see base.py."""
        if not written:
            key, value = self.scales.seen(layer, key, value, self.pool.dtype)
            write(key, value, self._slots, self.pool, layer, self.scales.of(layer))
        kind = self._kinds.get((scale, sliding_window))
        if kind is None:
            kind = self._new_kind(scale, sliding_window)
        result = out
        if result is None:
            result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        fixed = self._batch is not None and self._batch.limits is not None
        if fixed and self._graphs_of_fa2:  # its kernels write to the decodes' rows too
            self._run_chunks(kind, layer, query, key, value, result)
            self._run_decodes(kind, layer, query, result)
        else:
            self._run_decodes(kind, layer, query, result)
            self._run_chunks(kind, layer, query, key, value, result)
        return result

    def _run_decodes(
        self, kind: _Kind, layer: int, query: torch.Tensor, result: torch.Tensor
    ) -> None:
        if kind.decodes is not None:
            self._decode.forward(kind.decodes, layer, query, kind.scale, result)

    def _run_chunks(
        self,
        kind: _Kind,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        if self._chunks is None or kind.call is None:
            return
        rows, call = self._chunks.rows, kind.call
        if not call.paged:
            call.run(query[rows], key[rows], value[rows], result[rows])
            return
        key_scale, value_scale = self.scales.of(layer)
        asked = query[rows] if key_scale == 1.0 else query[rows] * key_scale
        call.run(asked, *self._layers[layer], result[rows])
        if value_scale != 1.0:
            result[rows] *= value_scale

    def _new_kind(self, scale: float, window: int | None) -> _Kind:
        """Learn of a kind of layer, and plan the current step for it."""
        if self.pool.is_cuda and torch.cuda.is_current_stream_capturing():
            raise AttentionError(
                f"scale {scale} with sliding window {window} comes first under graph capture:"
                f" run the model once before capturing"
            )
        kind = _Kind(scale, window, _Integers(self.pool.device))
        self._kinds[scale, window] = kind
        self._plan_kind(kind)
        return kind

    def _plan_kind(self, kind: _Kind) -> None:
        kind.decodes = kind.call = None
        batch, chunks = self._batch, self._chunks
        if batch is None:
            return
        if chunks is None or chunks.rows.start or batch.limits is not None:
            kind.decodes = self._decode.plan(batch, kind.window)
        if chunks is not None:
            self._plan_chunks(kind, chunks, batch.limits)

    def _plan_chunks(self, kind: _Kind, chunks: Chunks, limits: StepLimits | None) -> None:
        paged = not (chunks.whole and self._options.ragged)
        wrapper = self._wrapper(kind, paged, limits)
        of_fa2 = limits is not None and self._graphs_of_fa2
        clear_bytes = self._plan_bytes(limits) if of_fa2 and limits else 0
        pinned = kind.integers.lend(wrapper, self._divider.turn, clear_bytes)
        shape: dict[str, Any] = {
            "causal": True,
            "sm_scale": kind.scale,
            "window_left": kind.window_left,
            "q_data_type": self._dtype,
        }
        if of_fa2:
            shape["disable_split_kv"] = True

        def in_full() -> None:
            wrapper.plan(
                chunks.queries,
                chunks.blocks,
                chunks.indices,
                chunks.last,
                self._heads,
                self._kv_heads,
                self._head_dim,
                self._block_size,
                kv_data_type=self.pool.dtype,
                seq_lens=chunks.lengths,
                max_token_per_sequence=chunks.longest,
                **shape,
            )

        if limits is not None:
            kind.plans[limits].plan(chunks, pinned, in_full)
        elif paged:
            in_full()
        else:
            wrapper.plan(
                chunks.queries,
                chunks.queries,
                self._heads,
                self._kv_heads,
                self._head_dim,
                kv_data_type=self._dtype,
                **shape,
            )
        kind.call = QuickCall(wrapper, paged=paged)

    def _wrapper(self, kind: _Kind, paged: bool, limits: StepLimits | None) -> Any:
        wrapper = kind.wrappers.get((paged, limits))
        if wrapper is None:
            kv_dtype = self.pool.dtype if paged else self._dtype
            if limits is None:
                wrapper = self._new_wrapper(paged, kv_dtype)
            else:
                arrays, buffers = self._buffers(limits)
                wrapper = self._new_wrapper(paged, kv_dtype, use_cuda_graph=True, **buffers)
                kind.plans[limits] = QuickPlan(wrapper, arrays)
            kind.wrappers[paged, limits] = wrapper
        return wrapper

    def _new_wrapper(self, paged: bool, kv_dtype: torch.dtype, **fixed: Any) -> Any:
        make, layout = flashinfer.BatchPrefillWithRaggedKVCacheWrapper, "NHD"
        if paged:
            make, layout = flashinfer.BatchPrefillWithPagedKVCacheWrapper, "HND"
        return _checked(
            make(self._workspace, layout, backend=self._kernels.backend(kv_dtype), **fixed)
        )

    def _plan_bytes(self, limits: StepLimits) -> int:
        """At most what a plan of FA2 for graphs writes about tiles: three integers each."""
        sequences = fixed_sequences(limits, exact=True)
        tiles = limits.tokens * (self._heads // self._kv_heads) // _LEAST_TILE + sequences
        tiles += 2 * limits_of(self.pool.device).cores
        return min(12 * tiles + (16 << 10), _INTEGER_BYTES)

    def _buffers(self, limits: StepLimits) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """For `Chunks.arrays`, and what makes a wrapper leave everything at its place.

        How many tokens there may be it takes from its first plan: the largest step's.
        """

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.pool.device)

        sequences = fixed_sequences(limits, exact=self._graphs_of_fa2)
        arrays = zeros(4 * sequences + 2)
        sizes = [sequences + 1, sequences + 1, sequences, sequences]
        begins, queries, last, _ = torch.split(arrays, sizes)
        blocks = max(limits.chunks * limits.width, -(-limits.tokens // self._block_size))
        return arrays, {
            "qo_indptr_buf": queries,
            "paged_kv_indptr_buf": begins,
            "paged_kv_indices_buf": zeros(blocks),
            "paged_kv_last_page_len_buf": last,
        }


def _checked(wrapper: Any) -> Any:
    """The wrapper, if it has the buffers that we replace."""
    missing = [name for name in _INTEGER_BUFFERS if not hasattr(wrapper, name)]
    if missing:
        raise AttentionError(
            f"{type(wrapper).__name__} of FlashInfer {flashinfer.__version__} has no"
            f" {', '.join(missing)}: install flashinfer-python 0.6.14"
        )
    return wrapper
