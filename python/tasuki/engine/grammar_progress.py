"""Keeps the grammar states of sequences in step with their tokens. Engine thread only. No torch."""

from __future__ import annotations

from tasuki.engine.grammar import GrammarState
from tasuki.engine.request import SequenceState


def state_of(sequence: SequenceState) -> tuple[GrammarState, list[int]]:
    """The state of a sequence, and the tokens that it has not seen.

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
    first = sequence.request.num_prompt_tokens + state.outputs
    return state, sequence.tokens[first:].tolist()
