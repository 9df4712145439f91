"""How KV travels: by which way, and in pieces of what size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tasuki.doctor.picture import Fleet, Pair, Scrapes
from tasuki.doctor.result import Finding, Outcome

_LEAST_TRANSFERS = 3
_LEAST_BYTES = 1 << 20  # of a mean transfer: below that a rate says little
_SMALL_DESCRIPTOR_BYTES = 8 << 10
_MANY_DESCRIPTORS = 64  # of a mean transfer


def transport(fleet: Fleet) -> Outcome:
    """TCP where something faster is there, and links slower than they must be."""
    outcome = Outcome()
    for pair in fleet.pairs:
        if pair.transport:
            _way(pair, outcome)
    _rates(fleet, outcome)
    return outcome


def _way(pair: Pair, outcome: Outcome) -> None:
    if not re.search(r"(^|/)tcp$", pair.transport):
        outcome.looked_at.append(f"{pair.name} by {pair.transport}")
        return
    gpus = all("NVIDIA" in each.config.get("device", "") for each in (pair.prefill, pair.decode))
    if pair.prefill.host and pair.prefill.host == pair.decode.host:
        outcome.looked_at.append(f"{pair.name} by {pair.transport}")
        outcome.findings.append(
            Finding(
                f"{pair.name}: KV travels by TCP, although both are on {pair.prefill.host}",
                (f'label transport="{pair.transport}" of tasuki_kv_pair_pulls_total', _rate(pair)),
                _remedy(pair.transport, "CUDA IPC" if gpus else "shared memory"),
                (pair.prefill.name, pair.decode.name),
            )
        )
        return
    outcome.unseen.append(
        f"whether something faster than TCP is between {pair.name}: run `tasuki preflight --peer"
        " HOST:PORT` on one of the two (and give --admin here, so that their hosts are known)"
    )


def _remedy(transport: str, faster: str) -> str:
    if transport.startswith(("mooncake/", "tcp/")):
        return f"start all workers with --transport nixl-ucx, which has {faster}"
    return (
        f"let UCX use {faster}: unset UCX_TLS and UCX_NET_DEVICES, share /dev/shm and the"
        " PID namespace; --require-transport refuses TCP"
    )


def _rate(pair: Pair) -> str:
    moved = _moved(pair.scrapes)
    if moved is None:
        return "no transfer of 1 MiB or more: no rate"
    return f"{moved.bytes_per_s / 1e9:.2f} GB/s ({pair.scrapes.source('kv_bytes', 'kv_seconds')})"


@dataclass(frozen=True, slots=True)
class _Moved:
    """Transfers: their rate, and the bytes of a mean one and of its blocks."""

    bytes_per_s: float
    size: float
    block: float | None  # None: not shown


def _moved(scrapes: Scrapes) -> _Moved | None:
    """Transfers that are large enough to say something."""
    names = "kv_bytes", "kv_seconds", "kv_transfers", "kv_descriptors"
    values = [scrapes.recent(name, "kv_transfers", _LEAST_TRANSFERS) for name in names]
    size, seconds, transfers, blocks = (each.value if each else 0.0 for each in values)
    if transfers < 1 or size < _LEAST_BYTES * transfers or seconds <= 0:
        return None
    return _Moved(size / seconds, size / transfers, size / blocks if blocks else None)


def _rates(fleet: Fleet, outcome: Outcome) -> None:
    """Rates of transfers, against what the user expects."""
    subjects = [(pair.name, pair.scrapes) for pair in fleet.pairs if pair.transport]
    subjects += [(each.name, each.scrapes) for each in fleet.workers if each.engine != "tasuki"]
    small, unjudged = [], []
    for name, scrapes in subjects:
        if not scrapes.last("kv_transfers"):
            continue
        moved = _moved(scrapes)
        if moved is None:
            small.append(name)
            continue
        rate, expected = moved.bytes_per_s, fleet.expected.of_transfer(moved.size, moved.block)
        if not expected:
            unjudged.append(
                f"{name} ({rate / 1e9:.2f} GB/s in transfers of {moved.size / 1e6:.1f} MB)"
            )
            continue
        outcome.looked_at.append(f"{name} at {rate / 1e9:.2f} GB/s")
        if rate >= expected:
            continue
        outcome.findings.append(
            Finding(
                f"{name}: KV moves at {rate / 1e9:.2f} GB/s, expected are {expected / 1e9:.2f}",
                (
                    f"{scrapes.source('kv_bytes', 'kv_seconds')}: transfers of"
                    f" {moved.size / 1e6:.1f} MB",
                ),
                "see which way UCX takes (UCX_PROTO_INFO=y in the worker's log): TCP means that"
                " UCX_TLS or UCX_NET_DEVICES excludes a faster one, or that none works",
                (name,),
                {"bytes_per_s": rate},
            )
        )
    if small:
        outcome.unseen.append(f"no transfers of 1 MiB or more: {', '.join(small)}")
    if unjudged:
        remedy = (
            "the file of --expect has only larger transfers or blocks: measure such ones, too"
            " (tasuki linkbench --payload, --block)"
            if fleet.expected.default
            else "say what they must reach, for example --expect 20GB/s"
        )
        outcome.unseen.append(
            f"whether the links of {', '.join(unjudged)} are as fast as they can be: {remedy}"
        )


def layout(fleet: Fleet) -> Outcome:
    """Layouts of the cache that move a few kilobytes at a time."""
    outcome = Outcome()
    subjects = [(pair.name, pair.scrapes, "tasuki") for pair in fleet.pairs if pair.transport]
    subjects += [(each.name, each.scrapes, each.engine) for each in fleet.workers]
    for name, scrapes, engine in subjects:
        if not scrapes.last("kv_descriptors") or not scrapes.last("kv_transfers"):
            continue
        values = [
            scrapes.recent(each, "kv_transfers", _LEAST_TRANSFERS)
            for each in ("kv_bytes", "kv_descriptors", "kv_transfers")
        ]
        size, count, transfers = (0.0 if each is None else each.value for each in values)
        if not count or not transfers:
            continue
        outcome.looked_at.append(f"{name}: {size / count / 1024:.0f} KiB a descriptor")
        many = count / transfers >= _MANY_DESCRIPTORS
        if many and size / count < _SMALL_DESCRIPTOR_BYTES:
            outcome.findings.append(
                Finding(
                    f"{name}: KV moves {size / count / 1024:.1f} KiB at a time",
                    (
                        f"{size / 1e6:.1f} MB in {count:.0f} descriptors, {transfers:.0f}"
                        f" transfers ({scrapes.source('kv_bytes', 'kv_descriptors')})",
                    ),
                    _larger(engine),
                    (name,),
                    {"descriptor_bytes": size / count},
                )
            )
    if not outcome.looked_at and fleet.of_role("prefill", "decode"):
        outcome.unseen.append(
            "how many pieces a transfer has: no transfer yet, or the connector does not tell"
            " (SGLang does not)"
        )
    return outcome


def _larger(engine: str) -> str:
    if engine == "vllm":
        return (
            "start both sides with VLLM_KV_CACHE_LAYOUT=HND, or with larger blocks (--block-size"
            " 64 or 128)"
        )
    return "start both sides with larger blocks (--block-size 64)"
