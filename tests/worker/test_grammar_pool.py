"""Grammars are compiled elsewhere, once, and not for ever."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from support.waiting import until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tasuki.engine.errors import FailureKind, GrammarBusyError, GrammarError, kind_of
from tasuki.engine.grammar import GrammarCompiler, GrammarSource
from tasuki.worker.grammar_pool import Compiled, GrammarPool

DEADLINE_S = 60.0


class Compiler:
    """Answers with an object of its own for each call; slow ones wait for `may`."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.compiled: list[str] = []
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def compile(self, source: GrammarSource) -> object:
        self.compiled.append(source.text)
        if source.text.startswith("slow"):
            assert self.may.wait(DEADLINE_S)
        self.ended.put(source.text)
        if source.text.startswith("bad"):
            raise GrammarError("it is bad")
        if source.text == "panic":
            raise SystemExit("as no Exception does")
        return object()


class Pool(GrammarPool):
    """The limit of a request is over when the test says so, however long a busy machine takes."""

    over: threading.Semaphore

    def _watch(self) -> None:
        while True:
            _, source, waiting = self._deadlines.get()
            self.over.acquire()
            self._expire(source, waiting)


class Rig:
    def __init__(self, pool: type[GrammarPool] = Pool, **settings: Any) -> None:
        self.compiler = Compiler()
        any_compiler: Any = self.compiler
        self.over = threading.Semaphore(0)
        """Once for each request, the oldest first, those that have their grammar too."""
        self.pool = pool(any_compiler, **settings)
        if isinstance(self.pool, Pool):
            self.pool.over = self.over

    def ask(self, text: str) -> queue.SimpleQueue[Compiled]:
        told: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self.pool.get(GrammarSource("regex", text), told.put)
        return told

    def get(self, text: str) -> Compiled:
        return self.ask(text).get(timeout=DEADLINE_S)

    def ask_and_begin(self, text: str) -> queue.SimpleQueue[Compiled]:
        told = self.ask(text)
        until(lambda: text in self.compiler.compiled, f"a thread begins {text}")
        return told


def test_a_grammar_is_compiled_once() -> None:
    rig = Rig()
    assert rig.get("a") is rig.get("a")
    assert rig.get("b") is not rig.get("a")
    assert rig.compiler.compiled == ["a", "b"]


def test_a_refusal_is_kept_as_well() -> None:
    rig = Rig()
    assert str(rig.get("bad")) == str(rig.get("bad")) == "it is bad"
    assert rig.compiler.compiled == ["bad"]


def test_a_panic_refuses_one_grammar_and_ends_nothing() -> None:
    rig = Rig(threads=1)
    assert "as no Exception does" in str(rig.get("panic"))
    assert not isinstance(rig.get("a"), GrammarError)


def test_requests_that_want_the_same_share_a_compilation() -> None:
    rig = Rig()
    told = [rig.ask("slow") for _ in range(3)]
    rig.compiler.may.set()
    first, *rest = [each.get(timeout=DEADLINE_S) for each in told]
    assert all(each is first for each in rest)
    assert rig.compiler.compiled == ["slow"]


def test_the_least_recently_used_is_forgotten() -> None:
    rig = Rig(kept=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        rig.get(text)
    assert rig.compiler.compiled == ["a", "b", "c", "b"]


def test_the_limit_is_that_of_the_clock() -> None:
    rig = Rig(GrammarPool, limit_s=0.2, threads=1)
    refused = rig.get("slow")
    assert isinstance(refused, GrammarError) and "0.2 s" in str(refused)
    rig.compiler.may.set()


def test_what_takes_too_long_is_refused_and_its_thread_replaced() -> None:
    rig = Rig(limit_s=0.2, threads=1)
    slow = rig.ask_and_begin("slow")
    rig.over.release()
    refused = slow.get(timeout=DEADLINE_S)
    assert isinstance(refused, GrammarError)
    assert "did not compile within 0.2 s" in str(refused)
    assert isinstance(rig.get("slow"), GrammarError)  # at once: no second thread is taken
    assert not isinstance(rig.get("next"), GrammarError)
    rig.compiler.may.set()
    until(lambda: not isinstance(rig.get("slow"), GrammarError), "its end, which is still of use")
    assert rig.compiler.compiled == ["slow", "next"]


def test_what_no_thread_has_begun_may_come_again() -> None:
    rig = Rig(limit_s=0.2, threads=1)
    rig.pool._replaced = 99  # no other thread takes the place of a late one
    slow, waits = rig.ask_and_begin("slow"), rig.ask("next")
    rig.over.release(2)
    busy = waits.get(timeout=DEADLINE_S)
    assert isinstance(busy, GrammarBusyError)
    assert kind_of(busy) is FailureKind.OVERLOAD
    assert "0.2 s" in str(busy)
    assert type(slow.get(timeout=DEADLINE_S)) is GrammarError, "that one was begun"
    assert rig.compiler.compiled == ["slow"]
    rig.compiler.may.set()
    assert not isinstance(rig.get("next"), GrammarError)


def test_many_grammars_take_no_threads_and_no_stack_of_others() -> None:
    before = set(threading.enumerate())
    size = threading.stack_size()
    rig = Rig(threads=2)
    for index in range(300):
        rig.get(f"g {index}")
    assert len(set(threading.enumerate()) - before) == 3
    slow = [rig.ask(f"slow {index}") for index in range(6)]
    rig.over.release(306)
    assert all(isinstance(each.get(timeout=DEADLINE_S), GrammarError) for each in slow)
    assert threading.stack_size() == size
    rig.compiler.may.set()


def test_only_so_many_threads_are_replaced() -> None:
    rig = Rig(threads=1)
    for index in range(12):
        told = (rig.ask_and_begin if index < 9 else rig.ask)(f"slow {index}")
        rig.over.release()
        assert isinstance(told.get(timeout=DEADLINE_S), GrammarError)
    assert len(rig.compiler.compiled) == 9
    rig.compiler.may.set()


def test_the_deepest_text_that_is_taken_fits_the_stack(tmp_path) -> None:
    """Without the large stack the process would end."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = {token: i for i, token in enumerate(["<|end|>", *sorted(alphabet)])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pool = GrammarPool(GrammarCompiler(tmp_path, len(words), [0]), limit_s=60.0)
    rules = [f"b{i}:b{i + 1}" for i in range(18_000)]
    chain = "\n".join(["start: b0", *rules, f'b{len(rules)}: "y"'])
    told: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    pool.get(GrammarSource("lark", chain), told.put)
    assert not isinstance(told.get(timeout=60), GrammarError)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (GrammarSource("regex", "a" * (256 * 1024 + 1)), "at most 262144"),
        (GrammarSource("unknown", ""), "one version"),
        (GrammarSource("regex", "a"), "tokenizer.json"),
    ],
)
def test_what_cannot_be_compiled_says_why(tmp_path, source: GrammarSource, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        GrammarCompiler(tmp_path, 100, [0]).compile(source)
