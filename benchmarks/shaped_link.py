"""KV over links of fixed rates: which share of the rate arrives, by transport.

Two network namespaces of this machine with a cable between them, whose far end sends no faster
than the rate (`tbf`). `tasuki linkbench` reads over it by the workers' transport and thread, and a
plain socket moves the same payload in the same run. Root; the programs `ip` and `tc`.

    python benchmarks/shaped_link.py --output benchmarks/results/shaped_link.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.bench.header import header, write_result

SOURCE, READER = ("tasuki-source", "10.76.0.1"), ("tasuki-reader", "10.76.0.2")
PORT = 7000
TRANSPORTS = ("nixl-ucx", "tcp")
_LATENCY_S = 0.02  # that a packet waits at most, beyond which it is dropped
_DEADLINE_S = 300.0


def run(words: str) -> None:
    """Run a program.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    subprocess.run(words.split(), check=True, timeout=_DEADLINE_S)


@contextlib.contextmanager
def cable() -> Iterator[None]:
    """Both namespaces and what is between them; removed at the end."""
    names = [name for name, _ in (SOURCE, READER)]
    try:
        for name in names:
            run(f"ip netns add {name}")
        run(f"ip link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
        for name, address in (SOURCE, READER):
            run(f"ip -n {name} addr add {address}/24 dev cable")
            run(f"ip -n {name} link set cable up")
            run(f"ip -n {name} link set lo up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def shape(gigabits: float) -> None:
    """The source sends no faster than this."""
    burst = max(256_000, int(gigabits * 1e9 / 8 * 1e-3))  # of a millisecond
    run(
        f"tc -n {SOURCE[0]} qdisc replace dev cable root tbf rate {gigabits * 1e3:.0f}mbit"
        f" burst {burst} latency {_LATENCY_S * 1e3:.0f}ms"
    )


def linkbench(place: tuple[str, str], transport: str, *more: str) -> list[str]:
    """The command line of one side."""
    inside = ["ip", "netns", "exec", place[0], sys.executable, "-m", "tasuki", "linkbench"]
    return [*inside, "--transport", transport, *more]


def measured(transport: str, options: argparse.Namespace) -> dict[str, Any]:
    """What linkbench saves of one transport over the cable as it is."""
    # Shared memory reaches across namespaces.
    environment = {**os.environ, "UCX_TLS": "tcp"}
    listening = f"{SOURCE[1]}:{PORT}"
    source = subprocess.Popen(
        linkbench(SOURCE, transport, "--listen", listening),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert source.stdout is not None
        if "listens on" not in source.stdout.readline():
            raise SystemExit(f"the source of {transport} did not start: see above")
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "saved.json"
            asked = [f"--payload={options.payload_mib}MiB", f"--block={options.block_kib}KiB"]
            asked += [f"--repeats={options.repeats}", f"--host={READER[1]}"]
            command = linkbench(READER, transport, "--peer", listening, *asked)
            command += ["--save", str(saved)]
            subprocess.run(command, env=environment, check=True, timeout=_DEADLINE_S)
            found: dict[str, Any] = json.loads(saved.read_text())
            return found
    finally:
        source.terminate()
        source.wait()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--payload-mib", type=int, default=128)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    with cable():
        for gigabits in options.gigabits:
            shape(gigabits)
            for transport in TRANSPORTS:
                saved = measured(transport, options)
                (row,), (rivals,) = saved["rows"], saved["rivals"]
                socket_rate = rivals["bytes_per_s"]["socket"]
                line_rate = gigabits * 1e9 / 8
                row |= {"gigabits": gigabits, "transport": transport, "way": saved["way"]}
                row |= {
                    "share": row["bytes_per_s"] / line_rate,
                    "socket_share": socket_rate / line_rate,
                }
                rows.append(row)
                print(
                    f"{gigabits:g} Gb/s, {transport}: {row['share']:.2f} of it,"
                    f" a socket {row['socket_share']:.2f}"
                )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        result = header("shaped_link", label="shaped_link", topology=None, model="")
        write_result(options.output, result | {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
