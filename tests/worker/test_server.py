"""One router's stream: what it gets in a long or a large step, and what is left when it ends."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest

from tasuki.engine.api import LegEnd, LegEndReason, Output, StepResult, TokenLogprob
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server
from tasuki.worker import sessions as sessions_module
from tasuki.worker.loop import Closed, Command, Opened
from tasuki.worker.server import SERVER_OPTIONS, WorkerService
from tasuki.worker.sessions import Sessions


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


def scored(request_id: str, prompt_tokens: int) -> Output:
    """A first token with log-probabilities of its prompt, of about 30 bytes each."""
    entry = TokenLogprob(100_000, -1.0, 5, ((100_001, -1.0), (100_002, -2.0)))
    return Output(request_id, 0, 0, [5], prompt_logprobs=[entry] * prompt_tokens)


def test_log_probabilities_of_many_prompts_end_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 200_000
    monkeypatch.setattr(sessions_module, "_MOST_SCORES_BYTES", limit - 10_000)
    monkeypatch.setattr(sessions_module, "_SPLIT_BYTES", limit // 2)

    async def case() -> None:
        inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_WorkerServicer_to_server(WorkerService(inbox, lambda: False), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        options = [("grpc.max_receive_message_length", limit)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = WorkerStub(channel).Serve()
            session = (await asyncio.to_thread(inbox.get)).session
            sessions = Sessions()
            sessions.open(session)
            names = [f"scored{index}" for index in range(12)]
            for name in (*names, "large", "bystander"):
                assert sessions.bind(name, session)
            outputs = [scored(name, 1_500) for name in names]
            outputs[6:6] = [scored("large", 9_000)]
            outputs.append(Output("bystander", 0, 7, [1]))
            ended = [LegEnd(name, LegEndReason.FINISHED) for name in (*names, "large")]
            result = StepResult(outputs=outputs, ended=ended)
            assert sessions.publish(3, result, pb.Load(free_blocks=4)) == ["large"]
            assert sessions.requests == 1
            reports: list[pb.StepReport] = []
            while "scored11" not in [end.request_id for each in reports for end in each.ended]:
                reports.append((await call.read()).step)
            call.cancel()
        await server.stop(None)
        told = [output for report in reports for output in report.outputs]
        assert [output.request_id for output in told] == [*names, "bystander"]
        assert all(len(output.prompt_logprobs) == 1_500 for output in told[:-1])
        ends = [end for report in reports for end in report.ended]
        assert [end.request_id for end in ends] == ["large", *names]
        assert (ends[0].reason, ends[0].failure) == (pb.LEG_END_FAILED, pb.FAILURE_CLIENT)
        assert "may have 190000: ask for fewer logprobs" in ends[0].message
        assert [report.load.free_blocks for report in reports] == [4] + [0] * (len(reports) - 1)
        assert {report.step for report in reports} == {3}

    run(case)
