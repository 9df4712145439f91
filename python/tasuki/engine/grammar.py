"""What an answer's text must match: compiled grammars, and where an answer stands in one.

    GrammarSource ─compile─▶ Grammar ─start─▶ GrammarState ─fill─▶ one bit for each token

`llguidance` does the work. A state follows from the output tokens alone, so a preempted,
resumed or handed-over answer needs nothing but its tokens: a new state replays them.

Compilers may be used by any thread; `worker/grammar_pool.py` compiles off the
engine thread, on threads whose stack suffices for what `MAX_SOURCE_BYTES` allows. All states
of one grammar belong to one thread at a time (`grammar_masks.py`). No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tasuki.engine.errors import GrammarError

MAX_SOURCE_BYTES = 256 << 10
"""Of a grammar's text: what compiles recurses, on 512 MiB of stack at most (measured)."""

_LIMITS = LLParserLimits(verbose_errors=False)
_MESSAGE_CHARS = 300
# Without a bound, a model that likes blanks can go on with them for ever.
_BLANKS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


def _from_schema(text: str) -> str:
    blanks = None if text.strip() in ("true", "false") else _BLANKS  # they take no options
    return LLMatcher.grammar_from_json_schema(text, defaults=blanks)


_COMPILERS = {
    "json_schema": _from_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a request names it.

    Attributes:
        kind: `json_schema`, `regex` or `lark`.
        text: The schema, expression or grammar.
    """

    kind: str
    text: str


class GrammarCompiler:
    """Compiles grammars for one model's tokens.

    Args:
        folder: Of the model; its `tokenizer.json` is read when the first grammar comes.
        vocab_size: Logits of a row; may be larger than the tokenizer's vocabulary.
        eos_token_ids: The model's; no grammar allows them as text.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar, ready to use.

        Raises:
            GrammarError: It cannot be compiled, allows no answer, or there is no tokenizer.
        """
        make = _COMPILERS.get(source.kind)
        if make is None:
            raise GrammarError(
                f"grammars of kind {source.kind!r} are unknown to this worker, it has"
                f" {', '.join(_COMPILERS)}: run router and worker of one version"
            )
        size = len(source.text.encode())
        if size > MAX_SOURCE_BYTES:
            raise GrammarError(
                f"the {source.kind} has {size} bytes: at most {MAX_SOURCE_BYTES} are compiled"
            )
        tokenizer = self._load()
        try:
            matcher = LLMatcher(tokenizer, make(source.text), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise GrammarError(f"the {source.kind} is refused: {_short(str(error))}") from None
        _check(matcher, f"the {source.kind} is refused")
        grammar = Grammar(tokenizer, matcher)
        # The first mask fills caches that all states share. It is computed here, as it is slow.
        state = grammar.start()
        bits = grammar.rows(1)
        state.fill(bits[0])
        if not state.accepting and not _others(bits[0], tokenizer.eos_tokens).any():
            raise GrammarError(f"the {source.kind} is refused: no answer's first token matches it")
        return grammar

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._file, self._vocab_size, self._eos)
            return self._tokenizer


class Grammar:
    """A compiled grammar, shared by all answers that must match it.

    Args:
        tokenizer: Of the model.
        matcher: At the beginning of an answer; only ever copied.

    Attributes:
        eos_tokens: The model's tokens that end an answer.
        stuck: Why it is of no more use, if an answer got stuck in it.
    """

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._words = -(-tokenizer.vocab_size // 32)
        self.eos_tokens: list[int] = list(tokenizer.eos_tokens)
        self.stuck: GrammarError | None = None

    def start(self, epoch: int = 0) -> GrammarState:
        """The state of an answer without tokens."""
        return GrammarState(self, self._matcher.deep_copy(), epoch)

    def rows(self, count: int) -> NDArray[np.uint32]:
        """Place for the bits of so many answers: [count, W]."""
        return np.zeros((count, self._words), dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer may end.

    Attributes:
        stops: Tokens that end it.
        banned: It must not end here while it can go on (`min_tokens`).
    """

    stops: Collection[int] = ()
    banned: bool = False


class GrammarState:
    """Where one answer stands.

    Attributes:
        outputs: Output tokens that it has seen, resumed ones included.
        epoch: The sequence's when it began; at another one what it has seen may be void.
    """

    __slots__ = ("_grammar", "_matcher", "epoch", "outputs")

    def __init__(self, grammar: Grammar, matcher: LLMatcher, epoch: int) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self.epoch = epoch
        self.outputs = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on by these output tokens.

        Raises:
            GrammarError: They do not match, or a limit is reached. The state is of no more use.
        """
        for token in tokens:
            if token < 0 or not self._matcher.consume_token(token):
                _check(self._matcher, f"output token {self.outputs} (id {token})")
                raise GrammarError(
                    f"output token {self.outputs} (id {token}) does not match the grammar"
                )
            self.outputs += 1

    def fill(self, bits: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may follow: [W]. Not interrupted by anything.

        A state that reaches a limit keeps the error for `finish_all`.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    @staticmethod
    def fill_all(
        states: Sequence[GrammarState], bits: NDArray[np.uint32], executor: LLExecutor
    ) -> None:
        """`fill` of several states, [n, W], at once on the executor's threads."""
        matchers = [(state._matcher, row) for row, state in enumerate(states)]
        executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits[0].nbytes, len(bits))

    @property
    def accepting(self) -> bool:
        """Whether the answer matches as it is."""
        return bool(self._matcher.is_accepting())

    @staticmethod
    def finish_all(
        states: Sequence[GrammarState], bits: NDArray[np.uint32], endings: Sequence[Ending]
    ) -> list[GrammarError | None]:
        """Decide about the tokens that end answers: allowed where an answer matches as it is.

        Where nothing else can follow the answer ends, whatever was asked for: by one of its
        stop tokens, or by the model's own if it has none.

        Args:
            states: Of one model; at least one.
            bits: [n, W], as `fill` leaves them; changed.
            endings: Of each state's answer.

        Returns:
            For each state why it is of no more use, if a limit was reached or no token at all
            is allowed.
        """
        eos = states[0]._grammar.eos_tokens
        _clear(bits, eos)
        for row, ending in zip(bits, endings, strict=True):
            if not set(ending.stops).issubset(eos):
                _clear(row, ending.stops)
        goes_on = (bits.max(axis=1) != 0).tolist()
        return [
            state._finish_row(row, ending, more)
            for state, row, ending, more in zip(states, bits, endings, goes_on, strict=True)
        ]

    def _finish_row(
        self, bits: NDArray[np.uint32], ending: Ending, goes_on: bool
    ) -> GrammarError | None:
        if self._matcher.is_error():
            return _error_of(self._matcher, f"after {self.outputs} output tokens")
        if not self.accepting:
            ends: Collection[int] = ()
        elif goes_on:
            ends = () if ending.banned else ending.stops
        else:
            ends = ending.stops or self._grammar.eos_tokens
        _set(bits, ends)
        if goes_on or (ends and bits.any()):
            return None
        return GrammarError(
            f"after {self.outputs} output tokens the grammar allows no token of this model:"
            " loosen it, or leave its text out of stop_token_ids"
        )


def _tokenizer(file: Path, vocab_size: int, eos: list[int]) -> LLTokenizer:
    if not file.is_file():
        raise GrammarError(
            f"grammars need the model's {file.name}, which its folder lacks: serve a folder with it"
        )
    text = file.read_text(encoding="utf-8")
    more: dict[str, Any] = {"eos_token": eos} if eos else {}
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, **more)
        except ValueError:  # it has more tokens than there are logits
            return LLTokenizer(text, **more)
    except Exception as error:  # of several types, as files differ
        raise GrammarError(
            f"the model's {file.name} is of no use for grammars: {_short(str(error))}"
        ) from None


def _check(matcher: LLMatcher, where: str) -> None:
    if matcher.is_error():
        raise _error_of(matcher, where)


def _error_of(matcher: LLMatcher, where: str) -> GrammarError:
    return GrammarError(f"{where}: {_short(matcher.get_error())}")


def _short(message: str) -> str:
    """A library's message in one line."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MESSAGE_CHARS else line[: _MESSAGE_CHARS - 3] + "..."


def _others(bits: NDArray[np.uint32], tokens: Iterable[int]) -> NDArray[np.uint32]:
    rest = bits.copy()
    _clear(rest, tokens)
    return rest


def _clear(bits: NDArray[np.uint32], tokens: Iterable[int]) -> None:
    """Of one row, [W], or of several, [n, W]."""
    for token in tokens:
        if token >> 5 < bits.shape[-1]:
            bits[..., token >> 5] &= ~np.uint32(1 << (token & 31))


def _set(bits: NDArray[np.uint32], tokens: Iterable[int]) -> None:
    for token in tokens:
        if token >> 5 < len(bits):
            bits[token >> 5] |= np.uint32(1 << (token & 31))
