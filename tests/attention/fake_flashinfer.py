"""FlashInfer's wrappers, as far as we call them, computed on the CPU as the definition says.

They take their work from the same arrays as the real ones, and at the same time:
the division of the work from the host at `plan`, block ids from the device at
`run`. Signatures are those of FlashInfer 0.6.14, and where the paged wrapper has its
compiled functions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__version__ = "0.6.14"


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        self.kv_layout = kv_layout
        self._int_workspace_buffer = torch.empty(8)
        self._pin_memory_int_workspace_buffer = torch.empty(8)
        self.plans = 0
        self.pinned: list[int] = []

    def _planned(self, heads: int, kv_heads: int, sm_scale: float, window_left: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.scale, self.window_left = sm_scale, window_left
        self.plans += 1

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries are the last of the keys; [n, heads, dim], [length, kv_heads, dim]."""
        k, v = (x.double().repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.scale
        at = torch.arange(len(k))
        own = at[len(k) - len(q) :, None]
        hidden = at > own
        if self.window_left >= 0:
            hidden |= at < own - self.window_left
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def _gather(
        self, cache: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.kv_layout == "HND"
        size = cache[0].shape[2]
        length = (len(blocks) - 1) * size + last
        keys, values = (
            side[blocks.long()].transpose(1, 2).reshape(-1, self.kv_heads, side.shape[-1])[:length]
            for side in cache
        )
        return keys, values


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """With `use_cuda_graph` as FA3 or, if that is the backend, as FA2: see `replay`."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._use_cuda_graph, self._backend = use_cuda_graph, backend
        self._most_rows: int | None = None
        self._jit_module: Any = None
        self._cached_module: Any = None
        if use_cuda_graph:
            assert qo_indptr_buf is not None and paged_kv_indices_buf is not None
            assert paged_kv_indptr_buf is not None and paged_kv_last_page_len_buf is not None
            self._sequences = len(qo_indptr_buf) - 1
            assert len(paged_kv_indptr_buf) == self._sequences + 1
            assert len(paged_kv_last_page_len_buf) == self._sequences
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
            self._paged_kv_indices_buf = paged_kv_indices_buf
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        of_fa2 = self._use_cuda_graph and self._backend == "fa2"
        assert disable_split_kv == of_fa2  # else FA2 takes its partial sums' memory in graphs
        assert causal and sm_scale is not None and seq_lens is not None
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        self._rows = int(qo_indptr[-1])
        if self._use_cuda_graph:
            self._most_rows = self._most_rows or self._rows
            assert self._rows <= self._most_rows
            assert len(seq_lens) == self._sequences
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self.indices, self.last = paged_kv_indices, paged_kv_last_page_len.clone()
            filled = (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) * page_size + self.last
            assert torch.equal(seq_lens, filled)
        self._planned(num_qo_heads, num_kv_heads, sm_scale, window_left)
        self._cached_module = self._jit_module or SimpleNamespace(plan=self._divide)
        pinned = self._pin_memory_int_workspace_buffer
        self._cached_module.plan(
            pinned, qo_indptr.to("cpu"), paged_kv_indptr.to("cpu"), seq_lens.cpu().flatten()
        )

    def _divide(
        self,
        pinned: torch.Tensor,
        queries: torch.Tensor,
        indptr: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """The compiled part of a plan: what it takes is in integers on the device afterwards."""
        self.pinned.append(pinned.data_ptr())
        self.integers = pinned[:1024].clone()
        self.queries, self.indptr, self.lengths = queries.clone(), indptr.clone(), lengths.clone()

    def run(
        self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert out is not None and q.shape[0] == self._rows
        if self._use_cuda_graph:
            self.replay(q, paged_kv_cache, out)
            return out
        for i, last in enumerate(self.last.tolist()):
            blocks = self.indices[self.indptr[i] : self.indptr[i + 1]]
            rows = slice(self.queries[i], self.queries[i + 1])
            out[rows] = self._attend(q[rows], *self._gather(paged_kv_cache, blocks, last))
        return out

    def replay(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        """What a recorded kernel does: it takes its work from the device alone."""
        if self._backend == "fa2":
            self._replay_fa2(q, cache, out)
        else:
            self._replay_fa3(q, cache, out)

    def _replay_fa2(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        """Lengths are those of the blocks; results lie end to end from the first row on.

        Sequences without keys leave anything. Programs without work take what lies in the
        integers behind the last tile's, which must name an empty sequence.
        """
        size = cache[0].shape[2]
        assert self.integers.eq(0).all()
        begins, indptr = self._qo_indptr_buf, self._paged_kv_indptr_buf
        assert torch.equal(begins, self.queries) and torch.equal(indptr, self.indptr)
        assert begins[0] == begins[1] == 0 and indptr[1] == 0
        begin = 0
        for i, last in enumerate(self._paged_kv_last_page_len_buf.tolist()):
            queries = int(begins[i + 1] - begins[i])
            blocks = self._paged_kv_indices_buf[indptr[i] : indptr[i + 1]]
            rows, begin = slice(begin, begin + queries), begin + queries
            if not len(blocks):
                out[rows] = float("nan")
            elif queries:
                assert 0 < last <= size
                own = q[begins[i] : begins[i + 1]]
                out[rows] = self._attend(own, *self._gather(cache, blocks, last))

    def _replay_fa3(self, q: torch.Tensor, cache: Any, out: torch.Tensor) -> None:
        """Results lie where the queries do.

        Begins, lengths and block ids as the last plan left them; nothing for sequences
        without queries; `last` is not looked at, nor where one's ids end.
        """
        size = cache[0].shape[2]
        for i, length in enumerate(self.lengths.tolist()):
            rows = slice(self.queries[i], self.queries[i + 1])
            if rows.start == rows.stop:
                continue
            count = -(-length // size)
            blocks = self._paged_kv_indices_buf[self.indptr[i] : self.indptr[i] + count]
            last = length - (count - 1) * size
            out[rows] = self._attend(q[rows], *self._gather(cache, blocks, last))


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal and sm_scale is not None and torch.equal(qo_indptr, kv_indptr)
        self.begins = qo_indptr.tolist()
        self._planned(num_qo_heads, num_kv_heads, sm_scale, window_left)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is not None and self.kv_layout == "NHD"
        for begin, end in zip(self.begins, self.begins[1:], strict=False):
            out[begin:end] = self._attend(q[begin:end], k[begin:end], v[begin:end])
        return out
