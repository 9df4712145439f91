"""Token-for-token comparison with the reference, near-ties told from faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.client import Client
from support.reference import Prompt, Reference, load_prompts, load_references

# The top-2 gap under which float32 kernels may legitimately disagree.
NEAR_TIE = 1e-4
# How many near-ties one mode may have.
ALLOWED_NEAR_TIES = 1

# Gives the continuation of a token-id prompt: (prompt, max_tokens) -> tokens.
Continue = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class NearTie:
    """A divergence that the reference itself was not sure about."""

    prompt: str
    step: int
    expected: int
    got: int
    gap: float


def compare(reference: Reference, tokens: list[int], proceed: Continue) -> list[NearTie]:
    """Compares an answer with its reference; goes on teacher-forced after a near-tie.

    Args:
        tokens: the answer to the whole prompt.
        proceed: asks the system to continue from given token ids.

    Returns:
        The near-ties met.

    Raises:
        AssertionError: a divergence that is none, or a wrong number of tokens.
    """
    ties: list[NearTie] = []
    start = 0
    while True:
        expected = reference.tokens[start:]
        assert len(tokens) == len(expected), (
            f"{reference.name}: {len(tokens)} tokens from step {start}, not {len(expected)}"
        )
        pairs = zip(tokens, expected, strict=True)
        step = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
        if step is None:
            return ties
        at = start + step
        tie = NearTie(reference.name, at, expected[step], tokens[step], reference.gaps[at])
        assert tie.gap < NEAR_TIE, (
            f"{tie.prompt}: step {tie.step} gave token {tie.got}, transformers {tie.expected} "
            f"with a top-2 gap of {tie.gap:g}\ngot      {tokens}\nexpected {expected}"
        )
        ties.append(tie)
        start = at + 1
        if start == len(reference.tokens):
            return ties
        forced = reference.prompt_tokens + reference.tokens[:start]
        tokens = proceed(forced, len(reference.tokens) - start)


def check_mode(mode: str, ties: Sequence[NearTie]) -> None:
    """Prints and counts a mode's near-ties.

    Raises:
        AssertionError: more than one.
    """
    for tie in ties:
        print(f"near-tie in mode {mode}: {tie}")
    print(f"mode {mode}: {len(ties)} near-ties")
    assert len(ties) <= ALLOWED_NEAR_TIES, f"mode {mode}: {len(ties)} near-ties: {ties}"


def ask_and_compare(client: Client, prompt: Prompt) -> list[NearTie]:
    """One fixed prompt through the HTTP API as text or chat, against its reference."""
    reference = load_references()[prompt.name]
    question = prompt.messages if prompt.messages is not None else prompt.text
    assert question is not None
    answer = client.complete(question, max_tokens=len(reference.tokens))
    assert answer.prompt_tokens == reference.prompt_tokens, f"{prompt.name}: tokenized otherwise"
    assert answer.finish_reason == "length"
    return compare(
        reference,
        answer.tokens,
        lambda tokens, count: client.complete(tokens, max_tokens=count).tokens,
    )


def by_prompt_length() -> list[Prompt]:
    """The fixed prompts, fewest tokens first."""
    references = load_references()
    return sorted(load_prompts(), key=lambda p: len(references[p.name].prompt_tokens))
