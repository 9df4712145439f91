"""What a link is measured with: payloads cut into blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.errors import TasukiError

MAX_DESCRIPTORS = 10_000
MIN_BLOCK_BYTES = 64


class LinkbenchError(TasukiError):
    """A link cannot be measured as asked."""


@dataclass(frozen=True, slots=True)
class Point:
    """One read: `descriptors` blocks of `block_bytes` that lie apart on both sides."""

    block_bytes: int
    descriptors: int

    @property
    def payload_bytes(self) -> int:
        """All of it."""
        return self.block_bytes * self.descriptors

    @property
    def blocks(self) -> range:
        """Every other block, so that no two of them are adjacent and become one descriptor."""
        return range(0, 2 * self.descriptors, 2)


def points(payloads: Sequence[int], blocks: Sequence[int]) -> list[Point]:
    """Every payload in blocks of every size, the most bytes last.

    Combinations are left out that need more than `MAX_DESCRIPTORS`, or less than one whole block.

    Raises:
        LinkbenchError: A size is not possible, or nothing is left.
    """
    for size in blocks:
        if size < MIN_BLOCK_BYTES or size % 8:
            raise LinkbenchError(
                f"--block {size}: use a multiple of 8 bytes from {MIN_BLOCK_BYTES} on"
            )
    found = {
        Point(block, payload // block)
        for payload in payloads
        for block in blocks
        if 1 <= payload // block <= MAX_DESCRIPTORS
    }
    if not found:
        raise LinkbenchError(
            f"no payload of {list(payloads)} bytes is from 1 to {MAX_DESCRIPTORS} blocks of"
            f" {list(blocks)} bytes: use other sizes (--payload, --block)"
        )
    return sorted(found, key=lambda point: (point.payload_bytes, point.block_bytes))
