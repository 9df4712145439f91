"""The command `tasuki preflight`: checks a machine, and its way to others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tasuki.command_line import described, parse_host_port
from tasuki.preflight import termination
from tasuki.preflight.result import (
    EXIT_CODE,
    Check,
    PreflightError,
    as_json,
    as_table,
    failures,
)

_MB = 1_000_000


def preflight(
    *,
    peer: Annotated[
        list[str] | None,
        described(
            "HOST:PORT of a worker, or of `tasuki preflight --listen`: blocks are read from it;"
            " repeatable.",
            parser=parse_host_port,
            metavar="HOST:PORT",
        ),
    ] = None,
    listen: Annotated[
        bool, described("Check, then answer peers until Ctrl-C.", "--listen")
    ] = False,
    expect: Annotated[
        str | None,
        described(
            "What each peer must reach: a rate such as 20GB/s or 100Gb/s, or a file of --json"
            " or of `tasuki linkbench --save`, of which 0.8 is enough [nothing].",
            metavar="RATE|FILE",
        ),
    ] = None,
    model: Annotated[
        Path | None, described("Model folder: is it whole?", "--model", metavar="FOLDER")
    ] = None,
    hashes: Annotated[
        bool, described("Compare it with the SHA-256 that came with it: reads all.", "--hashes")
    ] = False,
    host: Annotated[str, described("Address that a worker here would bind [127.0.0.1].")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int,
        described("Its port; with --listen the one to bind [0: any free one].", min=0, max=65535),
    ] = 0,
    device: Annotated[
        str, described("auto, cpu or cuda:N: where blocks are read from and to [auto].")
    ] = "auto",
    require_transport: Annotated[
        str, described("rdma or cuda_ipc: fail a peer that is read otherwise.", metavar="WAY")
    ] = "",
    rdma_devices: Annotated[
        str, described("nearest, all, or names with commas [nearest].", metavar="NAMES")
    ] = "nearest",
    payload_mb: Annotated[
        int, described("Of the largest read of a peer [64].", "--payload-mb", min=1, max=8000)
    ] = 64,
    timeout_s: Annotated[
        float,
        described(
            "For a peer's answer, and for each read [5].", "--timeout-s", min=0.1, max=3600.0
        ),
    ] = 5.0,
    fleet_cert: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    fleet_key: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    fleet_ca: Annotated[Path | None, described("As for workers.", metavar="PATH")] = None,
    json: Annotated[bool, described("Print JSON instead of a table.", "--json")] = False,
    termination_log: Annotated[
        Path, described("File that gets what failed [/dev/termination-log, where it exists].")
    ] = termination.DEFAULT,
) -> None:
    """Check this machine, and the way to others, before anything serves; exit 78 on a failure."""
    from tasuki.kv.fleet import Fleet
    from tasuki.kv.net_devices import Network
    from tasuki.kv.ways import REQUIREMENTS
    from tasuki.nvidia_driver import pci_address
    from tasuki.preflight.expect import Expectation
    from tasuki.preflight.local import Subject, local_checks
    from tasuki.preflight.network import resolves

    if require_transport not in ("", *REQUIREMENTS):
        raise PreflightError(
            f"--require-transport is {require_transport!r}: use one of {', '.join(REQUIREMENTS)}"
        )
    expected = Expectation.of(expect)
    fleet = Fleet.of(fleet_cert, fleet_key, fleet_ca)
    if fleet is not None:
        fleet.check()
    subject = Subject(
        host=host,
        port=port,
        model=model,
        hashes=hashes,
        device=device,
        require=require_transport,
    )
    checks = local_checks(subject)
    peers = peer or []
    checks += [resolves(each) for each in dict.fromkeys(name.rpartition(":")[0] for name in peers)]
    checks += expected.unknown(peers)

    from tasuki.preflight import transfers  # torch: only now

    where = transfers.device_of(device)
    gpu = pci_address(where.index or 0) if where.type == "cuda" else ""
    network = Network(host, gpu, rdma_devices, require_transport)
    plan = transfers.Plan(network, where, payload_mb * _MB, timeout_s, fleet)
    checks.append(transfers.self_transfer(plan))
    for name in dict.fromkeys(peers):
        checks.append(transfers.peer_transfer(name, plan, expected.of_peer(name)))
    _tell(checks, json, termination_log)
    if listen:
        from tasuki.preflight.listen import listen_until_signal

        def say(address: str) -> None:
            print(f"listening on {address}", flush=True)

        asyncio.run(listen_until_signal(plan, port, say))
    raise typer.Exit(EXIT_CODE if failures(checks) else 0)


def _tell(checks: list[Check], json: bool, termination_log: Path) -> None:
    print(as_json(checks) if json else as_table(checks), flush=True)
    if failed := failures(checks):
        termination.tell(failed, termination_log)
