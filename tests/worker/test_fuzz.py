"""Hostile routers and peers: whole workers survive any message, and others' requests finish.

Three targets: what a router sends, what a decode worker sends, what a prefill worker sends.
Cases are valid conversations, changed by `support.messages`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from random import Random
from typing import Any

import grpc
import pytest
from support import searches
from support.messages import batches, changed
from whole_worker import (
    DEADLINE_S,
    IDENTITY,
    VOCAB,
    Router,
    WholeWorker,
    expected,
    spec,
    submit,
)

from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.wire import parts_of
from tasuki.v1 import kv_pb2
from tasuki.v1 import worker_pb2 as pb

pytestmark = [pytest.mark.search, pytest.mark.slow]

PROMPT = [5, 9, 2, 40, 7, 7, 31, 3, 18]
AT_ONCE = 32
LARGE = [("grpc.max_receive_message_length", 64 << 20)]  # as workers have it
CASE_S = 0.3  # how long a hostile party keeps its stream, at most
PLAIN = 0  # the seed of a prefill worker that is not hostile: it must be understood
REGRESSIONS: Sequence[int] = (PLAIN,)


class System:
    """Two whole workers and an honest router of each."""

    def __init__(self) -> None:
        self.prefill, self.decode = WholeWorker(), WholeWorker()
        self.workers = (self.prefill, self.decode)
        self._numbers = itertools.count()

    async def __aenter__(self) -> System:
        for worker in self.workers:
            await worker.start()
        self.to_prefill, self.to_decode = (Router(worker) for worker in self.workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        for router in (self.to_prefill, self.to_decode):
            await router.close()
        for worker in self.workers:
            await worker.stop()

    async def serve_honest_requests(self) -> None:
        """A request of each kind has the tokens of the model."""
        name = f"honest-{next(self._numbers)}"
        prompt = [sum(name.encode()) % VOCAB, *PROMPT]
        there = pb.Peer(engine_id=self.decode.engine_id, kv_endpoint=self.decode.endpoint)
        here = pb.Peer(engine_id=self.prefill.engine_id, kv_endpoint=self.prefill.endpoint)
        alone = await self.to_prefill.submit(submit(f"{name}.alone", prompt))
        first = await self.to_prefill.submit(
            submit(f"{name}.split", prompt, leg=pb.LEG_PREFILL, peer=there)
        )
        rest = await self.to_decode.submit(
            submit(f"{name}.split", prompt, leg=pb.LEG_DECODE, peer=here)
        )
        tokens, _ = expected(spec(name, prompt, max_tokens=4), 0, 64)
        ends = [await leg.end() for leg in (alone, first, rest)]
        reasons = [end.reason for end in ends]
        wanted = [pb.LEG_END_FINISHED, pb.LEG_END_HANDED_OFF, pb.LEG_END_FINISHED]
        assert reasons == wanted, [end.message for end in ends]
        assert alone.tokens[0] == rest.tokens[0] == tokens

    async def check(self) -> None:
        """After the hostile ones are gone."""
        await self.serve_honest_requests()
        for worker in self.workers:
            await worker.until_idle()

    async def watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work, for as long as nothing happens that would end a worker."""
        task = asyncio.ensure_future(work)
        async with asyncio.timeout(2 * DEADLINE_S):
            while not task.done():
                await asyncio.wait({task}, timeout=0.05)
                if failures := [error for worker in self.workers for error in worker.failures]:
                    task.cancel()
                    raise AssertionError("a worker would end") from failures[0]
        await task


Case = Callable[[System, int], Coroutine[Any, Any, None]]


def fuzz(case: Case, default: int) -> None:
    """Run cases, some at a time beside honest requests; each batch must leave nothing behind."""

    async def run() -> None:
        cases = 0
        async with System() as system:
            await system.check()
            drawn = batches(AT_ONCE, default)
            for seeds in itertools.chain([REGRESSIONS], drawn):
                try:
                    await system.watched(batch(system, seeds))
                except Exception as error:
                    error.add_note(
                        f"seeds {list(seeds)}; one alone: {searches.SEED_VARIABLE}=SEED"
                        f" {searches.COUNT_VARIABLE}=1 (to test it always: REGRESSIONS)"
                    )
                    raise
                cases += len(seeds)
        print(f"{case.__name__}: {cases} cases")

    async def batch(system: System, seeds: Sequence[int]) -> None:
        honest = system.serve_honest_requests()
        await asyncio.gather(honest, *(case(system, seed) for seed in seeds))
        await system.check()

    asyncio.run(run())


def check_end(ended: pb.LegEnd) -> None:
    """A leg that is refused or fails says why."""
    assert ended.reason != pb.LEG_END_UNSPECIFIED
    if ended.reason in (pb.LEG_END_REJECTED, pb.LEG_END_FAILED, pb.LEG_END_KV_LOST):
        assert len(ended.message) > 10, ended


async def check_status(call: Any) -> None:
    """A stream that the worker ended because of a message says which."""
    if call.done() and not call.cancelled():
        code, details = await call.code(), await call.details()
        if details == "Internal error from Core":  # of our own end: it wrote after the worker's end
            return
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (code, details)
        assert code is grpc.StatusCode.OK or len(details) > 10


def router_messages(name: str, system: System) -> list[pb.RouterMessage]:
    """A conversation of a router: every kind of message."""
    peer = pb.Peer(engine_id=system.decode.engine_id, kv_endpoint=system.decode.endpoint)
    rich = submit(f"{name}.rich", PROMPT, max_tokens=6)
    rich.choices.extend([0, 1])
    rich.tenant = "tenant"
    rich.number = 1
    rich.sampling.MergeFrom(
        pb.SamplingParams(
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={3: 1.5},
            stop_token_ids=[1],
            min_tokens=2,
            logprobs=2,
            prompt_logprobs=1,
        )
    )
    resumed = submit(f"{name}.resumed", PROMPT)
    resumed.resumed_tokens.extend([4, 5])
    split = submit(f"{name}.split", PROMPT, leg=pb.LEG_PREFILL, peer=peer)
    decode = submit(f"{name}.decode", PROMPT, leg=pb.LEG_DECODE, peer=peer)
    return [
        *(pb.RouterMessage(submit=each) for each in (rich, resumed, split, decode)),
        pb.RouterMessage(retarget=pb.Retarget(request_id=f"{name}.split", peer=peer)),
        pb.RouterMessage(abort=pb.Abort(request_id=f"{name}.rich", choices=[1])),
        pb.RouterMessage(set_role=pb.RoleSetting(role=pb.ROLE_MIXED, owner="o", epoch=1)),
        pb.RouterMessage(resync_kv=pb.KvResync()),
        pb.RouterMessage(flush_cache=pb.FlushCache()),
    ]


async def hostile_router(system: System, seed: int) -> None:
    random = Random(seed)
    valid = router_messages(f"hostile-{seed}", system)
    names = [*system.to_prefill.legs][-2:]
    words = [*names, f"hostile-{seed}.rich", system.decode.engine_id]
    sent = [
        changed(message, random, words) if random.random() < 0.5 else message.SerializeToString()
        for message in random.choices(valid, k=random.randint(1, 8))
    ]
    async with grpc.aio.insecure_channel(system.prefill.endpoint, LARGE) as channel:
        serve = channel.stream_stream(
            "/tasuki.v1.Worker/Serve", response_deserializer=pb.WorkerMessage.FromString
        )
        call = serve()
        try:
            for data in sent:
                await call.write(data)
            async with asyncio.timeout(CASE_S * random.random()):
                async for message in call:
                    assert not message.HasField("info") or message.info.role.role in (1, 2, 3)
                    for output in message.step.outputs:
                        assert all(token < VOCAB for token in output.tokens)
                    for ended in message.step.ended:
                        check_end(ended)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        await check_status(call)
        call.cancel()


def test_routers_of_any_kind_harm_no_other() -> None:
    fuzz(hostile_router, 64)


async def hostile_decode_worker(system: System, seed: int) -> None:
    random = Random(seed)
    name, engine = f"pulled-{seed}", f"hostile-{seed}"
    leg = await system.to_prefill.submit(
        submit(name, PROMPT, leg=pb.LEG_PREFILL, peer=pb.Peer(engine_id=engine))
    )
    hello = kv_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        identity=IDENTITY,
        engine_id=engine,
        expected_engine_id=system.prefill.engine_id,
    )
    renewal = kv_pb2.Renewal(request_id=name, scheduled=True, announced_tokens=4)
    want = kv_pb2.FromDecode(want=kv_pb2.Want(request_id=name, seq=1))
    renew = kv_pb2.FromDecode(renew=kv_pb2.Renew(seq=2, renewals=[renewal]))
    release = kv_pb2.FromDecode(release=kv_pb2.Release(request_ids=[name]))
    batch = kv_pb2.FromDecode(batch=kv_pb2.FromDecodeBatch(messages=[want, renew, release]))
    valid = [kv_pb2.FromDecode(hello=hello), want, renew, batch, release]
    words = [name, "", engine, *[*system.to_prefill.legs][-3:]]
    sent = [
        changed(message, random, words)
        if random.random() < (0.5 if at else 0.1)
        else message.SerializeToString()
        for at, message in enumerate(valid)
    ]
    async with grpc.aio.insecure_channel(system.prefill.endpoint, LARGE) as channel:
        handoff = channel.stream_stream(
            "/tasuki.v1.Kv/Handoff", response_deserializer=kv_pb2.FromPrefill.FromString
        )
        call = handoff()
        try:
            for data in sent:
                await call.write(data)
            async with asyncio.timeout(CASE_S * random.random()):
                async for _ in call:
                    pass
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        await check_status(call)
        call.cancel()
    await system.to_prefill.abort(name)
    check_end(await leg.end())


def test_decode_workers_of_any_kind_harm_no_other() -> None:
    fuzz(hostile_decode_worker, 64)


class HostilePrefillWorkers:
    """A server of any number of prefill workers, each with its script by engine id."""

    def __init__(self) -> None:
        self.scripts: dict[str, tuple[bytes, Callable[[int], list[bytes]]]] = {}
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._handoff, request_deserializer=kv_pb2.FromDecode.FromString
        )
        handlers = grpc.method_handlers_generic_handler("tasuki.v1.Kv", {"Handoff": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> HostilePrefillWorkers:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def _handoff(
        self, messages: AsyncIterator[kv_pb2.FromDecode], _: Any
    ) -> AsyncIterator[bytes]:
        first = await anext(aiter(messages), None)
        if first is None:
            return
        hello, script = self.scripts[first.hello.expected_engine_id]
        yield hello
        async for message in messages:
            for part in parts_of(message):
                if part.HasField("want"):
                    for data in script(part.want.seq):
                        yield data


def prefill_messages(
    name: str, tokens: int, blocks: Sequence[int], seq: int
) -> list[kv_pb2.FromPrefill]:
    """What a prefill worker answers to a want, in two chunks; blocks of four tokens."""

    def announce(first: int, end: int, part: Sequence[int]) -> kv_pb2.Announce:
        groups = [kv_pb2.GroupBlocks(group=0, first_token=first, blocks=part)]
        return kv_pb2.Announce(
            request_id=name, first_token=first, end_token=end, groups=groups, heard=seq
        )

    first = kv_pb2.FirstToken(
        choice=0, token=3, logprob=pb.TokenLogprob(token=3, logprob=-0.5, rank=1)
    )
    prefilled = kv_pb2.Prefilled(
        request_id=name, tokens=tokens, first_tokens=[first], computed_s=1.0, machine=b"m"
    )
    return [
        kv_pb2.FromPrefill(scheduled=kv_pb2.Scheduled(request_id=name)),
        kv_pb2.FromPrefill(announce=announce(0, 0, [])),
        kv_pb2.FromPrefill(announce=announce(0, 8, blocks[:2])),
        kv_pb2.FromPrefill(announce=announce(8, tokens, blocks[2:])),
        kv_pb2.FromPrefill(renewed=kv_pb2.Renewed(seq=seq, alive=[name])),
        kv_pb2.FromPrefill(prefilled=prefilled),
    ]


async def hostile_prefill_worker(system: System, seed: int, hostile: HostilePrefillWorkers) -> None:
    random = Random(seed)
    name, engine = f"pulling-{seed}", f"hostile-{seed}-at-{hostile.endpoint}"
    reply = system.prefill.handoffs._make_reply()
    reply.engine_id = engine
    words = [name, "", *[*system.to_decode.legs][-3:]]

    def script(seq: int) -> list[bytes]:
        valid = prefill_messages(name, len(PROMPT), [11, 12, 200], seq)
        if seed == PLAIN:
            return [message.SerializeToString() for message in valid]
        if random.random() < 0.2:
            random.shuffle(valid)
        if random.random() < 0.2:
            valid += random.choices(valid, k=2)
        if random.random() < 0.2:
            valid = [kv_pb2.FromPrefill(batch=kv_pb2.FromPrefillBatch(messages=valid))]
        changes = random.choice((0.2, 0.6))
        return [
            changed(message, random, words)
            if random.random() < changes
            else message.SerializeToString()
            for message in valid
        ]

    hello = kv_pb2.FromPrefill(hello=reply)
    strange = seed != PLAIN and random.random() < 0.2
    first = changed(hello, random, words) if strange else hello.SerializeToString()
    hostile.scripts[engine] = (first, script)
    peer = pb.Peer(engine_id=engine, kv_endpoint=hostile.endpoint)
    leg = await system.to_decode.submit(submit(name, PROMPT, leg=pb.LEG_DECODE, peer=peer))
    try:
        async with asyncio.timeout(2 * CASE_S if seed != PLAIN else DEADLINE_S):
            await leg.end()
    except TimeoutError:
        await system.to_decode.abort(name)
    ended = await leg.end()
    check_end(ended)
    assert seed != PLAIN or ended.reason == pb.LEG_END_FINISHED, ended
    assert all(token < VOCAB for tokens in leg.tokens.values() for token in tokens)


async def hostile_prefill_server(system: System, seed: int) -> None:
    async with HostilePrefillWorkers() as hostile:
        await hostile_prefill_worker(system, seed, hostile)


def test_prefill_workers_of_any_kind_harm_no_other() -> None:
    fuzz(hostile_prefill_server, 64)


@pytest.mark.parametrize(
    ("function", "defect", "case"),
    [
        ("tasuki.worker.server.readable", lambda messages, _: messages, hostile_router),
        ("tasuki.kv.link.readable", lambda messages, _: messages, hostile_decode_worker),
        ("tasuki.engine.booking.first_tokens_flaw", lambda *_: "", hostile_prefill_server),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch, function: str, defect: Callable[..., Any], case: Case
) -> None:
    monkeypatch.setattr(function, defect)
    with pytest.raises(AssertionError):
        fuzz(case, 640)
