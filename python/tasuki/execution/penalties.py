"""Changes of logits before sampling, for all rows at once: penalties, bias, min_tokens.

    seen   [slots, V] int32, on the logits' device
           bit 30: the token is in the prompt; below it: how often it is in the output

A sequence with penalties has a slot of `seen`. A step adds its new tokens, all sequences' at
once; a token that is still on its way to the host is added where it is, on the device, so
penalties do not keep steps from overlapping. What a slot holds follows from the sequence's
tokens: a slot is taken from the sequence that was used least recently, and filled anew when
that one returns. There are as many slots as the largest step needed so far.

`Penalties` owns `seen` and which sequence has which slot. Engine thread only.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasuki.engine.api import SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import SequenceState
from tasuki.execution.forward import input_tokens
from tasuki.execution.penalty_torch import IN_PROMPT, LEAST, penalize
from tasuki.execution.step_arrays import upload

SLOTS_AT_ONCE = 16
_TICKETS = itertools.count()  # of all instances: a ticket means one sequence


@dataclass(slots=True)
class _Slot:
    """A sequence's row of `seen`.

    Attributes:
        index: The row.
        epoch: The sequence's when the row was filled; at another one what was added may be void.
        outputs: How many output tokens were added.
    """

    index: int
    epoch: int
    outputs: int = 0


def penalized(params: SamplingParams) -> bool:
    """Whether logits depend on the tokens that the sequence holds."""
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def needs_adjusting(draw: Draw) -> bool:
    """Whether `Penalties.adjust` would change this draw's logits."""
    params = draw.sequence.request.spec.sampling
    early = params.delays_stops and draw.position < params.min_tokens
    return early or penalized(params) or bool(params.logit_bias)


class _Uploaded:
    """What a step sent to the device, for the next step if it needs the same: most do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: object = None
        self.tensors: list[torch.Tensor] = []

    def refresh(
        self, key: object, arrays: Callable[[], list[tuple[NDArray[Any], torch.dtype]]]
    ) -> None:
        """Send `arrays()`, unless what was sent last had an equal key."""
        if key != self._key:
            self._key = None  # while it is not there
            self.tensors = [
                upload(np.ascontiguousarray(array), dtype, self._device)
                for array, dtype in arrays()
            ]
            self._key = key


class Penalties:
    """Adjusts logits on one device; remembers there what sequences contain."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._slots: OrderedDict[int, _Slot] = OrderedDict()  # by ticket, least recent first
        self._table, self._bias = _Uploaded(device), _Uploaded(device)

    def adjust(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        draws: Sequence[Draw],
        sampled: torch.Tensor | None,
    ) -> torch.Tensor:
        """Copies of logits after penalties, then logit bias, then the ban on early stop tokens.

        Repetition divides positive and multiplies negative logits of tokens in
        prompt or output; frequency and presence subtract, over output tokens only.

        Args:
            logits: [R, V] float32, adjacent in a row; not changed.
            rows: Row of `logits` for each draw.
            draws: Whose they are.
            sampled: The tokens of the step in flight, on the device.

        Returns:
            [n, V] float32.
        """
        positions = {
            draw.sequence: draw.position
            for draw in draws
            if penalized(draw.sequence.request.spec.sampling)
        }
        slots = self._update(positions, logits, sampled) if positions else {}
        table = []
        for row, draw in zip(rows, draws, strict=True):
            p = draw.sequence.request.spec.sampling
            factors = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            table.append((row, slots.get(draw.sequence, -1), *factors))
        self._table.refresh(table, lambda: [(np.array(table).T, torch.float64)])
        work = _penalize(logits, self._seen, self._table.tensors[0])
        self._add_bias(work, draws)
        _ban_stops(work, draws)
        return work

    def _update(
        self,
        positions: Mapping[SequenceState, int],
        logits: torch.Tensor,
        sampled: torch.Tensor | None,
    ) -> dict[SequenceState, int]:
        """Bring `seen` up to date with all tokens before the positions; rows by sequence."""
        try:
            slots, new = self._place(positions, logits.shape[1])
            self._clear(new)
            self._add(slots, positions, sampled)
        except BaseException:
            self._forget()  # what was added and what was not is unknown
            raise
        return {sequence: slot.index for sequence, slot in slots.items()}

    def _place(
        self, sequences: Collection[SequenceState], vocab: int
    ) -> tuple[dict[SequenceState, _Slot], list[SequenceState]]:
        """The slots of these sequences, and those of them whose slot is to be filled anew."""
        if len(sequences) > self._seen.shape[0] or self._seen.shape[1] != vocab:
            count = -(-len(sequences) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
            self._seen = self._seen.new_empty(0, 0)  # freed before there is a larger one
            self._seen = self._seen.new_empty(count, vocab)
            self._forget()
        new = []
        for sequence in sequences:
            slot = self._slots.get(sequence.ticket)
            if slot is None or slot.epoch != sequence.epoch:
                new.append(sequence)
            else:
                self._slots.move_to_end(sequence.ticket)
        for sequence in new:
            stale = self._slots.pop(sequence.ticket, None)
            if stale is None and not self._free:
                stale = self._slots.popitem(last=False)[1]
            index = self._free.pop() if stale is None else stale.index
            sequence.ticket = next(_TICKETS)
            self._slots[sequence.ticket] = _Slot(index, sequence.epoch)
        return {sequence: self._slots[sequence.ticket] for sequence in sequences}, new

    def _clear(self, sequences: Sequence[SequenceState]) -> None:
        """Mark the prompts, and nothing else, in the slots of these sequences."""
        if not sequences:
            return
        device, vocab = self._seen.device, self._seen.shape[1]
        indices = [self._slots[sequence.ticket].index for sequence in sequences]
        self._seen.index_fill_(0, upload(indices, torch.int64, device), 0)
        prompts = [
            np.asarray(sequence.request.spec.prompt_tokens, dtype=np.int64) + index * vocab
            for sequence, index in zip(sequences, indices, strict=True)
            if sequence.request.spec.sampling.repetition_penalty != 1.0
        ]
        if prompts:
            places = upload(np.concatenate(prompts), torch.int64, device)
            self._seen.view(-1).index_fill_(0, places, IN_PROMPT)

    def _add(
        self,
        slots: Mapping[SequenceState, _Slot],
        positions: Mapping[SequenceState, int],
        sampled: torch.Tensor | None,
    ) -> None:
        """Count output tokens that are not counted yet."""
        device, vocab = self._seen.device, self._seen.shape[1]
        bases: list[int] = []
        tokens: list[int] = []
        sources: list[int] = []
        for sequence, slot in slots.items():
            missing = positions[sequence] - slot.outputs
            first = sequence.request.num_prompt_tokens + slot.outputs
            known = sequence.tokens[first : first + missing]
            ahead = missing - len(known)
            bases += [slot.index * vocab] * missing
            tokens += [*known, *[0] * ahead]
            sources += [-1] * len(known) + [sequence.drawn] * ahead
            slot.outputs += missing
        if not tokens:
            return
        added = np.array([bases, tokens, sources])
        base, token, source = upload(added, torch.int64, device)
        if sampled is not None and len(sampled):
            token = input_tokens(token, source, sampled)
        ones = torch.ones_like(token, dtype=torch.int32)
        self._seen.view(-1).index_add_(0, base + token, ones)

    def _add_bias(self, work: torch.Tensor, draws: Sequence[Draw]) -> None:
        biases = [draw.sequence.request.bias for draw in draws]
        if not any(tokens for tokens, _ in biases):
            return

        def arrays() -> list[tuple[NDArray[Any], torch.dtype]]:
            lengths = [len(tokens) for tokens, _ in biases]
            rows = np.repeat(np.arange(len(biases)) * work.shape[1], lengths)
            tokens = np.frombuffer(b"".join(tokens for tokens, _ in biases), dtype=np.int64)
            values = np.frombuffer(b"".join(values for _, values in biases), dtype=np.float32)
            return [(rows + tokens, torch.int64), (values, work.dtype)]

        self._bias.refresh((work.shape[1], biases), arrays)
        work.view(-1).index_add_(0, *self._bias.tensors)

    def _forget(self) -> None:
        self._slots.clear()
        self._free = list(range(self._seen.shape[0]))


def _penalize(logits: torch.Tensor, seen: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See penalty_torch.py."""
    if not logits.is_cuda:
        return penalize(logits, seen, table)
    from tasuki.execution import penalty_kernel

    return penalty_kernel.penalize(logits, seen, table)


def _ban_stops(work: torch.Tensor, draws: Sequence[Draw]) -> None:
    vocab = work.shape[1]
    stops = [
        row * vocab + token
        for row, draw in enumerate(draws)
        if draw.position < draw.sequence.request.spec.sampling.min_tokens
        for token in draw.sequence.request.spec.sampling.stop_token_ids
        if token < vocab
    ]
    if stops:
        work.view(-1).index_fill_(0, upload(stops, torch.int64, work.device), LEAST)
