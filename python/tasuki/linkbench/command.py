"""The command `tasuki linkbench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasuki.command_line import parse_bytes, parse_host_port
from tasuki.kv.backends import DEFAULT, names

_SLOWER_CODE = 3


def linkbench(
    *,
    payload: Annotated[
        list[int] | None,
        typer.Option(
            help="Bytes of a read, e.g. 128MB; repeat it for several [1MiB 16MiB 128MiB].",
            parser=parse_bytes,
            metavar="BYTES",
            show_default=False,
        ),
    ] = None,
    block: Annotated[
        list[int] | None,
        typer.Option(
            help="Bytes of a block, of which each is a descriptor; repeat it for several"
            " [16KiB 64KiB 1MiB].",
            parser=parse_bytes,
            metavar="BYTES",
            show_default=False,
        ),
    ] = None,
    source_device: Annotated[
        str, typer.Option(help="Where the memory is that is read: cpu, cuda:0, …")
    ] = "cpu",
    reader_device: Annotated[str, typer.Option(help="Where it goes: cpu, cuda:1, …")] = "cpu",
    transport: Annotated[
        str, typer.Option(help="As workers' --transport, on both sides.", metavar="NAME")
    ] = DEFAULT,
    repeats: Annotated[int, typer.Option(help="Reads of each size.", min=1, max=10_000)] = 20,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT: be read by --peer of another machine, until Ctrl-C. Everybody who"
            " reaches the port can read the memory of this process.",
            parser=parse_host_port,
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of `tasuki linkbench --listen`; else a second process is started here.",
            parser=parse_host_port,
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address of this machine whose network is used with --peer.")
    ] = "127.0.0.1",
    save: Annotated[
        Path | None, typer.Option(help="Write the result here.", show_default=False)
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="A saved result of the same transport, devices and number of hosts: exit code 3"
            " if a rate is below 0.9 of it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure how quickly KV moves between two processes, by the transport that workers use."""
    from tasuki.linkbench.points import LinkbenchError, points

    if transport not in names():
        raise LinkbenchError(f"--transport is {transport!r}: use one of {', '.join(names())}")
    from tasuki.linkbench.source import Source

    if listen:
        for name, given in (("--peer", peer), ("--save", save), ("--against", baseline)):
            if given is not None:
                raise LinkbenchError(
                    f"{name} is given with --listen, which measures nothing: leave out one of them"
                )
        address, _, port = listen.rpartition(":")
        source = Source(address.strip("[]"), int(port), source_device, transport)
        print(f"tasuki linkbench listens on {address}:{source.port}", flush=True)
        source.serve()
    chosen = points(
        payload or [1 << 20, 16 << 20, 128 << 20], block or [16 << 10, 64 << 10, 1 << 20]
    )
    from tasuki.bench.header import check_writable, write_result
    from tasuki.linkbench import report
    from tasuki.linkbench.run import Setup, measure

    setup = Setup(peer or "", host, (source_device, reader_device), transport, repeats)
    before = None if baseline is None else report.read_baseline(baseline, chosen, setup)
    if save is not None:
        check_writable(save)
    print(report.HEAD)
    measured = measure(chosen, setup, lambda row: print(report.line(row), flush=True))
    print("\n".join(["", "the best of each payload, beside what moves it in one piece:"]))
    print("\n".join(report.rivals_lines(measured)))
    print(f"\ntransport {transport}: {measured.way or 'UCX does not say which way'}")
    if measured.warning:
        print(f"warning: {measured.warning}")
    if save is not None:
        write_result(save, report.result(measured, setup))
        print(f"written: {save}")
    if before is not None:
        lines, lost = report.against(before, measured)
        print("\n".join(["", f"against {baseline}:", *lines]))
        if lost:
            raise typer.Exit(_SLOWER_CODE)
