"""How large the block pool is and how long a request may be: settled once, at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tasuki import control_groups
from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup, longest_blocks, pages_for
from tasuki.worker.config import ConfigError

_DEFAULT_SHARE = 8  # of the memory that is free: an eighth for one worker's pool
_ENOUGH_SEQUENCES = 32  # more blocks than this many longest requests help nobody


class _Names(NamedTuple):
    """Files of a control group, and fields of its `memory.stat`."""

    limit: str
    used: str
    cached: tuple[str, str]


_VERSIONS = (
    _Names("memory.max", "memory.current", ("inactive_file", "active_file")),
    _Names(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool in blocks, and the longest request in tokens that it admits."""

    num_blocks: int
    max_model_len: int


def available_bytes(cgroup: Path = control_groups.ROOT) -> int:
    """Memory that can still be taken on this machine or in this container, in bytes.

    Args:
        cgroup: Where control groups are mounted.
    """
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for group in control_groups.folders("memory", cgroup):
        for names in _VERSIONS:
            limit = group / names.limit
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                used = int((group / names.used).read_text()) - _cached_bytes(group, names)
                free = min(free, max(0, int(text) - used))
    return free


def _cached_bytes(group: Path, names: _Names) -> int:
    """Page cache of files, such as the weights, which the kernel gives up when memory is needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(fields[name]) for name in names.cached)


def size_pool(
    *,
    block_bytes: int,
    block_size: int,
    model_context: int,
    kv_memory: int | None,
    max_model_len: int | None,
    available: int,
    spare: bool = True,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> PoolSize:
    """Settle the pool's size and the longest request.

    Inbound pulls and own prefills each need room for one longest request, so
    the pool holds at least two.

    Args:
        block_bytes: Bytes of a page: of one block in the layers of one cache group.
        block_size: Tokens of one block.
        model_context: Tokens the model was made for.
        kv_memory: Bytes asked for; None: a share of `available`.
        max_model_len: Tokens asked for; None: what model and pool allow.
        available: Free memory in bytes.
        spare: Whether to leave most of `available` alone. Memory of the machine
            is shared with others, and paid for when used; a GPU's is there to
            be taken, and what is available of it is a share already.
        groups: Cache groups, whose pages a request takes.

    Raises:
        ConfigError: The asked length exceeds the model's or the pool's, or the
            memory does not hold two blocks.
    """
    wanted = max_model_len or model_context
    if max_model_len is not None and max_model_len > model_context:
        raise ConfigError(
            f"max-model-len is {max_model_len}, the model's context is {model_context} tokens:"
            f" lower it"
        )
    if kv_memory is None:
        num_blocks = max(0, available) // block_bytes
        if spare:
            enough = _ENOUGH_SEQUENCES * pages_for(groups, -(-wanted // block_size))
            num_blocks = min(num_blocks // _DEFAULT_SHARE, enough)
    else:
        if kv_memory > available:
            where = "on this machine" if spare else "for it on this GPU"
            raise ConfigError(
                f"kv-memory is {kv_memory} bytes, {available} are free {where}: lower it"
            )
        num_blocks = kv_memory // block_bytes
    longest = longest_blocks(groups, num_blocks // 2) * block_size
    if longest == 0:
        least = 2 * pages_for(groups, 1)
        raise ConfigError(
            f"the pool holds {num_blocks} blocks, {least} are the least: give kv-memory at"
            f" least {least * block_bytes} bytes"
        )
    if max_model_len is not None and max_model_len > longest:
        needed = 2 * pages_for(groups, -(-max_model_len // block_size)) * block_bytes
        raise ConfigError(
            f"max-model-len is {max_model_len}, a pool of {num_blocks} blocks admits {longest}"
            f" tokens: raise kv-memory to {needed} bytes or lower max-model-len"
        )
    return PoolSize(num_blocks=num_blocks, max_model_len=min(wanted, longest))
