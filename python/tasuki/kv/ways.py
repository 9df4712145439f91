"""By which way a worker's reads travel, as UCX names it, and which ways are good enough.

UCX chooses the way by itself and falls back to TCP without an error where RDMA or CUDA IPC does
not work. `--require-transport` refuses that. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# From the slowest: a read that uses several ways is called by the slowest of them.
KINDS = ("tcp", "other", "shm", "rdma", "cuda_ipc")

# What each requirement allows. Memory that two processes of one machine share crosses no network.
REQUIREMENTS = {"rdma": ("shm", "rdma", "cuda_ipc"), "cuda_ipc": ("cuda_ipc",)}

_KIND_OF = (
    (r"tcp", "tcp"),
    (r"rc(_.*)?|ud(_.*)?|dc(_.*)?|srd|gga(_.*)?|ib", "rdma"),
    (r"cuda_ipc|rocm_ipc|ze_ipc", "cuda_ipc"),
    (r"cma|sysv|posix|xpmem|knem|mm|self|cuda_copy|gdr_copy", "shm"),
)
_LANE = re.compile(r"([a-z][a-z0-9_]*)/([\w.:-]+)")

REMEDIES = {
    "rdma": "run `tasuki preflight` on both machines (RDMA devices, memlock, --rdma-devices)",
    "cuda_ipc": "put both workers on one machine whose GPUs see one another",
}


@dataclass(frozen=True, slots=True)
class Way:
    """How reads of large blocks travel.

    Attributes:
        kind: One of `KINDS`.
        lanes: UCX's transports and devices, for example `rc_mlx5/mlx5_0:1`.
    """

    kind: str
    lanes: tuple[str, ...]

    @classmethod
    def of(cls, described: str) -> Way:
        """From UCX's words, for example `50% on rc_mlx5/mlx5_0:1/path0 and 50% on tcp/eth0`."""
        lanes = tuple(
            dict.fromkeys(f"{name}/{device}" for name, device in _LANE.findall(described))
        )
        kinds = [_kind(lane.partition("/")[0]) for lane in lanes]
        return cls(min(kinds, key=KINDS.index, default="other"), lanes or (described.strip(),))

    def __str__(self) -> str:
        return f"{self.kind} ({', '.join(self.lanes)})"


def slowest(ways: Iterable[Way | None]) -> Way | None:
    """Of several; None: none of them is known."""
    known = [way for way in ways if way is not None]
    return min(known, key=lambda way: KINDS.index(way.kind), default=None)


def _kind(transport: str) -> str:
    for pattern, kind in _KIND_OF:
        if re.fullmatch(pattern, transport):
            return kind
    return "other"
