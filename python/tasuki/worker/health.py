"""Asks a worker whether it is healthy: `python -m tasuki.worker.health HOST:PORT`.

For probes of container engines that know no gRPC. Kubernetes has a probe of its own for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.errors import TasukiError
from tasuki.kv.fleet import DIRECT, REMEDY, Fleet

TIMEOUT_S = 5.0
_REMEDY = (
    "start a worker there, wait until its model is loaded, or correct HOST:PORT;"
    f" with certificates {REMEDY}"
)


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the gRPC server there says that it serves, without certificates."""
    return asyncio.run(why_not(address, None, timeout_s)) is None


async def why_not(address: str, fleet: Fleet | None, timeout_s: float = TIMEOUT_S) -> str | None:
    """Why the gRPC server there does not serve; None: it does.

    Args:
        address: `host:port`.
        fleet: Certificates to show, of a fleet that has them.
        timeout_s: For connection and answer.
    """
    try:
        channel = (
            fleet.channel(address, DIRECT)
            if fleet
            else grpc.aio.insecure_channel(address, options=DIRECT)
        )
    except OSError as error:
        return f"a certificate cannot be read: {error}"
    async with channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            return f"no answer within {timeout_s:g} s ({error.details()}): {_REMEDY}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return "the worker answers that it does not serve: it drains"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 for a worker that serves, 1 with the reason on stderr for others."""
    parser = argparse.ArgumentParser(prog="python -m tasuki.worker.health", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", help="of the worker")
    for part in ("cert", "key", "ca"):
        parser.add_argument(f"--fleet-{part}", type=Path, help="as for the worker", metavar="PATH")
    said = parser.parse_args(arguments)
    try:
        fleet = Fleet.of(said.fleet_cert, said.fleet_key, said.fleet_ca)
    except TasukiError as error:
        parser.error(str(error))
    reason = asyncio.run(why_not(said.address, fleet))
    if reason:
        print(f"{said.address}: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
