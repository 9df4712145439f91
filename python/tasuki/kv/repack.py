"""Blocks of another size: from slices of remote blocks, staged whole, to units of local blocks.

A slice is some planes (heads x layers x K and V), one after another, and a plane is the slots of
a block's tokens. So tokens that two blocks share are one row of slots in each plane, with a
stride of a plane on either side:

    remote block of 48 tokens, staged        local blocks of 32 tokens, in the pool
      plane 0   | a | b | c |                  block 3       block 9
      plane 1   | a | b | c |        ──▶       | a | b |     | c |   |    plane 0
      plane 2   | a | b | c |                  | a | b |     | c |   |    plane 1 ...

Pure; owns no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasuki.kv.pool_copies import Rows
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import TransportError


@dataclass(frozen=True, slots=True)
class Repack:
    """How slices of a plan are put together.

    Attributes:
        plan: of blocks of different sizes.
        slot_bytes: of one token in one plane.
        planes: in a slice.
    """

    plan: TransferPlan
    slot_bytes: int
    planes: int

    @classmethod
    def of(cls, plan: TransferPlan, slot_bytes: int) -> Repack:
        """For `plan`, with our pool's slots.

        Raises:
            TransportError: A slice of the peer's is not made of such slots.
        """
        planes, rest = divmod(plan.slice_bytes, plan.remote_tokens * slot_bytes)
        if rest:
            raise TransportError(
                f"a slice of {plan.slice_bytes} bytes is not made of planes of"
                f" {plan.remote_tokens} slots of {slot_bytes} bytes: run the same model and version"
                " on both sides"
            )
        return cls(plan, slot_bytes, planes)

    @property
    def plane_bytes(self) -> int:
        """Of a remote block's plane."""
        return self.plan.remote_tokens * self.slot_bytes

    def blocks(self, runs: Sequence[Run]) -> list[tuple[int, list[Run]]]:
        """The remote blocks of a piece, in order, with the runs of each."""
        per_block, _ = self.plan.units
        found: dict[int, list[Run]] = {}
        for run in runs:
            found.setdefault(run.remote // per_block, []).append(run)
        return list(found.items())

    def rows(self, runs: Sequence[Run], staged: int, planes: range) -> Iterator[Rows]:
        """The copies of one remote block's runs.

        Args:
            runs: Of the block.
            staged: Where its planes `planes` begin in staging memory, in bytes.
            planes: Of the slice, those that are staged.
        """
        plan, slot = self.plan, self.slot_bytes
        unit_bytes, (theirs, ours) = plan.unit_tokens * slot, plan.units
        local_plane = plan.local_tokens * slot
        for run in runs:
            block, unit = divmod(run.local, ours)
            begin = plan.local.address + block * plan.local.stride_bytes
            yield Rows(
                staged=staged + run.remote % theirs * unit_bytes,
                staged_stride=self.plane_bytes,
                local=begin + planes.start * local_plane + unit * unit_bytes,
                local_stride=local_plane,
                count=len(planes),
                size_bytes=run.count * unit_bytes,
            )
