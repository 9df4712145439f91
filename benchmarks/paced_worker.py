"""A worker whose device is a clock: the real process around steps that only take their time.

Server, engine thread, engine, handoff, transfer thread and NIXL are the product's. In place of a
model, a launch keeps the interpreter busy for as long as a real one does (`--launch-ms`), and the
step is over when a GPU would be done with it, which takes nothing from the host. So a machine
without a GPU shows how the threads of a worker get in one another's way on a machine that has one.

Each part of a request's way from prefill's end on is written down with its time
(`notice_path.py` reads it): the clock is that of the handoff, one for all processes here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasuki.engine.api import Leg
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar import GrammarCompiler
from tasuki.engine.grammar_masks import StepMasks
from tasuki.engine.plan import Draw, StepOutcome, StepPlan
from tasuki.execution.inputs import wanted_logits
from tasuki.kv.clock import now_s
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.handoff import Handoffs
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.layout import CacheLayout
from tasuki.kv.link import FromPrefillEngine
from tasuki.kv.transport import create_transport
from tasuki.v1 import kv_pb2
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.build import Built
from tasuki.worker.config import WorkerConfig
from tasuki.worker.convert import role_at_start
from tasuki.worker.failures import Failures
from tasuki.worker.grammar_pool import GrammarPool
from tasuki.worker.main import _serve, configure_logging
from tasuki.worker.startup import Phases

BLOCK_TOKENS = 32
_TOKEN = 300  # a word, not a special token: clients see it

Note = Callable[[str, str, float], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step takes: of the host at its launch, and of the device.

    `on_host`: the device is the host, and the engine thread is in the step until its end.
    """

    launch_s: float
    step_s: float
    sequence_s: float
    kv_token_s: float
    token_s: float
    square_s: float
    on_host: bool

    def device_s(self, plan: StepPlan) -> float:
        """Decodes take a step, and more for each and for what it attends to; prompts add theirs."""
        decode_s = plan.num_decodes * self.sequence_s + plan.kv_tokens * self.kv_token_s
        prompt_s = plan.prefill_tokens * self.token_s + plan.prefill_squares * self.square_s
        return (self.step_s + decode_s if plan.num_decodes else 0.0) + prompt_s


@dataclass(frozen=True, slots=True)
class Size:
    """What the worker takes: KV blocks, tokens of a request, token ids, and how long steps are."""

    blocks: int
    model_len: int
    vocabulary: int
    itl_target_s: float | None


@dataclass(slots=True)
class _Launched:
    draws: list[Draw]
    ends_s: float
    constrained: Sequence[int] = ()  # it reads no masks


class PacedRunner:
    """A `Runner` that computes nothing, at the pace of a GPU."""

    def __init__(self, pace: Pace, note: Note) -> None:
        self._pace = pace
        self._note = note
        self._free_s = 0.0

    def launch(self, plan: StepPlan) -> _Launched:
        """Keep the interpreter busy, then let the device have it."""
        started_s = now_s()
        _spin(self._pace.launch_s)
        ends_s = max(now_s(), self._free_s) + self._pace.device_s(plan)
        if self._pace.on_host:
            time.sleep(max(0.0, ends_s - now_s()))
        self._free_s = ends_s
        wanted = wanted_logits(plan)
        for index, draw in enumerate(wanted.draws):
            draw.sequence.drawn = index
            name = draw.sequence.request.request_id
            if draw.sequence.request.leg is Leg.PREFILL:
                self._note(name, "computed", ends_s)
            elif draw.position == 1:
                self._note(name, "planned", started_s)
                self._note(name, "second", ends_s)
        return _Launched(wanted.draws, ends_s)

    def landed(self, launched: _Launched) -> bool:
        """Whether the device is done."""
        return now_s() >= launched.ends_s

    def collect(self, launched: _Launched) -> StepOutcome:
        """Wait for the device; the same token for all."""
        time.sleep(max(0.0, launched.ends_s - now_s()))
        for draw in launched.draws:
            if draw.sequence.request.leg is Leg.PREFILL:
                self._note(draw.sequence.request.request_id, "collected", now_s())
        return StepOutcome(launched.draws, [_TOKEN] * len(launched.draws))

    def sample(self, launched: _Launched, masks: StepMasks) -> None:
        """Never called."""

    def scrub(self, blocks: list[int]) -> None:
        """Nothing was written."""


def _spin(for_s: float) -> None:
    """Use the interpreter for so long, by this thread's own time."""
    until_s = time.thread_time() + for_s
    while time.thread_time() < until_s:
        sum(range(50))


def observe(note: Note) -> None:
    """Write down what the handoff does, where it does it."""
    _before(Handoffs, "_put", lambda _, event: _on_event(note, event))
    _before(DecodeSide, "on_message", lambda _, peer, message, *times: _on_message(note, message))
    _before(Engine, "start_decode", lambda _, name, *rest: note(name, "usable", now_s()))


def _before(owner: type, name: str, look: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def observed(*args: Any, **options: Any) -> Any:
        look(*args)
        return original(*args, **options)

    setattr(owner, name, observed)


def _on_event(note: Note, event: object) -> None:
    if isinstance(event, FromPrefillEngine):
        for message in _parts(event.message):
            if message.HasField("prefilled"):
                note(message.prefilled.request_id, "received", now_s())


def _on_message(note: Note, message: kv_pb2.FromPrefill) -> None:
    for part in _parts(message):
        if part.HasField("prefilled"):
            note(part.prefilled.request_id, "known", now_s())


def _parts(message: kv_pb2.FromPrefill) -> list[kv_pb2.FromPrefill]:
    return list(message.batch.messages) if message.WhichOneof("message") == "batch" else [message]


def make(role: str, pace: Pace, size: Size, note: Note) -> Built:
    """What `worker/build.py` makes, around the clock."""
    transport = create_transport("nixl")
    layout = CacheLayout(size.blocks, 1, 1, BLOCK_TOKENS, 32, torch.float32)
    pool = layout.allocate()
    transport.register(pool, layout)
    config = EngineConfig(
        num_blocks=layout.num_blocks,
        max_model_len=size.model_len,
        vocab_size=size.vocabulary,
        block_size=BLOCK_TOKENS,
        max_batched_tokens=2_048,
        max_running_requests=256,
        prefix_caching=False,
        itl_target_s=size.itl_target_s,
        overlap=not pace.on_host,
    )
    identity = bytes(16)
    info = pb.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=uuid.uuid4().hex,
        role=role_at_start(role),
        identity=identity,
        model="clock",
        vocab_size=size.vocabulary,
        max_model_len=size.model_len,
        block_size=BLOCK_TOKENS,
        num_blocks=size.blocks,
        device="clock",
        tensor_parallel_size=1,
    )
    engine = Engine(config, PacedRunner(pace, note))
    grammars = GrammarPool(GrammarCompiler(Path(), size.vocabulary, [0]))  # requests have none
    return Built(engine, transport, layout, identity, info, grammars, None)


def main() -> None:
    """Serve until told to end, then write down what was noted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["prefill", "decode", "mixed"])
    parser.add_argument("notes", type=Path)
    for name in ("launch-ms", "step-ms", "token-us"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("sequence-us", "kv-token-ns", "square-ns"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument("--blocks", type=int, default=4_096)
    parser.add_argument("--max-model-len", type=int, default=2_048)
    parser.add_argument("--vocabulary", type=int, default=1_000)
    parser.add_argument("--itl-target-ms", type=float, help="default: steps have no time bound")
    options = parser.parse_args()
    notes: list[tuple[str, str, float]] = []
    pace = Pace(
        launch_s=options.launch_ms / 1e3,
        step_s=options.step_ms / 1e3,
        sequence_s=options.sequence_us / 1e6,
        kv_token_s=options.kv_token_ns / 1e9,
        token_s=options.token_us / 1e6,
        square_s=options.square_ns / 1e9,
        on_host=options.on_host,
    )
    target_ms = options.itl_target_ms
    size = Size(
        blocks=options.blocks,
        model_len=options.max_model_len,
        vocabulary=options.vocabulary,
        itl_target_s=target_ms / 1e3 if target_ms else None,
    )

    def note(request_id: str, what: str, at_s: float) -> None:
        notes.append((request_id, what, at_s))

    observe(note)
    config = WorkerConfig(model=Path(), name=options.role, role=options.role)
    configure_logging(config)
    built = make(options.role, pace, size, note)
    phases = Phases(time.monotonic())
    code = asyncio.run(_serve(config, built, phases, Failures()))
    options.notes.write_text(json.dumps(notes))
    sys.exit(code)


if __name__ == "__main__":
    main()
