"""Keeps the grammar states of sequences in step with their tokens. Engine thread only. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.grammar import GrammarState
from tasuki.engine.request import SequenceState


def follow(sequence: SequenceState, upcoming: Sequence[int] = ()) -> GrammarState:
    """The state of a sequence after its output tokens, and those in flight.

    Raises:
        GrammarError: They do not match its grammar, or a limit is reached.
    """
    state = sequence.grammar
    if state is None or state.epoch != sequence.epoch:
        grammar = sequence.request.grammar
        assert grammar is not None
        state = sequence.grammar = grammar.start(sequence.epoch)
    known = sequence.tokens[sequence.request.num_prompt_tokens + state.outputs :].tolist()
    ahead = sequence.num_outputs + len(upcoming) - state.outputs - len(known)
    state.advance([*known, *(upcoming if ahead > 0 else ())])
    return state
