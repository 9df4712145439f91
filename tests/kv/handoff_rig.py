"""Workers in one process: real engines and real handoffs over real streams.

The engine's model is the hash model of tests/engine (wrong KV gives wrong
tokens); bytes are moved by a transport that copies within the process, and
that a test can hold back or break. Tests drive every engine thread by hand,
with `pump`. The model is rank 0's; further ranks have a transfer thread, and a
pool of a head that no model writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_fakes import VOCAB, HashModel, NoAttention, expected, spec

from tasuki.engine.api import Leg, LegEnd, LegEndReason, Output, RequestSpec
from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.isolation import Flight
from tasuki.engine.plan import StepPlan
from tasuki.execution.runner import ModelRunner
from tasuki.kv.clock import now_s
from tasuki.kv.config import HandoffConfig
from tasuki.kv.handoff import Handoffs
from tasuki.kv.layout import CacheLayout
from tasuki.kv.rank_channel import KvRank
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import TransportError
from tasuki.v1 import kv_pb2
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server

__all__ = ["VOCAB", "Leg", "LegEndReason", "Rig", "Worker", "expected", "spec"]

DEADLINE_S = 60.0
IDENTITY = bytes(range(16))
LENGTH = 64  # max_model_len of the engines

_POOLS: dict[str, torch.Tensor] = {}  # what is reachable, by metadata


class CopyTransport:
    """Copies between pools of this process; `hold` and `dead` make it misbehave.

    Attributes:
        before_read: called with the source's pool before a run of it is read.
        torn: how many units at a run's end are reported as read and are not.
        after_read: called with our pool after a run was read.
    """

    max_inflight_bytes = 1 << 20
    name = "copy"

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.posted = 0
        self.metadata = b""
        self.layout = kv_pb2.Layout()
        self._sources: dict[str, tuple[str, TransferPlan]] = {}
        self.pool = torch.empty(0)
        self.before_read: Callable[[torch.Tensor, Run], None] = lambda pool, run: None
        self.torn: Callable[[Run], int] = lambda run: 0
        self.after_read: Callable[[torch.Tensor, Run], None] = lambda pool, run: None

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        self.pool = pool
        self.metadata = uuid.uuid4().bytes
        self.layout = layout.to_wire(pool, transport=self.name)
        _POOLS[self.metadata.hex()] = pool

    def die(self) -> None:
        """As a process that is gone."""
        del _POOLS[self.metadata.hex()]

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        return True

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> None:
        self._sources[peer] = (metadata.hex(), plan)

    def disconnect(self, peer: str) -> None:
        self._sources.pop(peer, None)

    def post(self, peer: str, runs: Sequence[Run]) -> CopyTransfer:
        self.posted += 1
        return CopyTransfer(self, *self._sources[peer], list(runs))

    def close(self) -> None:
        pass


class CopyTransfer:
    def __init__(
        self, transport: CopyTransport, source: str, plan: TransferPlan, runs: list[Run]
    ) -> None:
        self._transport = transport
        self._source = source
        self._plan = plan
        self._runs = runs

    def done(self) -> bool:
        pool = _POOLS.get(self._source)
        if pool is None:
            raise TransportError("remote disconnect")
        if self._transport.hold.is_set():
            return False
        tokens = self._plan.unit_tokens  # of a run; where sizes are equal it is a block
        for run in self._runs:
            self._transport.before_read(pool, run)
            for index in range(run.count - self._transport.torn(run)):
                theirs = self._unit(pool, run.remote + index, tokens)
                self._unit(self._transport.pool, run.local + index, tokens).copy_(theirs)
            self._transport.after_read(self._transport.pool, run)
        return True

    @staticmethod
    def _unit(pool: torch.Tensor, unit: int, tokens: int) -> torch.Tensor:
        block, at = divmod(unit * tokens, pool.shape[-2])
        return pool[block, ..., at : at + tokens, :]


class Rank:
    """A rank from 1 on: its transport, the KV side, and rank 0's end of the pipe to it."""

    def __init__(self, layout: CacheLayout) -> None:
        self.transport = CopyTransport()
        self.transport.register(layout.allocate(), layout)
        self.connection: Connection
        self.connection, theirs = Pipe()
        self.kv = KvRank(self.transport, theirs)

    def die(self) -> None:
        """Its transfer thread ends."""
        self.kv._puller.stop()


@dataclass
class Worker:
    """One engine with its handoffs."""

    engine: Engine
    handoffs: Handoffs
    transport: CopyTransport
    engine_id: str
    server: grpc.aio.Server
    endpoint: str
    layout: CacheLayout
    ranks: list[Rank] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    ended: dict[str, LegEnd] = field(default_factory=dict)
    frozen: bool = False  # its engine thread is in a step; the loop's thread goes on

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        """The whole process stands still, but for what others may read of its memory."""
        self.frozen = True
        with self.handoffs._lock:
            yield
        self.frozen = False

    def long_steps(self, rig: Rig, seconds: float) -> list[int]:
        """From now on its steps take so long; the others go on meanwhile.

        Returns:
            Blocks leased by the prefill workers at the end of each step.
        """
        launch, leased = self.engine._runner.launch, []

        def launch_long(plan: StepPlan, now_s: float) -> Flight:
            self.frozen = True
            end_s = time.monotonic() + seconds
            rig.pump(lambda: time.monotonic() >= end_s)
            self.frozen = False
            leased.append(sum(worker.handoffs.leased_blocks for worker in rig.workers))
            return launch(plan, now_s)

        self.engine._runner.launch = launch_long  # type: ignore[method-assign]
        return leased

    def submit(self, request: RequestSpec, leg: Leg, peer: Worker) -> None:
        split = replace(request, leg=leg)
        self.engine.submit(split)
        self.handoffs.submit(split, peer.engine_id, peer.endpoint)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.handoffs.abort(request_id)

    def turn(self) -> None:
        """What the engine thread does in one turn."""
        if self.frozen:
            return
        self.handoffs.poll(now_s())
        if self.engine.has_work():
            result = self.engine.step()
            self.engine.check()
            self.handoffs.on_step(result)
            for output in result.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            for end in result.ended:
                self.ended[end.request_id] = end

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [
            token
            for output in self.outputs.get(request_id, [])
            if output.choice == choice
            for token in output.tokens
        ]


class Rig:
    """Workers and the loop that their streams run in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._woken = threading.Event()
        self.workers: list[Worker] = []

    def worker(
        self,
        *,
        lease_s: float = 10.0,
        identity: bytes = IDENTITY,
        port: int = 0,
        block_size: int = 4,
        ranks: int = 1,
        digest_one_in: int = 0,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        **settings: int | bool,
    ) -> Worker:
        values: dict[str, int | bool] = {
            "num_blocks": 64,
            "max_model_len": LENGTH,
            "max_batched_tokens": 8,
            "vocab_size": VOCAB,
        }
        config = EngineConfig(block_size=block_size, groups=tuple(groups), **(values | settings))  # type: ignore[arg-type]
        layout = CacheLayout(
            num_blocks=config.num_blocks,
            kv_heads=1,
            layers=1,
            block_size=block_size,
            head_dim=2,
            dtype=torch.float32,
            groups=tuple(groups),
        )
        pool = layout.allocate()
        model = HashModel(pool, groups=groups)
        attention: Any = NoAttention(pool, groups)
        engine = Engine(config, ModelRunner(model, attention, pool, groups=len(groups)))
        transport = CopyTransport()
        transport.register(pool, layout)
        others = [Rank(replace(layout, first_kv_head=rank)) for rank in range(1, ranks)]
        engine_id = uuid.uuid4().hex
        handoffs = Handoffs(
            host=engine,
            config=HandoffConfig(lease_s=lease_s, digest_one_in=digest_one_in),
            transport=transport,
            layout=layout,
            identity=identity,
            engine_id=engine_id,
            loop=self.loop,
            wake=self._woken.set,
            ranks=[rank.connection for rank in others],
        )
        engine.on_started = handoffs.on_started
        server, bound = self._run(self._serve(handoffs, port))
        worker = Worker(
            engine, handoffs, transport, engine_id, server, f"127.0.0.1:{bound}", layout, others
        )
        self.workers.append(worker)
        return worker

    async def _serve(self, handoffs: Handoffs, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        add_KvServicer_to_server(handoffs.servicer, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, bound

    def _run(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def place(self, request: RequestSpec, prefill: Worker, decode: Worker) -> None:
        prefill.submit(request, Leg.PREFILL, decode)
        decode.submit(request, Leg.DECODE, prefill)

    def kill(self, worker: Worker) -> None:
        """The process is gone: its streams break, its memory cannot be read."""
        worker.frozen = True
        worker.transport.die()
        self.stop_server(worker)
        self.workers.remove(worker)
        worker.handoffs.close()

    def stop_server(self, worker: Worker) -> None:
        self._run(worker.server.stop(0))

    def pump(self, until: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Let every engine thread take turns until something is so."""
        end_s = time.monotonic() + deadline_s
        while not until():
            assert time.monotonic() < end_s, "deadline"
            self._woken.clear()
            for worker in self.workers:
                worker.turn()
            if not any(w.engine.has_work() for w in self.workers if not w.frozen):
                self._woken.wait(0.005)

    def pump_until_idle(self, deadline_s: float = DEADLINE_S) -> None:
        """Until no worker keeps anything of any request; then check the accounts."""
        live = [w for w in self.workers if not w.frozen]
        self.pump(
            lambda: all(
                w.handoffs.idle and not w.engine.has_work() and w.engine.referenced_blocks == 0
                for w in live
            ),
            deadline_s,
        )
        for worker in live:
            worker.engine.check()
            load = worker.engine.load()
            assert load.quarantined_blocks == 0
            assert worker.handoffs.leased_blocks == 0

    def close(self) -> None:
        for worker in self.workers:
            for rank in worker.ranks:
                rank.die()
            worker.handoffs.close()
            self.stop_server(worker)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)


def prompt(length: int, start: int = 1) -> list[int]:
    """Tokens that differ by `start`."""
    return [(start * 5 + 7 * i) % 40 for i in range(length)]


def assert_decoded(request: RequestSpec, prefill: Worker, decode: Worker) -> None:
    """The tokens are the model's, the first of them from both workers, and both legs ended well."""
    for choice in request.choices:
        tokens, _ = expected(request, choice, LENGTH)
        assert decode.tokens(request.request_id, choice) == tokens
        assert prefill.tokens(request.request_id, choice) == tokens[:1]
    assert prefill.ended[request.request_id].reason is LegEndReason.HANDED_OFF
    assert decode.ended[request.request_id].reason is LegEndReason.FINISHED
