"""Computes steps from their arrays: what every rank of a worker does alike.

    header, slab ▶ upload ▶ attention plan ▶ forward ▶ part of the logits ▶ best, logits
                  └───────── or a CUDA graph's replay ────────┘

Everything here is a function of header, slab and what was computed before, and
every rank is told the same in the same order: so all of them take part in the
same collectives. Only the first rank knows the tokens that it sampled; the
others get them before the forward (`Collective.from_first`).

When a step is over on the first rank, every rank has read and written its cache
for the last time in it: each step ends with a collective that all join after
their last attention, be it the last layer's sum or, where no logits are wanted,
one made for this alone.

Owns the pool's content, the slabs and the sampled tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch, groups_of
from tasuki.attention.states import states_of
from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.cuda_graphs import DecodeGraphs
from tasuki.execution.forward import DivisibleModel, ForwardModel, input_tokens
from tasuki.execution.mixed_graphs import MixedGraphs
from tasuki.execution.recorder import CudaRecorder, Outputs, Recorder
from tasuki.execution.sampler import JointLogits
from tasuki.execution.step_arrays import Staging, StepHeader, upload

log = logging.getLogger(__name__)


class Executor:
    """One rank's model on one device over one pool.

    Args:
        model: Computes logits and writes KV.
        attention: Knows the pool.
        pool: [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        collective: Joins the ranks.
        groups: Cache groups.

    Attributes:
        groups: As given.
        staging: Where a step's arrays are written.
        sampled: [n] int64, on the device: tokens of the step before, of the first rank only.
        keeps_place: Whether graphs read `sampled` where it is.
    """

    def __init__(
        self,
        model: ForwardModel,
        attention: AttentionBackend,
        pool: torch.Tensor,
        collective: Collective = ALONE,
        groups: int = 1,
    ) -> None:
        self.groups = groups
        self._model = model
        self._attention = attention
        self._states = states_of(attention)
        self._pool = pool
        self._collective = collective
        self._joint = JointLogits(collective, model.spec.vocab_size)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self.staging = Staging(pool.device)
        self.sampled = torch.zeros(0, dtype=torch.int64, device=pool.device)

    @property
    def keeps_place(self) -> bool:
        """Whether graphs read `sampled` where it is."""
        return self._graphs is not None

    @property
    def decode_rows(self) -> Sequence[int]:
        """Rows that steps which only decode are padded to, ascending; none: they are not."""
        return () if self._graphs is None else self._graphs.buckets

    def capture(
        self,
        max_rows: int,
        max_model_len: int,
        max_tokens: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """Record CUDA graphs; see `ModelRunner.capture`."""
        recorder = recorder or CudaRecorder()
        free_bytes = _free_bytes(self._pool.device)
        self.sampled = torch.zeros(2 * max_rows, dtype=torch.int64, device=self._pool.device)
        block_size = self._pool.shape[4]
        max_width = -(-max_model_len // block_size)
        graphs = DecodeGraphs(
            self._model,
            self._attention,
            self.sampled,
            self._collective,
            max_rows=max_rows,
            max_width=max_width,
            groups=self.groups,
        )
        graphs.capture(self.staging, recorder)
        self._graphs = graphs
        model, attention = self._model, self._attention
        if max_tokens and attention.captures_prompts and isinstance(model, DivisibleModel):
            mixed = MixedGraphs(
                model,
                attention,
                self.sampled,
                self._collective,
                max_tokens=max_tokens,
                max_decodes=2 * max_rows,
                max_width=max_width,
                block_size=block_size,
                groups=self.groups,
            )
            mixed.capture(self.staging, recorder)
            self._mixed = mixed
        elif max_tokens:
            log.info("no CUDA graphs for steps with prompts: attention or model do not allow them")
        taken_bytes = free_bytes - _free_bytes(self._pool.device)
        log.info("CUDA graphs take %.2f GB", taken_bytes / 1e9)

    def padded(self, header: StepHeader, decodes: bool) -> StepHeader:
        """The step with the bucket or room that it runs in, if it runs in graphs.

        Args:
            header: Of the step as it is.
            decodes: Whether each row is one token with one draw.
        """
        if decodes and self._graphs is not None:
            bucket = self._graphs.bucket_for(header.num_decodes)
            if bucket is not None:
                return replace(header, bucket=bucket)
        if self._mixed is not None:
            return replace(header, room=self._mixed.room_for(header))
        return header

    def run(self, header: StepHeader) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute the step whose arrays `staging` holds.

        Returns:
            Of use on the first rank only: logits [R, V] float32, unless the step is
            greedy, and what `greedy` says of them; None both where none are wanted.
        """
        outputs: Outputs | None
        if header.bucket is not None:
            assert self._graphs is not None
            outputs = self._graphs.run(header, self.staging)
        elif header.room is not None:
            assert self._mixed is not None
            outputs = self._mixed.run(header, self.staging)
        else:
            outputs = self._run_eagerly(header)
        if outputs is None:
            self._collective.fence()
            return None, None
        part, best = outputs
        return None if header.greedy else self._joint.whole(part), best

    def _run_eagerly(self, header: StepHeader) -> Outputs | None:
        parts = self.staging.send()
        tokens = parts[0]
        if header.ahead:
            if self._collective.is_first:
                tokens = input_tokens(parts[0], parts[1], self.sampled)
            tokens = self._collective.from_first(tokens)
        (slots, tables), *more = groups_of(parts[3], parts[4], header.tokens, header.rows)
        batch = Batch(
            tokens=tokens,
            positions=parts[2],
            slots=slots,
            block_tables=tables,
            query_lens=header.query_lens,
            context_lens=header.context_lens,
            logits_rows=parts[5],
            num_decodes=header.num_decodes,
            more_groups=tuple(more),
            cuts=header.cuts,
        )
        if self._states is not None:
            self._states.clear_new_pages(batch)
        self._attention.plan(batch)
        part = self._model.forward(batch, self._attention)
        return (part, self._joint.best(part)) if header.wanted else None

    def commit(self) -> None:
        """The step has succeeded: its states replace those that it began with."""
        if self._states is not None:
            self._states.commit()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to)."""
        for source, target in pairs:
            self._pool[target].copy_(self._pool[source])

    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        """Overwrite blocks' slots with zeros, behind what is in the stream; waits for all ranks."""
        bits = self._pool.view(torch.uint8)  # not every dtype can be filled: fp8 cannot
        bits = bits[:, :, :, :, first_slot:]
        bits.index_fill_(0, upload(blocks, torch.int64, self._pool.device), 0)
        self._collective.fence()
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)


def _free_bytes(device: torch.device) -> int:
    """Memory that nobody holds on a GPU; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
