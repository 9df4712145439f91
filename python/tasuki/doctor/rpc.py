"""Tasuki's workers asked directly, as a router would: who they are, and a small request."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc

from tasuki.doctor.http import FailedError, LateError, NoAnswerError
from tasuki.doctor.picture import Probe, Role, Worker
from tasuki.kv.fleet import DIRECT, FLEET_NAME
from tasuki.kv.fleet import Fleet as Certificates
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerStub

_ROLES: dict[int, Role] = {
    pb.ROLE_PREFILL: "prefill",
    pb.ROLE_DECODE: "decode",
    pb.ROLE_MIXED: "mixed",
}
TENANT = "tasuki-doctor"  # its prompts share no cached KV with anyone's


@contextmanager
def _stream(
    where: str, certificates: Certificates | None, timeout_s: float
) -> Iterator[tuple[Any, SimpleQueue[Any]]]:
    """The messages of a worker, and a queue of ours to it."""
    outgoing: SimpleQueue[Any] = SimpleQueue()
    if certificates is None:
        channel = grpc.insecure_channel(where, options=DIRECT)
    else:
        credentials = grpc.ssl_channel_credentials(
            certificates.ca.read_bytes(),
            certificates.key.read_bytes(),
            certificates.cert.read_bytes(),
        )
        named = [*DIRECT, ("grpc.ssl_target_name_override", FLEET_NAME)]
        channel = grpc.secure_channel(where, credentials, options=named)
    stub: Any = WorkerStub  # generated without types
    call = stub(channel).Serve(iter(outgoing.get, None), timeout=timeout_s)
    try:
        yield call, outgoing
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise LateError(timeout_s) from error
        raise FailedError(f"{error.code().name.lower()}: {error.details()}") from error
    finally:
        call.cancel()
        outgoing.put(None)
        channel.close()


def ask(where: str, certificates: Certificates | None, timeout_s: float) -> Worker:
    """Who a worker is, by the first message of its stream.

    Raises:
        NoAnswerError: It does not say.
    """
    with _stream(where, certificates, timeout_s) as (call, _):
        for message in call:
            if message.HasField("info"):
                return _picture(where, message.info)
    raise NoAnswerError("it ended the stream before it told who it is")


def _picture(where: str, info: Any) -> Worker:
    config = {
        "version": info.version,
        "identity": bytes(info.identity).hex(),
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype or info.dtype,
        "block_size": str(info.block_size),
        "num_blocks": str(info.num_blocks),
        "max_model_len": str(info.max_model_len),
        "max_running": str(info.max_running_sequences),
        "max_batched_tokens": str(info.max_batched_tokens),
        "tensor_parallel": str(info.tensor_parallel_size),
        "device": info.device,
        "engine_id": info.engine_id,
        "vocab_size": str(info.vocab_size),
    }
    host = info.kv_endpoint.rpartition(":")[0]
    role = _ROLES.get(info.role.role, "")
    return Worker(where, "tasuki", role, info.model, host, config)


def timed(
    where: str,
    certificates: Certificates | None,
    timeout_s: float,
    run: str,
    round_: int,
    tokens: tuple[int, int],
) -> Probe:
    """A request of random tokens that this worker serves alone.

    Args:
        where: `host:port`.
        certificates: Of the fleet; None: plain.
        timeout_s: For all of it.
        run: Makes the prompts differ from those of other looks, which a worker may have cached.
        round_: Seeds the prompt, which is the same for all workers of a round.
        tokens: Of the prompt, and of the answer.

    Raises:
        NoAnswerError: It failed.
    """
    with _stream(where, certificates, timeout_s) as (call, outgoing):
        times: list[tuple[float, int]] = []
        began = 0.0
        for message in call:
            if message.HasField("info"):
                began = time.monotonic()
                outgoing.put(pb.RouterMessage(submit=_submit(message.info, run, round_, tokens)))
            if not message.HasField("step"):
                continue
            if found := sum(len(output.tokens) for output in message.step.outputs):
                times.append((time.monotonic(), found))
            for end in message.step.ended:
                if end.reason != pb.LEG_END_FINISHED or len(times) < 2:
                    failed = end.reason == pb.LEG_END_FAILED
                    raise (FailedError if failed else NoAnswerError)(
                        f"its answer ended by {end.message or pb.LegEndReason.Name(end.reason)}"
                    )
                decoded = sum(count for _, count in times[1:])
                pace = (times[-1][0] - times[0][0]) / decoded
                return Probe(round_, times[0][0] - began, pace)
    raise NoAnswerError("it ended the stream before the answer")


def _submit(info: Any, run: str, round_: int, tokens: tuple[int, int]) -> Any:
    draw = random.Random(f"{run} {round_}")
    size = min(tokens[0], max(1, info.max_model_len - tokens[1] - 1))
    return pb.Submit(
        request_id=f"doctor-{uuid.uuid4()}",
        leg=pb.LEG_COLOCATED,
        prompt_tokens=[draw.randrange(3, max(4, info.vocab_size)) for _ in range(size)],
        choices=[0],
        sampling=pb.SamplingParams(seed=1, top_p=1.0, max_tokens=tokens[1], repetition_penalty=1.0),
        tenant=TENANT,
        number=1,
    )
