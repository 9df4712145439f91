"""A whole worker in this process, and an honest router that sends it requests.

All parts are real but for the model (the hash model of tests/engine: wrong KV gives wrong
tokens) and the transport, which copies between pools of this process: both gRPC services on
a port, the engine thread, the transfer thread. What would end the worker's process is kept
in `failures`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

sys.path += [str(Path(__file__).parents[1] / "kv"), str(Path(__file__).parents[1] / "engine")]
from engine_fakes import VOCAB, HashModel, NoAttention
from handoff_rig import IDENTITY, CopyTransport, expected, spec

from tasuki.background import FAILED_TASK
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.grammar import GrammarCompiler
from tasuki.execution.runner import ModelRunner
from tasuki.kv.config import HandoffConfig
from tasuki.kv.handoff import Handoffs
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.layout import CacheLayout
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.v1.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server
from tasuki.worker.convert import role_at_start
from tasuki.worker.grammar_pool import GrammarPool
from tasuki.worker.loop import Command, EngineLoop, Stop, Wake
from tasuki.worker.server import SERVER_OPTIONS, WorkerService
from tasuki.worker.watchdog import Watchdog

__all__ = ["IDENTITY", "VOCAB", "Leg", "Router", "WholeWorker", "expected", "spec", "submit"]

BLOCK_SIZE = 4
LEASE_S = 2.0
DEADLINE_S = 30.0


class WholeWorker:
    """One worker; `start` and `stop` it in a running loop."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=256,
            max_model_len=64,
            max_batched_tokens=16,
            vocab_size=VOCAB,
        )
        layout = CacheLayout(config.num_blocks, 1, 1, BLOCK_SIZE, 2, torch.float32)
        pool = layout.allocate()
        model: Any = HashModel(pool)
        attention: Any = NoAttention()
        self.engine = Engine(config, ModelRunner(model, attention, pool))
        transport = CopyTransport()
        transport.register(pool, layout)
        self.engine_id = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.handoffs = Handoffs(
            host=self.engine,
            config=HandoffConfig(lease_s=LEASE_S),
            transport=transport,
            layout=layout,
            identity=IDENTITY,
            engine_id=self.engine_id,
            loop=self._loop,
            wake=lambda: self._inbox.put(Wake()),
        )
        info = pb.WorkerInfo(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            role=role_at_start("mixed"),
        )
        watchdog = Watchdog(lambda: 30.0, self.failures.append)
        self._thread = EngineLoop(
            self.engine,
            self.handoffs,
            info,
            self._inbox,
            self.failures.append,
            watchdog,
            GrammarPool(GrammarCompiler(Path("no-tokenizer"), VOCAB, ()), threads=1),
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        service = WorkerService(self._inbox, lambda: False)
        add_WorkerServicer_to_server(service, self._server)
        add_KvServicer_to_server(self.handoffs.servicer, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        self._thread.start()
        await self._server.start()

    def put(self, command: Command) -> None:
        """Give the engine thread a command."""
        self._inbox.put(command)

    async def stop(self) -> None:
        """End it, then compare the block accounts."""
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, DEADLINE_S)
        await self._server.stop(0)
        self.handoffs.close()
        self.engine.check()

    @property
    def idle(self) -> bool:
        """Whether no leg is here and no block is held, leased or in quarantine."""
        load = self.engine.load()
        return not (
            self.engine.has_work()
            or self.engine.referenced_blocks
            or load.quarantined_blocks
            or load.waiting_requests
            or self.handoffs.leased_blocks
        )

    async def until_idle(self) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not self.idle:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            held = f"{self.engine.referenced_blocks} blocks are held"
            raise AssertionError(f"{held}; {self.engine.load()}; {self.left()}") from None

    def left(self) -> str:
        """What is still here, for people."""
        legs = self.engine._legs.requests.values()
        return ", ".join(f"{leg.request_id} ({leg.leg.value}, {leg.phase.value})" for leg in legs)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") == FAILED_TASK:
            self.failures.append(context["exception"])
        else:
            loop.default_exception_handler(context)


@dataclass
class Leg:
    """What an honest router hears of one leg."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: asyncio.Future[pb.LegEnd] = field(default_factory=asyncio.Future)

    async def end(self) -> pb.LegEnd:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.shield(self.ended)


class Router:
    """An honest router's stream to one worker."""

    def __init__(self, worker: WholeWorker) -> None:
        self.legs: dict[str, Leg] = {}
        self.draining = False
        self._channel = grpc.aio.insecure_channel(worker.endpoint)
        stub: Any = WorkerStub(self._channel)
        self._call = stub.Serve()
        self._reader = asyncio.ensure_future(self._read())
        self._writing = asyncio.Lock()

    async def send(self, message: pb.RouterMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def submit(self, submit: pb.Submit) -> Leg:
        leg = self.legs[submit.request_id] = Leg()
        await self.send(pb.RouterMessage(submit=submit))
        return leg

    async def abort(self, request_id: str) -> None:
        await self.send(pb.RouterMessage(abort=pb.Abort(request_id=request_id)))

    async def close(self) -> None:
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        async for message in self._call:
            if message.step.HasField("load"):
                self.draining = message.step.load.draining
            for output in message.step.outputs:
                if leg := self.legs.get(output.request_id):
                    leg.tokens.setdefault(output.choice, []).extend(output.tokens)
            for ended in message.step.ended:
                leg = self.legs.get(ended.request_id)
                if leg is not None and not leg.ended.done():
                    leg.ended.set_result(ended)


def submit(
    request_id: str,
    prompt: list[int],
    *,
    leg: int = pb.LEG_COLOCATED,
    peer: pb.Peer | None = None,
    max_tokens: int = 4,
) -> pb.Submit:
    """A plain greedy request."""
    sampling = pb.SamplingParams(seed=7, max_tokens=max_tokens)
    return pb.Submit(
        request_id=request_id, leg=leg, peer=peer, prompt_tokens=prompt, sampling=sampling
    )
