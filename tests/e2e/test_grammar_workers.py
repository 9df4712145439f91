"""Workers hand over answers that must match a grammar: real pools, wire and KV."""

from __future__ import annotations

import json
import queue
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.deployment import Deployment, Options
from support.direct import WorkerStream
from tokenizers import Tokenizer

from tasuki.v1 import worker_pb2 as pb

EOS = 2
DEADLINE_S = 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 3},
        "kind": {"enum": ["a", "bb", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}


class Placer:
    """Places legs on a prefill and a decode worker, and hears how they end."""

    def __init__(self, system: Deployment) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.workers = {
            worker.role: WorkerStream(f"127.0.0.1:{worker.port}", self.heard)
            for worker in system.workers.values()
        }
        self.tokens: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self.ended: dict[str, list[pb.LegEnd]] = defaultdict(list)

    def place(self, name: str, grammar: pb.Grammar, split: bool = True, **settings: Any) -> None:
        prefill, decode = self.workers["prefill"], self.workers["decode"]
        legs = [(decode, pb.LEG_COLOCATED, decode)]
        if split:
            legs = [(prefill, pb.LEG_PREFILL, decode), (decode, pb.LEG_DECODE, prefill)]
        given = {"seed": 3, "max_tokens": 400, "stop_token_ids": [EOS], "temperature": 1.0}
        choices = settings.pop("choices", [0])
        resumed = settings.pop("resumed", [])
        sampling = pb.SamplingParams(**{**given, **settings}, grammar=grammar)
        for worker, leg, peer in legs:
            worker.send(
                submit=pb.Submit(
                    request_id=name,
                    leg=leg,
                    peer=peer.peer() if split else None,
                    prompt_tokens=range(40, 90),
                    resumed_tokens=resumed,
                    choices=choices,
                    sampling=sampling,
                )
            )

    def wait(self, *names: str) -> None:
        """Until the legs that generate have ended."""
        end_s = time.monotonic() + DEADLINE_S
        while any(not self.over(name) for name in names):
            said = self.heard.get(timeout=max(0.0, end_s - time.monotonic()))
            if isinstance(said, pb.Output):
                for offset, token in enumerate(said.tokens):
                    self.tokens[said.request_id, said.choice][said.position + offset] = token
            else:
                self.ended[said.request_id].append(said)

    def over(self, name: str) -> bool:
        return any(end.reason != pb.LEG_END_HANDED_OFF for end in self.ended[name])

    def output(self, name: str, choice: int = 0) -> list[int]:
        assert not [e for e in self.ended[name] if e.failure], self.ended[name]
        tokens = self.tokens[name, choice]
        return [tokens[i] for i in range(len(tokens))]


@pytest.fixture
def placer(tiny: Deployment) -> Iterator[Placer]:
    found = Placer(tiny)
    yield found
    for worker in found.workers.values():
        worker.close()


def text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    assert tokens[-1] == EOS, "it was cut off"
    return str(tokenizer.decode(tokens[:-1]))


def test_split_and_colocated_answers_match(placer: Placer, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    schema = pb.Grammar(json_schema=json.dumps(SCHEMA))
    pattern = pb.Grammar(regex=r"[a-f]{6,12}-[0-9]{2}")
    for split in (True, False):
        placer.place(f"schema-{split}", schema, split)
        placer.place(f"pattern-{split}", pattern, split, choices=[0, 1, 2])
    placer.wait(*(f"{kind}-{split}" for kind in ("schema", "pattern") for split in (True, False)))
    answers = [placer.output(f"schema-{split}") for split in (True, False)]
    assert answers[0] == answers[1]
    jsonschema.validate(json.loads(text(tokenizer, answers[0])), SCHEMA)
    for choice in range(3):
        answers = [placer.output(f"pattern-{split}", choice) for split in (True, False)]
        assert answers[0] == answers[1]
        assert re.fullmatch(r"[a-f]{6,12}-[0-9]{2}", text(tokenizer, answers[0]))
    placer.place("again", schema, True, resumed=placer.output("schema-True")[:9])
    placer.wait("again")
    resumed = placer.tokens["again", 0]
    whole = placer.output("schema-True")
    assert [resumed[i] for i in range(9, 9 + len(resumed))] == whole[9:]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (pb.Grammar(regex="[a"), "regex is refused"),
        (pb.Grammar(json_schema='{"not": {"type": "string"}}'), "not"),
        (pb.Grammar(json_schema="{"), "json_schema is refused"),
        (pb.Grammar(lark="start: )"), "lark is refused"),
        (pb.Grammar(), "one version"),
    ],
)
def test_a_grammar_that_is_of_no_use_is_rejected(
    placer: Placer, grammar: pb.Grammar, words: str, split: bool
) -> None:
    placer.place("bad", grammar, split)
    placer.wait("bad")
    end = placer.ended["bad"][0]
    assert (end.reason, end.failure) == (pb.LEG_END_REJECTED, pb.FAILURE_CLIENT)
    assert words in end.message
    assert not placer.tokens


def test_a_model_divided_among_ranks(
    tiny_model: Path, deploy: Callable[[Options], Deployment]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    options = ("--tp", "2", "--kv-memory", "64000000")
    system = deploy(Options(tiny_model, mixed=1, worker=options))
    [worker] = system.workers.values()
    heard: queue.Queue[Any] = queue.Queue()
    stream = WorkerStream(f"127.0.0.1:{worker.port}", heard)
    sampling = pb.SamplingParams(max_tokens=40, stop_token_ids=[EOS])
    sampling.grammar.regex = "[a-f]{6,9}"
    stream.send(
        submit=pb.Submit(
            request_id="a", leg=pb.LEG_COLOCATED, prompt_tokens=range(40, 60), sampling=sampling
        )
    )
    tokens: list[int] = []
    while isinstance(said := heard.get(timeout=DEADLINE_S), pb.Output):
        tokens += said.tokens
    stream.close()
    assert said.reason == pb.LEG_END_FINISHED, said
    assert re.fullmatch("[a-f]{6,9}", text(tokenizer, tokens))
