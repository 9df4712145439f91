"""Asks a worker whether it is healthy: `python -m tasuki.worker.health HOST:PORT`.

For probes of container engines that know no gRPC. Kubernetes has a probe of its own for it.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.kv.fleet import DIRECT

TIMEOUT_S = 5.0


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the gRPC server there says that it serves; one that is not in reach does not.

    Args:
        address: `host:port`, without certificates.
        timeout_s: For connection and answer.
    """
    with grpc.insecure_channel(address, options=DIRECT) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
