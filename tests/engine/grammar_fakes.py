"""A vocabulary of bytes and a few words for grammars, and schemas that noise can satisfy."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import threading
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from engine_fakes import spec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tasuki.engine.api import RequestSpec
from tasuki.engine.errors import GrammarError
from tasuki.engine.grammar import Grammar, GrammarCompiler, GrammarSource
from tasuki.engine.grammar_masks import StepMasks, make_masks
from tasuki.engine.mask_threads import MaskThreads
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request, SequenceState
from tasuki.worker.grammar_pool import GrammarPool

TOKENS = 320  # of the tokenizer
VOCAB = 333  # of the model, whose last tokens stand for nothing
EOS = 1


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of `TOKENS` tokens, 0 and 1 special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ['{"name": "value", "size": [1, 22, 333], "other": {"true": true, "null": null}}'] * 3
    tokenizer.train_from_iterator(
        [*texts, *(f"{n} {n * 7} ab cd {n}a" for n in range(99))], trainer
    )
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))


@cache
def folder() -> Path:
    """A folder with the tokenizer, until this process ends."""
    path = Path(mkdtemp(prefix="tasuki-grammar-"))
    atexit.register(shutil.rmtree, path)
    write_tokenizer(path)
    return path


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(folder(), VOCAB, [EOS])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def regex(text: str) -> Grammar:
    return compiler().compile(GrammarSource("regex", text))


def schema(value: Any) -> Grammar:
    return compiler().compile(GrammarSource("json_schema", json.dumps(value)))


def deep_schema(value: Any) -> Grammar:
    """As `schema`, where an ordinary thread's stack would not do."""
    found: list[Grammar | GrammarError] = []
    done = threading.Event()

    def told(compiled: Grammar | GrammarError) -> None:
        found.append(compiled)
        done.set()

    GrammarPool(compiler(), threads=1).get(GrammarSource("json_schema", json.dumps(value)), told)
    assert done.wait(30)
    [grammar] = found
    assert isinstance(grammar, Grammar), grammar
    return grammar


def text_of(tokens: list[int]) -> str:
    """What tokens say, without the one that ends an answer."""
    return str(tokenizer().decode([token for token in tokens if token != EOS]))


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose answers are short, whatever a model prefers."""
    kinds = ["enum", "integer", "string", "boolean", "null", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds)
    match kind:
        case "enum":
            return {"enum": rng.sample(["red", "é", 1, 2.5, None, True, {"a": [1]}], 3)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^a[0-9]{2}b?$", "^(x|yy|zzz)-[a-f]$"]),
            }
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["name", "size", 'q"uote', "größe", "x"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
    return {"type": kind}


def sequence_of(
    grammar: Grammar | None, outputs: Sequence[int] = (), **settings: Any
) -> SequenceState:
    """A sequence with a grammar and these output tokens."""
    given = {"stop_token_ids": frozenset({EOS}), "max_tokens": 99, **settings}
    made = spec("a", [5, 6], **given)
    request = RequestSpec("a", made.leg, [5, 6], made.sampling, list(outputs), grammar=grammar)
    return Request(request, 0, b"", 0.0).sequences[0]


def masks_of(
    draws: Sequence[Draw], constrained: Sequence[int], void: Collection[SequenceState] = ()
) -> StepMasks:
    """The bits of draws, made on one thread."""
    return make_masks(draws, constrained, MaskThreads(threads=1), void)


def allowed(masks: StepMasks, draw: int) -> list[int]:
    """The tokens that a draw's bits allow."""
    row = masks.bits[masks.rows[draw]]
    return [t for t in range(VOCAB) if t >> 5 < len(row) and row[t >> 5] >> np.uint32(t & 31) & 1]
