"""Digests of KV: which changes they find, and what they are bound to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tasuki.kv.digest import DigestCheck, Seal, UnitDigests, Values, column_keys, row_keys
from tasuki.kv.digester import Digester
from tasuki.v1 import kv_pb2 as pb

SEAL = Seal.of(bytes(range(16)), "r.0", 4, 1)


def make_pool(
    dtype: torch.dtype = torch.bfloat16, block_size: int = 8, dim: int = 6
) -> torch.Tensor:
    """[5 blocks, 3 heads, 2 layers, 2 planes, ...], random bytes."""
    shape = (5, 3, 2, 2, block_size, dim)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def digests(pool: torch.Tensor, units: list[int], tokens: int) -> Values:
    values = Digester(pool).start(units, tokens)()
    assert values is not None
    return values


def by_definition(pool: torch.Tensor, unit: int, tokens: int, head: int) -> int:
    """The formula of `digest.py` with Python's integers."""
    per_block = pool.shape[4] // tokens
    block, at = divmod(unit, per_block)
    rows = pool[block, head].flatten(0, 1)[:, at * tokens : (at + 1) * tokens].contiguous()
    words = rows.view(torch.uint8).numpy().reshape(len(rows), -1).view(np.int32)
    total = 0
    for row, row_key in zip(words.tolist(), row_keys(len(words)).tolist(), strict=True):
        for word, key in zip(row, column_keys(len(row)).tolist(), strict=True):
            total += row_key * key * word
    return total % (1 << 64)


@pytest.mark.parametrize("tokens", [8, 4, 1])
def test_a_digest_is_the_sum_that_its_definition_says(tokens: int) -> None:
    pool = make_pool()
    units = list(range(0, 5 * 8 // tokens, 3))
    expected = [[by_definition(pool, unit, tokens, head) for head in range(3)] for unit in units]
    assert digests(pool, units, tokens).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_flipped_bit_changes_the_digest_of_its_unit_alone(
    dtype: torch.dtype,
) -> None:
    pool = make_pool(dtype, block_size=4, dim=4)
    units, raw = list(range(10)), pool.view(-1).view(torch.uint8)
    before = digests(pool, units, 2)
    places = torch.arange(raw.numel()).view(5, 3, 4, 4, -1)  # block, head, row, token, byte
    for index in np.random.default_rng(3).integers(0, raw.numel(), 40).tolist():
        block, head, _, token, _ = (int(x[0]) for x in torch.where(places == index))
        for bit in range(8):
            raw[index] ^= 1 << bit
            changed = np.argwhere(digests(pool, units, 2) != before).tolist()
            raw[index] ^= 1 << bit
            assert changed == [[2 * block + token // 2, head]]


def test_rows_words_and_tokens_in_other_places_have_other_digests() -> None:
    pool = make_pool(torch.float32, block_size=4, dim=4)
    before = digests(pool, [0], 4)[0, 0]
    for dimension in (1, 2, 3, 4):  # layers, planes, tokens, elements; heads are apart
        moved = pool.clone()
        moved[0, 0] = moved[0, 0].roll(1, dimension - 1)
        assert digests(moved, [0], 4)[0, 0] != before


def test_seals_bind_to_identity_request_group_token_and_head() -> None:
    values = np.full((3, 2), 5, dtype=np.uint64)
    tokens = [0, 4, 8]
    sealed = SEAL.sealed(values, 0, tokens, 0)
    assert len(set(sealed.flatten().tolist())) == 6, "equal digests, other places"
    others = [
        Seal.of(bytes(16), "r.0", 4, 1).sealed(values, 0, tokens, 0),
        Seal.of(bytes(range(16)), "r.1", 4, 1).sealed(values, 0, tokens, 0),
        SEAL.sealed(values, 1, tokens, 0),
        SEAL.sealed(values, 0, [4, 8, 12], 0),
        SEAL.sealed(values, 0, tokens, 1),
    ]
    assert all((other != sealed).all() for other in others)
    part = SEAL.sealed(values[1:, 1:], 0, tokens[1:], 1)
    assert (part == sealed[1:, 1:]).all(), "of a head and a unit, whoever holds it"


def test_samples_are_the_same_for_both_sides_and_one_in_sixteen() -> None:
    sample = replace(SEAL, one_in=16)
    chosen = sample.chosen(0, 0, 64_000)
    assert 800 < len(chosen) < 1_200  # of 16,000
    assert sample.chosen(0, 32_000, 64_000) == [token for token in chosen if token >= 32_000]
    assert SEAL.chosen(0, 8, 17) == [8, 12, 16]


def test_workers_of_every_version_have_the_same_digests() -> None:
    """They compare them: another value is a change of the protocol."""
    values = digests(make_pool(), [0], 4)
    assert values.tolist() == [[0x626BF8BB6A94587C, 0x3611C7F64BDDFF73, 0x69B3ABF4B47D79F9]]
    sealed = SEAL.sealed(values, 1, [4], 2)
    assert sealed.tolist() == [[0xF4DA54BA1BDB7347, 0xE2BB928BEE7F6FE9, 0x77893E1A19EE1539]]


def told(tokens: list[int], values: Values, first_token: int = 0) -> pb.Digests:
    """What the prefill worker says of units of 4 tokens, of group 0."""
    message = pb.Digests(first_token=first_token, end_token=tokens[-1] + 4)
    sealed = SEAL.sealed(values, 0, tokens, 0).astype("<u8").tobytes()
    message.groups.add(group=0, tokens=tokens, values=sealed)
    return message


VALUES = np.array([[3, 5], [7, 9]], dtype=np.uint64)  # of two units, two heads


def test_a_unit_that_lacks_a_digest_of_either_side_is_wrong() -> None:
    check = DigestCheck(SEAL)
    assert check.choose(0, 0, 8, [70, 90]) == [70, 90]
    check.arrived([UnitDigests(0, [70], VALUES[:1])])
    assert check.hear(told([0, 4], VALUES)) == ""
    assert (check.told, check.wrong()) == (8, [(0, 4)]), "nothing of unit 90 arrived"
    check.arrived([UnitDigests(0, [90], VALUES[1:])])
    assert check.wrong() == []
    untold = DigestCheck(SEAL)
    untold.choose(0, 0, 8, [70, 90])
    untold.arrived([UnitDigests(0, [70, 90], VALUES)])
    assert untold.hear(told([0], VALUES[:1])) == ""
    assert untold.wrong() == [(0, 4)], "nothing was said of unit 90"


def test_digests_with_a_gap_before_them_are_left_to_be_said_again() -> None:
    check = DigestCheck(SEAL)
    assert check.hear(told([4], VALUES[1:], first_token=4)) == ""
    assert check.told == 0
    assert check.hear(told([0], VALUES[:1])) == ""
    assert check.told == 4


@pytest.mark.parametrize("size", [0, 7, 24])
def test_digests_of_another_size_are_refused(size: int) -> None:
    message = told([0, 4], VALUES)
    message.groups[0].values = bytes(size)
    assert f"sent {size} bytes of digests for 2 units" in DigestCheck(SEAL).hear(message)
