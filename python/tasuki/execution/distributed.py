"""Several ranks as one: torch's process groups, and a shorter way for small messages on CUDA.

    CPU    gloo, over the loopback device, or that to the other hosts
    CUDA   NCCL; sums of at most `symmetric.MAX_BYTES` by reading the other ranks' memory

The ranks of a worker are processes of one machine, or of several (worker/hosts.py): then without
symmetric memory, over the network device that is said. Each sees all of the worker's GPUs of its
machine, under the same numbers, and computes on one of them: symmetric memory asks for it.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tasuki.execution.symmetric import SymmetricSum, make_symmetric_sum

log = logging.getLogger(__name__)

# Set before the libraries load, unless the operator set them.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",  # to meet; the data takes NVLink or shared memory
    "NCCL_NVLS_ENABLE": "0",  # multicast: off or broken on many machines, and of no use here
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MEET_S = 600.0  # for the slowest rank to load its weights


def make_store(size: int) -> TCPStore:
    """Where the ranks meet: the first one makes it, on a free port (`store.port`).

    It listens on the loopback device alone, which by itself it would not.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        world_size=size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def join(
    rank: int,
    size: int,
    port: int,
    device: torch.device,
    all_reduce: str = "auto",
    interface: str | None = None,
) -> Distributed:
    """Meet the other ranks; returns when all are here.

    Args:
        rank: This one's number.
        size: How many there are.
        port: Of the first rank's store, on the loopback device of this host.
        device: Where this rank computes.
        all_reduce: See `Distributed`.
        interface: Network device to ranks on other hosts; None: all are here.
    """
    between_hosts = dict.fromkeys(_INTERFACES, interface) if interface else {}
    for variable, value in {**_ENVIRONMENT, **between_hosts}.items():
        os.environ.setdefault(variable, value)
    on_cuda = device.type == "cuda"
    patience = datetime.timedelta(seconds=_MEET_S)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=TCPStore(
            "127.0.0.1", port, world_size=size, timeout=patience, wait_for_workers=False
        ),
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device if on_cuda else None,
    )
    return Distributed(device, all_reduce)


class Distributed:
    """`Collective` over the process group that was joined.

    Args:
        device: Where this rank computes.
        all_reduce: On CUDA: `nccl` alone, or also `symmetric` memory (`auto`).

    Attributes:
        rank, size, is_first: See `Collective`.
    """

    def __init__(self, device: torch.device, all_reduce: str = "auto") -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_first = self.rank == 0
        self._one = torch.zeros(4, dtype=torch.float32, device=device)
        self._symmetric: SymmetricSum | None = None
        dist.all_reduce(self._one)  # makes the connections, which takes seconds on CUDA
        if device.type == "cuda" and all_reduce != "nccl":
            self._symmetric, how = make_symmetric_sum(device)
            log.info("all-reduce: %s", how)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        if self._symmetric is not None and self._symmetric.takes(x):
            return self._symmetric(x)
        dist.all_reduce(x)
        return x

    def place(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """See `Collective`."""
        return None if self._symmetric is None else self._symmetric.place(rows, width, dtype)

    def gather(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """See `Collective`."""
        if not self.is_first:
            dist.gather(x, None, dst=0)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, dst=0)
        each = x.shape[1]
        return torch.cat(
            [part[:, : max(0, width - each * i)] for i, part in enumerate(parts)], dim=1
        )

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        everyones = x.new_zeros(self.size, *x.shape)
        if self._symmetric is not None and self._symmetric.takes(everyones):
            everyones[self.rank] = x  # the others add zeros to it
            return self._symmetric(everyones)
        dist.all_gather_into_tensor(everyones.flatten(0, 1), x.contiguous())
        return everyones

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        if self._symmetric is not None:
            # The sum of the first rank's numbers and of zeros; exact in float32 up to 2^24.
            numbers = torch.zeros(-(-x.numel() // 4) * 4, dtype=torch.float32, device=x.device)
            if self.is_first:
                numbers[: x.numel()] = x.view(-1)
            if self._symmetric.takes(numbers):
                return self._symmetric(numbers)[: x.numel()].to(x.dtype).view(x.shape)
        dist.broadcast(x, src=0)
        return x

    def fence(self) -> None:
        """See `Collective`."""
        self.all_reduce(self._one)
