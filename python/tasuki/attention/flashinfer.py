"""Attention on CUDA by FlashInfer's kernels, on the strided view of one layer.

A step's parts (parts.py) are one call a layer each:

    decodes     paged; in a CUDA graph when the batch has a bucket. Or by our own
                kernels (decode.py), if the options say so
    chunks      paged, or "ragged" when all of them begin their sequences, for
                then the step's own keys and values are all there is

FlashInfer plans on the host: lengths in, a division of the work out, which goes
to an integer workspace on the device with one copy. What is shared how:

    one float workspace                 calls of a stream follow one another
    per kind and part, on the device    one integer workspace: copies to it wait
                                        on the stream for whoever reads it
    the same, pinned host memory        two, in turn: a step in flight may still
                                        have its copy before it

A *kind* is a scale and a sliding window: layers of a kind share a plan. Kinds
become known at their first forward.

The only importer of FlashInfer. It allocates 8 MB for integers anew for every
wrapper, of which there is one for each bucket; ours are put in their place
through two attributes that it does not document. Runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import flashinfer
import torch
from flashinfer.decode import fast_decode_plan

from tasuki.attention.decode import DecodeAttention, DecodePlan
from tasuki.attention.errors import AttentionError
from tasuki.attention.parts import Divider, Part
from tasuki.attention.quick_call import QuickCall
from tasuki.attention.write import write
from tasuki.engine.batch import Batch

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # query heads per KV head that decode has plain kernels for
_INTEGER_BYTES = 8 << 20  # what FlashInfer takes itself
_INTEGER_BUFFERS = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """Which of FlashInfer's ways to take; benchmarks/gpu/steps.py measures them.

    Attributes:
        own_decode: decode with our own kernels.
        tensor_core_decode: decode with the prefill kernel, whose rows are the
            query heads of one KV head; None: when 4 or more share one.
        prefill: "fa3" (Hopper), "fa2", or "auto" for the best that the device
            and the dtypes allow.
        ragged: chunks that begin their sequences read keys and values from the
            step, not from the pool.
        joint: decodes of a mixed step go with the chunks in one call.
        workspace_bytes: for partial results of split sequences.
    """

    own_decode: bool = False
    tensor_core_decode: bool | None = None
    prefill: str = "auto"
    ragged: bool = True
    joint: bool = False
    workspace_bytes: int = 256 << 20


class _Integers:
    """Integer workspace of one part: on the device, and twice in pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(_INTEGER_BYTES, dtype=torch.uint8, device=device)
        self._pinned = tuple(
            torch.empty(_INTEGER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(2)
        )

    def lend(self, wrapper: Any, turn: int) -> None:
        """Let the wrapper's next plan use it."""
        for name, buffer in zip(_INTEGER_BUFFERS, (self._device, self._pinned[turn]), strict=True):
            setattr(wrapper, name, buffer)


@dataclass(slots=True)
class _Kind:
    """Layers of one scale and window: their wrappers, and the calls of this step."""

    scale: float
    window: int | None
    decode_integers: _Integers
    chunk_integers: _Integers
    wrappers: dict[object, Any] = field(default_factory=dict)
    calls: list[tuple[Part, QuickCall]] = field(default_factory=list)
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

        Raises:
            AttentionError: FlashInfer has no kernels for this.
        """
        _, kv_heads, layers, _, self._block_size, self._head_dim = pool.shape
        if reason := why_not(heads, kv_heads, self._head_dim, dtype, pool.dtype):
            raise AttentionError(reason)
        self.pool = pool
        self._heads, self._kv_heads, self._dtype = heads, kv_heads, dtype
        options = FlashInferOptions() if options is None else options
        share = heads // kv_heads
        tensor_cores = options.tensor_core_decode
        if tensor_cores is None:
            tensor_cores = share >= 4
        self._tensor_cores = tensor_cores or share not in _CUDA_CORE_GROUPS
        self._options = options
        if pool.is_cuda:
            self._compile({window is not None for window in windows})
        self._layers = [(pool[:, :, i, 0], pool[:, :, i, 1]) for i in range(layers)]
        self._workspace = torch.zeros(
            options.workspace_bytes, dtype=torch.uint8, device=pool.device
        )
        self._own = DecodeAttention(pool, heads) if options.own_decode else None
        self._divider = Divider(
            self._block_size, pool.device, joint=options.joint, decodes=self._own is None
        )
        self._batch: Batch | None = None
        self._kinds: dict[tuple[float, int | None], _Kind] = {}
        self._parts: list[Part] = []
        self._slots = torch.empty(0, dtype=torch.int64, device=pool.device)

    def plan(self, batch: Batch) -> None:
        """Divide the step into parts and plan them for every known kind; see base.py."""
        self._slots, self._batch = batch.slots, batch
        self._parts = self._divider.divide(batch)
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
            write(key, value, self._slots, self.pool, layer)
        kind = self._kinds.get((scale, sliding_window))
        if kind is None:
            kind = self._new_kind(scale, sliding_window)
        result = out
        if result is None:
            result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._own is not None and kind.decodes is not None:
            self._own.forward(kind.decodes, layer, query, scale, result)
        for part, call in kind.calls:
            rows = part.rows
            if call.paged:
                call.run(query[rows], *self._layers[layer], result[rows])
            else:
                call.run(query[rows], key[rows], value[rows], result[rows])
        return result

    def _compile(self, windowed: set[bool]) -> None:
        """Compile what is missing for layers with a window, without one, or both.

        One after another, as FlashInfer does when a kernel is first needed, takes a
        minute or more each.
        """
        pool, dtype = self.pool, self._dtype
        backend = self._options.prefill
        specs = {}
        for window in windowed:
            # Positions are not FlashInfer's business (0); no cap on logits, no 16-bit sums.
            shape = (torch.int32, self._head_dim, self._head_dim, 0, window, False)
            wanted = []
            if self._options.own_decode:
                pass
            elif self._tensor_cores:
                wanted.append(("fa2", pool.dtype))
            else:
                spec = flashinfer.jit.gen_batch_decode_module(dtype, pool.dtype, dtype, *shape)
                specs[spec.name] = spec
            for kv_dtype in (pool.dtype, *((dtype,) if self._options.ragged else ())):
                chosen = backend
                if chosen == "auto":
                    chosen = flashinfer.utils.determine_attention_backend(
                        pool.device, 0, False, False, dtype, kv_dtype
                    )
                wanted.append((chosen, kv_dtype))
            for chosen, kv_dtype in wanted:
                spec = flashinfer.jit.gen_batch_prefill_module(
                    chosen, dtype, kv_dtype, dtype, *shape, False
                )
                specs[spec.name] = spec
        missing = [spec for spec in specs.values() if not (spec.is_compiled or spec.is_aot)]
        if missing:
            log.info(
                "FlashInfer: compiling %d of %d kernels; they are kept in its cache",
                len(missing),
                len(specs),
            )
            flashinfer.jit.build_jit_specs(missing)

    def _new_kind(self, scale: float, window: int | None) -> _Kind:
        """Learn of a kind of layer, and plan the current step for it."""
        if self.pool.is_cuda and torch.cuda.is_current_stream_capturing():
            raise AttentionError(
                f"scale {scale} with sliding window {window} comes first under graph capture:"
                f" run the model once before capturing"
            )
        device = self.pool.device
        kind = _Kind(scale, window, _Integers(device), _Integers(device))
        self._kinds[scale, window] = kind
        self._plan_kind(kind)
        return kind

    def _plan_kind(self, kind: _Kind) -> None:
        kind.calls, kind.decodes = [], None
        if self._own is not None and self._batch is not None and self._divider.apart(self._batch):
            kind.decodes = self._own.plan(self._batch, kind.window)
        for part in self._parts:
            if part.bucket is not None:
                wrapper = self._plan_bucket(kind, part)
            elif not part.chunks:
                wrapper = self._plan_decodes(kind, part)
            elif part.whole and self._options.ragged:
                wrapper = self._plan_ragged(kind, part)
            else:
                wrapper = self._plan_chunks(kind, part)
            ragged = part.whole and self._options.ragged
            kind.calls.append((part, QuickCall(wrapper, paged=not ragged)))

    def _plan_bucket(self, kind: _Kind, part: Part) -> Any:
        """Decodes of a graph. After the first time without what the buffers hold already."""
        assert part.bucket is not None
        wrapper = kind.wrappers.get(part.bucket)
        if wrapper is None:
            buffers = self._divider.buckets[part.bucket]
            wrapper = kind.wrappers[part.bucket] = self._decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=buffers.blocks,
                paged_kv_indices_buffer=buffers.indices,
                paged_kv_last_page_len_buffer=buffers.last,
            )
            kind.decode_integers.lend(wrapper, self._divider.turn)
            # An empty slice: the indices are in their place already.
            self._plan_paged_decode(wrapper, kind, part, part.indices[:0])
            return wrapper
        kind.decode_integers.lend(wrapper, self._divider.turn)
        fast_decode_plan(
            wrapper,
            part.blocks,
            part.indices[:0],
            part.last,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._block_size,
            window_left=kind.window_left,
            q_data_type=self._dtype,
            kv_data_type=self.pool.dtype,
            sm_scale=kind.scale,
            global_override_indptr_cpu=part.blocks,
        )
        return wrapper

    def _plan_decodes(self, kind: _Kind, part: Part) -> Any:
        wrapper = kind.wrappers.get("decodes")
        if wrapper is None:
            wrapper = kind.wrappers["decodes"] = self._decode_wrapper()
        kind.decode_integers.lend(wrapper, self._divider.turn)
        self._plan_paged_decode(wrapper, kind, part, part.indices)
        return wrapper

    def _decode_wrapper(self, **buffers: Any) -> Any:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores, **buffers
        )
        return _checked(wrapper)

    def _plan_paged_decode(
        self, wrapper: Any, kind: _Kind, part: Part, indices: torch.Tensor
    ) -> None:
        wrapper.plan(
            part.blocks,
            indices,
            part.last,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._block_size,
            window_left=kind.window_left,
            q_data_type=self._dtype,
            kv_data_type=self.pool.dtype,
            sm_scale=kind.scale,
            seq_lens=part.lengths,
        )

    def _plan_chunks(self, kind: _Kind, part: Part) -> Any:
        wrapper = kind.wrappers.get("chunks")
        if wrapper is None:
            wrapper = kind.wrappers["chunks"] = _checked(
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, "HND", backend=self._options.prefill
                )
            )
        kind.chunk_integers.lend(wrapper, self._divider.turn)
        wrapper.plan(
            part.queries,
            part.blocks,
            part.indices,
            part.last,
            self._heads,
            self._kv_heads,
            self._head_dim,
            self._block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=kind.window_left,
            q_data_type=self._dtype,
            kv_data_type=self.pool.dtype,
            seq_lens=part.lengths,
            max_token_per_sequence=part.longest,
        )
        return wrapper

    def _plan_ragged(self, kind: _Kind, part: Part) -> Any:
        wrapper = kind.wrappers.get("ragged")
        if wrapper is None:
            wrapper = kind.wrappers["ragged"] = _checked(
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                    self._workspace, "NHD", backend=self._options.prefill
                )
            )
        kind.chunk_integers.lend(wrapper, self._divider.turn)
        wrapper.plan(
            part.queries,
            part.queries,
            self._heads,
            self._kv_heads,
            self._head_dim,
            causal=True,
            window_left=kind.window_left,
            sm_scale=kind.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return wrapper


def why_not(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> str | None:
    """Why FlashInfer cannot attend for a model of this shape; None: it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer computes in bfloat16 or float16, the model is in {dtype}"
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        return f"the KV cache is {kv_dtype}, must be {dtype} or float8_e4m3fn for FlashInfer"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, FlashInfer has kernels for {HEAD_DIMS}"
    if heads % kv_heads:
        return f"{heads} query heads over {kv_heads} KV heads: must divide"
    return None


def _checked(wrapper: Any) -> Any:
    """The wrapper, if it has the buffers that we replace."""
    missing = [name for name in _INTEGER_BUFFERS if not hasattr(wrapper, name)]
    if missing:
        raise AttentionError(
            f"{type(wrapper).__name__} of FlashInfer {flashinfer.__version__} has no"
            f" {', '.join(missing)}: install flashinfer-python 0.6.14"
        )
    return wrapper
