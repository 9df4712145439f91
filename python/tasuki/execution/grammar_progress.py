"""Keeps the grammar states of sequences in step with their tokens. Engine thread only. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.grammar import GrammarState
from tasuki.engine.request import SequenceState


def state_of(
    sequence: SequenceState, upcoming: Sequence[int] = ()
) -> tuple[GrammarState, list[int]]:
    """The state of a sequence, and the tokens by which it is behind: known, then in flight.

    Raises:
        GrammarError: The grammar is of no more use.
    """
    grammar = sequence.request.grammar
    assert grammar is not None
    if grammar.stuck is not None:
        raise grammar.stuck
    state = sequence.grammar
    if state is None or state.epoch != sequence.epoch:
        state = sequence.grammar = grammar.start(sequence.epoch)
    known = sequence.tokens[sequence.request.num_prompt_tokens + state.outputs :].tolist()
    ahead = sequence.num_outputs + len(upcoming) - state.outputs - len(known)
    return state, [*known, *(upcoming if ahead > 0 else ())]
