"""Block hashes equal the golden values that the Rust core is tested with too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasuki.engine.block_hash import extend_hashes, root_hash, token_array

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "block_hashes.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden(case):
    root = root_hash(bytes.fromhex(case["identity"]), case["tenant"])
    assert root.hex() == case["root"]
    hashes: list[bytes] = []
    size = case["block_size"]
    tokens = token_array(case["tokens"])
    extend_hashes(hashes, root, tokens, size, len(tokens) // size)
    assert [digest.hex() for digest in hashes] == case["hashes"]


def test_extending_step_by_step_is_the_same():
    root, tokens = root_hash(bytes(16), "t"), token_array(range(100))
    whole: list[bytes] = []
    extend_hashes(whole, root, tokens, 4, 25)
    grown: list[bytes] = []
    for blocks in (1, 2, 9, 9, 25):
        extend_hashes(grown, root, tokens, 4, blocks)
    assert grown == whole
    assert len(set(whole)) == 25


def test_a_difference_anywhere_before_changes_the_rest():
    root = root_hash(bytes(16), "")
    one: list[bytes] = []
    other: list[bytes] = []
    extend_hashes(one, root, token_array([1, 2, 3, 4, 5, 6]), 2, 3)
    extend_hashes(other, root, token_array([1, 2, 3, 9, 5, 6]), 2, 3)
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2]
