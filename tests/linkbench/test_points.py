"""Which payloads are cut into which blocks."""

from __future__ import annotations

import itertools

import pytest

from tasuki.linkbench.points import MAX_DESCRIPTORS, LinkbenchError, Point, points


def test_every_payload_meets_every_block_that_it_can_be_cut_into() -> None:
    found = points([1 << 20, 1 << 27], [1 << 10, 1 << 20, 1 << 27])
    assert found == [
        Point(1 << 10, 1 << 10),
        Point(1 << 20, 1),
        Point(1 << 20, 1 << 7),
        Point(1 << 27, 1),
    ], "without 131,072 blocks of 1 KiB, and 1 MiB in blocks of 128 MiB"
    assert all(point.descriptors <= MAX_DESCRIPTORS for point in found)


def test_no_two_blocks_of_a_read_are_adjacent() -> None:
    blocks = list(Point(64, 5).blocks)
    assert len(blocks) == 5
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(blocks))


@pytest.mark.parametrize(
    ("payloads", "blocks", "said"),
    [([1 << 20], [12], "--block 12"), ([1 << 20], [100], "--block 100"), ([8], [64], "--payload")],
)
def test_what_cannot_be_measured_is_refused(
    payloads: list[int], blocks: list[int], said: str
) -> None:
    with pytest.raises(LinkbenchError, match=said):
        points(payloads, blocks)
