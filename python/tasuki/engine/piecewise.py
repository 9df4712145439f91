"""Steps with prompts in them as CUDA graphs, but for attention.

Between two attentions a step's work depends on its number of tokens alone. So
that is recorded for a few numbers, the rooms, and a step runs in the smallest
that holds it, padded at the end; attention and what follows the last one (for
the rows whose logits are wanted) are launched one by one:

    staging ──one copy──▶ slab | tokens sources positions slots | tables rows |
                                   ▼        ▼                       │ plan
    sampled tokens ──▶ piece ▶ attend ▶ piece ▶ attend .. ▶ finish ◀┘ ──▶ logits

That is two or three launches a layer instead of twelve: a step's host time stays
below its device's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tasuki.attention.base import AttentionBackend
from tasuki.engine.batch import Batch
from tasuki.engine.collective import Collective
from tasuki.engine.forward import Body, DivisibleModel, input_tokens
from tasuki.engine.host_buffers import Staging, lay_out
from tasuki.engine.inputs import Places
from tasuki.engine.recorder import Pieces, Recorder, record_all
from tasuki.engine.step_builder import pad
from tasuki.engine.step_header import StepHeader, slab_parts


@dataclass(frozen=True, slots=True)
class _Room:
    """A recorded room; tensors are those that its pieces read."""

    pieces: Pieces
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, positions, slots


def rooms_up_to(max_tokens: int) -> list[int]:
    """Numbers of tokens to record: steps of 32, of 64 from 256 on, of 128 from 512 on.

    Matrix products work through 128 rows at a time: padding to a multiple costs
    them nothing.
    """
    sizes = [*range(32, 256, 32), *range(256, 512, 64), *range(512, max_tokens, 128)]
    return [*(size for size in sizes if size < max_tokens), max_tokens]


class PieceGraphs:
    """The graphs of one model on one pool.

    Args:
        model: Its body must be capturable between attentions.
        attention: Runs between the pieces.
        sampled: Tokens of the step before; stays where it is.
        collective: Joins the ranks, which record and replay alike.
        max_tokens: Of a step; larger ones do not run here.
        max_rows: Sequences of a step whose tables are as wide as can be.
        max_width: Blocks of the longest sequence.
        block_size: Tokens of a block.
    """

    def __init__(
        self,
        model: DivisibleModel,
        attention: AttentionBackend,
        sampled: torch.Tensor,
        collective: Collective,
        *,
        max_tokens: int,
        max_rows: int,
        max_width: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampled = sampled
        self._collective = collective
        self._sizes = rooms_up_to(max_tokens)
        self._block_size = block_size
        self._rooms: dict[int, _Room] = {}
        size = lay_out(slab_parts(max_tokens, max_rows, max_width, max_tokens))[1]
        self._slab = torch.zeros(size, dtype=torch.uint8, device=sampled.device)

    def capture(self, staging: Staging, recorder: Recorder) -> None:
        """Record every room, the largest first: the others fit into its memory."""
        self._rooms = record_all(
            self._sizes, lambda size: self._record(size, staging, recorder), "tokens in a step:"
        )

    def room_for(self, header: StepHeader) -> int | None:
        """The room for a step; None: there is none for it."""
        room = next((size for size in self._sizes if size >= header.tokens), None)
        if room is not None:
            padded = replace(header, room=room)
            if lay_out(padded.parts())[1] > self._slab.numel():
                return None
        return room

    def run(self, header: StepHeader, staging: Staging) -> torch.Tensor:
        """Run the step that `staging` holds: the rank's part of the logits wanted, [R, w]."""
        assert header.room is not None
        room = self._rooms[header.room]
        parts = staging.send(self._slab)
        batch = _batch(room.inputs, parts[4], parts[5], header)
        self._attention.plan(batch)
        body = room.pieces.run(self._attention)
        return self._model.finish(body, batch.logits_rows)

    def _record(self, size: int, staging: Staging, recorder: Recorder) -> _Room:
        """Record one room over a prompt that is all padding."""
        header = StepHeader([size], [size], 0, -(-size // self._block_size), 0, room=size)
        *arrays, _ = staging.take(*header.parts())
        pad(Places.over(arrays, header.rows), 0)
        tokens, sources, positions, slots, tables, rows = staging.send(self._slab)
        taken = torch.zeros_like(tokens)
        inputs = (taken, positions, slots)
        batch = _batch(inputs, tables, rows, header)
        self._attention.plan(batch)

        def work(attention: AttentionBackend) -> Body:
            known = input_tokens(tokens, sources, self._sampled)
            taken.copy_(self._collective.from_first(known))
            return self._model.body(batch, attention)

        return _Room(recorder.pieces(work, self._attention), inputs)


def _batch(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    rows: torch.Tensor,
    header: StepHeader,
) -> Batch:
    tokens, positions, slots = inputs
    return Batch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        block_tables=tables.view(header.rows, header.width),
        query_lens=header.query_lens,
        context_lens=header.context_lens,
        logits_rows=rows,
        num_decodes=header.num_decodes,
    )
