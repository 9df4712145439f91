"""States of layers that keep one (Mamba, linear attention, short convolutions), in pages.

A page of a state group has the states of the group's layers, one after another:

    page    | layer 3: convolution, recurrence | layer 4: .. | layer 5: .. | unused |

A step reads each sequence's state from the page that its last token left it in, and writes
the new one where its block table says: the same page while a block fills, another one at
each checkpoint. Both are found by the block tables alone (engine/cache_groups.py).

Layers compute a step in *runs*, each of which ends where a state goes to a page: all
sequences with one token together, and of every other sequence the parts of its chunk.

Nothing is written before `commit`, which comes when the step is sampled: a step that raised is
computed again from the states that it began with. Owns the new states until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tasuki.attention.batch import Batch
from tasuki.engine.cache_groups import CacheGroup

_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state.

    Attributes:
        shape: For one sequence.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """In a page, a multiple of 8."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def state_bytes(parts: Sequence[StatePart]) -> int:
    """What a layer's state takes of a page."""
    return sum(part.bytes for part in parts)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens that the layers compute at once.

    Attributes:
        tokens: Of the batch.
        rows: Sequences, each with as many tokens.
        follows: It goes on from the run before it, which is of the same sequence.
        new: [rows] bool, on the device: begin without a state.
        reads: [rows] int64 for each group: pages to begin from; anything where `new`.
        writes: [rows] int64 for each group: pages that the states go to.
    """

    tokens: slice
    rows: int
    follows: bool
    new: torch.Tensor
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


class StepStates:
    """The states of one step over one pool.

    Args:
        pool: [num_blocks, ...] of any dtype, contiguous; a block has a multiple of 8 bytes.
        groups: Of the model, all of them.
        parts: Of each layer that has a state.
        block_size: Tokens of a block.

    Attributes:
        runs: Of the step that is planned, in the order of its tokens.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        groups: Sequence[CacheGroup],
        parts: Mapping[int, Sequence[StatePart]],
        block_size: int,
    ) -> None:
        self._pages = pool.view(torch.uint8).view(len(pool), -1).view(torch.int64)
        self._parts, self._block_size = parts, block_size
        self._kv_groups = [i for i, group in enumerate(groups) if not group.has_state]
        self._groups = [i for i, group in enumerate(groups) if group.has_state]
        self._places: dict[int, tuple[int, int]] = {}  # of each layer: its group, first word
        for place, index in enumerate(self._groups):
            at = 0
            for layer in groups[index].layers:
                self._places[layer] = place, at
                at += state_bytes(parts[layer]) // _ALIGN_BYTES
        self.runs: list[Run] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._last: dict[int, list[torch.Tensor]] = {}

    def clear_new_pages(self, batch: Batch) -> None:
        """Zero the pages that a KV group begins to fill: states there may read as NaN."""
        for group in self._kv_groups:
            slots = batch.of_group(group).slots
            first = slots[(slots >= 0) & (slots % self._block_size == 0)]
            self._pages.index_fill_(0, first // self._block_size, 0)

    def plan(self, batch: Batch) -> None:
        """Find the runs of a step and their pages; what the one before it kept is dropped."""
        assert batch.cuts is not None, "a model with states is given no cuts"
        self._kept, self._last = [], {}
        tables = [batch.of_group(group).block_tables for group in self._groups]
        self.runs = []
        singles = batch.num_decodes
        if singles:
            ends = torch.tensor(batch.context_lens[:singles])
            rows = torch.arange(singles)
            run = self._run(tables, slice(0, singles), rows, ends - 1, ends, follows=False)
            self.runs.append(run)
        begin = singles
        for row in range(singles, len(batch.query_lens)):
            start = batch.context_lens[row] - batch.query_lens[row]
            done = 0
            for cut in batch.cuts[row]:
                where = torch.tensor([[row], [start + done], [start + cut]])
                tokens = slice(begin + done, begin + cut)
                self.runs.append(self._run(tables, tokens, *where, follows=done > 0))
                done = cut
            begin += done

    def _run(
        self,
        tables: Sequence[torch.Tensor],
        tokens: slice,
        rows: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        *,
        follows: bool,
    ) -> Run:
        """Of the sequences `rows`, the tokens `starts` to `ends` - 1; all [rows] int64, host."""
        device, size = self._pages.device, self._block_size
        rows = rows.to(device)
        read = ((starts - 1).clamp(min=0) // size).to(device)
        write = ((ends - 1) // size).to(device)
        return Run(
            tokens,
            len(rows),
            follows,
            (starts == 0).to(device),
            tuple(table[rows, read].long() for table in tables),
            tuple(table[rows, write].long() for table in tables),
        )

    def begin(self, layer: int, run: Run) -> list[torch.Tensor]:
        """A layer's state before a run, [rows, *shape] for each part; the caller's to change."""
        if run.follows:
            return [tensor.clone() for tensor in self._last[layer]]
        group, at = self._places[layer]
        words = self._slice(layer, at).index_select(0, run.reads[group])
        words.masked_fill_(run.new[:, None], 0)
        tensors, at = [], 0
        for part in self._parts[layer]:
            count = part.bytes // _ALIGN_BYTES
            values = words[:, at : at + count].contiguous().view(part.dtype)
            elements = torch.Size(part.shape).numel()
            tensors.append(values[:, :elements].reshape(run.rows, *part.shape))
            at += count
        return tensors

    def keep(self, layer: int, run: Run, state: list[torch.Tensor]) -> None:
        """A layer's state after a run, as `begin` gives it; written by `commit`."""
        group, at = self._places[layer]
        self._last[layer] = state
        words = []
        for part, tensor in zip(self._parts[layer], state, strict=True):
            flat = tensor.to(part.dtype).reshape(run.rows, -1)
            short = part.bytes // part.dtype.itemsize - flat.shape[1]
            flat = torch.nn.functional.pad(flat, (0, short)) if short else flat
            words.append(flat.contiguous().view(torch.int64))
        self._kept.append((self._slice(layer, at), run.writes[group], torch.cat(words, 1)))

    def commit(self) -> None:
        """Write what was kept, in order: of one page, the last."""
        for place, pages, words in self._kept:
            place.index_copy_(0, pages, words)
        self._kept, self._last = [], {}

    def _slice(self, layer: int, at: int) -> torch.Tensor:
        return self._pages[:, at : at + state_bytes(self._parts[layer]) // _ALIGN_BYTES]


def states_of(attention: object) -> StepStates | None:
    """The states that a backend's layers have; None: they have none."""
    states: StepStates | None = getattr(attention, "states", None)
    return states
