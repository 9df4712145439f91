"""Steps with prompts in them as CUDA graphs, attention included.

What a step's kernels are launched with depends on its number of tokens alone:
where attention finds its work is planned before (attention/base.py). So a graph is
recorded for each of a few numbers of tokens, the rooms, and a step runs in the
smallest that holds it, padded at the end. In the graph are the taking of input tokens
and the model's body (forward.py). What follows the last attention, for the rows whose
logits are wanted, is a graph of its own (finish_graphs.py):

    staging ──one copy──▶ slab | tokens sources positions slots | tables | rows |
                                   ▼        ▼                       │ plan   ▼ (both outside)
    sampled tokens of the step before ──▶ body ◀────────────────────┘ ──▶ rows wanted
                                                                             ▼
                                                        part, best ◀── finish, greedy choice

All graphs share the slab: they run one after another on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch, StepLimits, groups_of
from tasuki.execution.collective import Collective
from tasuki.execution.finish_graphs import FinishGraphs
from tasuki.execution.forward import Body, DivisibleModel, input_tokens
from tasuki.execution.inputs import Places, pad
from tasuki.execution.recorder import Outputs, Recorder, Replay, record_all
from tasuki.execution.step_arrays import Staging, StepHeader, lay_out, slab_parts

_MAX_CHUNKS = 64  # of a step: plans of attention lay out as many each time


@dataclass(frozen=True, slots=True)
class _Room:
    """A recorded room; tensors are those that its kernels read and write."""

    replay: Replay
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, positions, slots
    body: Body


def rooms_up_to(max_tokens: int) -> list[int]:
    """Numbers of tokens to record: steps of 32, of 64 from 256 on, of 128 from 512 on.

    GEMMs work through 128 rows at a time: padding to a multiple costs
    them nothing.
    """
    sizes = [*range(32, 256, 32), *range(256, 512, 64), *range(512, max_tokens, 128)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


class MixedGraphs:
    """The graphs of one model on one pool.

    Args:
        model: Its body and finish must be capturable.
        attention: Planned here, outside of the graphs.
        sampled: Tokens of the step before; stays where it is.
        collective: Joins the ranks, which record and replay alike.
        max_tokens: Of a step; larger ones do not run here.
        max_decodes: Sequences with one token.
        max_width: Blocks of the longest sequence.
        block_size: Tokens of a block.
        groups: Cache groups.
    """

    def __init__(
        self,
        model: DivisibleModel,
        attention: AttentionBackend,
        sampled: torch.Tensor,
        collective: Collective,
        *,
        max_tokens: int,
        max_decodes: int,
        max_width: int,
        block_size: int,
        groups: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampled = sampled
        self._collective = collective
        self._sizes = rooms_up_to(max_tokens)
        self._limits = StepLimits(max_tokens, max_decodes, _MAX_CHUNKS, max_width)
        self._block_size = block_size
        self._groups = groups
        self._rooms: dict[int, _Room] = {}
        rows = max_decodes + _MAX_CHUNKS
        self._finish = FinishGraphs(model, collective, min(rows, max_tokens))
        size = lay_out(slab_parts(max_tokens, rows, max_width, max_tokens, groups))[1]
        self._slab = torch.zeros(size, dtype=torch.uint8, device=sampled.device)

    def capture(self, staging: Staging, recorder: Recorder) -> None:
        """Record every room, the largest first: the others fit into its memory."""
        self._rooms = record_all(
            self._sizes, lambda size: self._record(size, staging, recorder), "tokens in a step:"
        )
        self._finish.capture(self._rooms[self._sizes[-1]].body, recorder)

    def room_for(self, header: StepHeader) -> int | None:
        """The room for a step; None: it is too large for any."""
        limits, chunks = self._limits, len(header.query_lens) - header.num_decodes
        if header.num_decodes > limits.decodes or chunks > limits.chunks:
            return None
        return next((size for size in self._sizes if size >= header.tokens), None)

    def run(self, header: StepHeader, staging: Staging) -> Outputs | None:
        """Run the step that `staging` holds.

        Returns:
            As `FinishGraphs.run`; None: no logits are wanted.
        """
        assert header.room is not None
        room = self._rooms[header.room]
        *_, tables, rows = staging.send(self._slab)
        self._attention.plan(self._batch(room.inputs, tables, rows, header))
        room.replay()
        return self._finish.run(room.body, rows) if header.wanted else None

    def _record(self, size: int, staging: Staging, recorder: Recorder) -> _Room:
        """Record one room over a prompt that is all padding."""
        header = StepHeader(
            query_lens=[size],
            context_lens=[size],
            num_decodes=0,
            width=-(-size // self._block_size),
            wanted=0,
            groups=self._groups,
        )
        *arrays, _ = staging.take(*header.parts())
        pad(Places.over(arrays, header.rows), 0)
        tokens, sources, positions, slots, tables, rows = staging.send(self._slab)
        taken = torch.zeros_like(tokens)
        inputs = (taken, positions, slots)
        batch = self._batch(inputs, tables, rows, header)
        self._attention.plan(batch)

        def work() -> Body:
            known = input_tokens(tokens, sources, self._sampled)
            taken.copy_(self._collective.from_first(known))
            return self._model.body(batch, self._attention)

        replay, body = recorder.record(work, warm_ups=1)  # decodes were recorded before
        return _Room(replay, inputs, body)

    def _batch(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tables: torch.Tensor,
        rows: torch.Tensor,
        header: StepHeader,
    ) -> Batch:
        tokens, positions, all_slots = inputs
        (slots, block_tables), *more = groups_of(all_slots, tables, len(tokens), header.rows)
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            query_lens=header.query_lens,
            context_lens=header.context_lens,
            logits_rows=rows,
            num_decodes=header.num_decodes,
            limits=self._limits,
            more_groups=tuple(more),
        )
