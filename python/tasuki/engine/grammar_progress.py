"""Keeps the grammar states of sequences in step with their tokens. Engine thread only. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.errors import GrammarError
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


def completes(sequence: SequenceState, token: int) -> bool:
    """Whether a sequence's answer is whole with this next token, so that nothing can follow."""
    try:
        state = follow(sequence)
        if state.outputs == sequence.num_outputs:
            state = state.copy()
            state.advance([token])
        return state.complete
    except GrammarError:
        return False  # the next mask says why
