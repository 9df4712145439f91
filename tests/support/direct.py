"""A minimal router in Python: drives workers over gRPC, placing legs at will.

The real router decides for itself where a request goes; tests that need a
certain placement, such as crossed traffic, use this.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.worker_pb2_grpc import WorkerStub


def fresh_load(address: str, timeout_s: float = 5.0) -> pb.Load | None:
    """The load of a worker as it is now: a new stream is told it at once.

    Args:
        address: `host:port` of the worker.
        timeout_s: For the answer.

    Returns:
        None: it cannot be asked.
    """
    outgoing: queue.Queue[pb.RouterMessage | None] = queue.Queue()
    with grpc.insecure_channel(address) as channel:
        call = WorkerStub(channel).Serve(iter(outgoing.get, None), timeout=timeout_s)
        try:
            for message in call:
                if message.HasField("step") and message.step.load.total_blocks:
                    return message.step.load
        except grpc.RpcError:
            pass  # stopped, or strangers are refused
        finally:
            outgoing.put(None)
            call.cancel()
    return None


class WorkerStream:
    """One `Serve` stream; what the worker says is put on a queue shared by all.

    Args:
        address: `host:port` of the worker.
        heard: gets every Output and LegEnd.
    """

    def __init__(self, address: str, heard: queue.Queue[Any]) -> None:
        self._outgoing: queue.Queue[pb.RouterMessage | None] = queue.Queue()
        self._channel = grpc.insecure_channel(address)
        self._call = WorkerStub(self._channel).Serve(iter(self._outgoing.get, None))
        self._heard = heard
        self.info = next(self._messages()).info
        self.load = pb.Load()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _messages(self) -> Iterator[pb.WorkerMessage]:
        return iter(self._call)

    def _read(self) -> None:
        try:
            for message in self._messages():
                if message.HasField("step"):
                    self.load = message.step.load
                    for said in (*message.step.outputs, *message.step.ended):
                        self._heard.put(said)
        except grpc.RpcError:
            pass  # closed

    def send(self, **message: Any) -> None:
        """One `RouterMessage`, e.g. `send(submit=...)`."""
        self._outgoing.put(pb.RouterMessage(**message))

    def peer(self) -> pb.Peer:
        return pb.Peer(engine_id=self.info.engine_id, kv_endpoint=self.info.kv_endpoint)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()
