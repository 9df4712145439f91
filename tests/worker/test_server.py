"""One router's stream: what it gets in a long step, and what is left when it ends."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.loop import Closed, Command, Opened
from tasuki.worker.server import WorkerService


class PlainContext:
    """Of a call over a connection without certificates, as gRPC describes it."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [b"insecure"]}


PLAIN: Any = PlainContext()


def run(case: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(case(), timeout=20))


async def silent(until: asyncio.Event) -> AsyncIterator[pb.RouterMessage]:
    """A router that sends nothing."""
    await until.wait()
    return
    yield


def opened(inbox: queue.SimpleQueue[Command]) -> Opened:
    command = inbox.get_nowait()
    assert isinstance(command, Opened)
    return command


def test_a_long_step_is_not_silence_but_a_hung_one_is() -> None:
    late = False

    async def case() -> None:
        nonlocal late
        inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        stream = WorkerService(inbox, lambda: late, quiet_s=0.02).Serve(
            silent(asyncio.Event()), PLAIN
        )
        first = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait({first}, timeout=0.2)
        assert not done, "the worker's information comes first"
        session = opened(inbox).session
        session.send(pb.WorkerMessage(info=pb.WorkerInfo(engine_id="e")))
        assert (await first).info.engine_id == "e"
        for _ in range(3):
            assert (await anext(stream)).WhichOneof("message") == "step"
        session.send(pb.WorkerMessage(step=pb.StepReport(step=7)))
        while (await anext(stream)).step.step != 7:
            pass
        late = True  # longer than such a step should take: silence, for routers to notice
        silence = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait({silence}, timeout=0.2)
        assert not done
        late = False
        assert (await silence).WhichOneof("message") == "step"
        await stream.aclose()

    run(case)


def test_a_stream_that_ends_leaves_no_task() -> None:
    async def case() -> None:
        inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        hang_up, before = asyncio.Event(), asyncio.all_tasks()
        for cut in (False, True):
            stream = WorkerService(inbox, lambda: False).Serve(silent(hang_up), PLAIN)
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            session = opened(inbox).session
            if cut:
                reading.cancel()
            else:
                hang_up.set()
            await asyncio.wait({reading})
            await stream.aclose()
            closed = inbox.get_nowait()
            assert isinstance(closed, Closed) and closed.session is session
            for _ in range(5):
                await asyncio.sleep(0)
            assert asyncio.all_tasks() == before

    run(case)
