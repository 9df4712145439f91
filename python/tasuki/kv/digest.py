"""Digests of KV: 64 bits for each KV head and unit of tokens, made of the bytes in a pool.

    H = sum over rows r, words c of  row_key[r] * column_key[c] * x[r, c]   mod 2^64
        row: a layer and a plane; column: a 32-bit word of the unit's tokens in it

All keys are odd, so a difference in one word alone always changes H, and differences in
several words leave it as it was once in 2^32 cases at worst (once in 2^63 where any of the
differing words differs in its lowest bit). The unit is the greatest number of tokens that
divides the block sizes of both workers, so it lies within one block on either side, and each
head has a value of its own, so ranks of any tensor-parallel degree can check what they hold.

What is sent and compared is sealed: H xor a key of the model's identity, the request, the
cache group, the unit's first token and the head. The right bytes in the wrong place do not match.
The decode worker compares the digests of what was announced with those of what it read
(`DigestCheck`). Either may come first; they are compared when all of both are here.

This finds errors, not attackers: the keys are no secret.

Source: multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
`digest_kernel.py` computes the same on a GPU. No I/O, no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tasuki.v1 import kv_pb2 as pb

UINT64 = np.uint64
Values = npt.NDArray[np.uint64]

_GOLDEN = UINT64(0x9E3779B97F4A7C15)
_MIX_1 = UINT64(0xBF58476D1CE4E5B9)
_MIX_2 = UINT64(0x94D049BB133111EB)
_COLUMNS = 1 << 32  # where column keys begin, apart from those of rows
_Place = tuple[int, int]  # group, first token


@dataclass(frozen=True, slots=True)
class UnitDigests:
    """Digests of some units of a pool, not sealed.

    Attributes:
        first_head: Of the model, the first that they are of.
        units: Numbers of the units in the pool.
        values: [units, heads] uint64.
    """

    first_head: int
    units: Sequence[int]
    values: Values


def scramble(values: Values) -> Values:
    """A bijection of 64-bit numbers whose outputs look random.

    Source: the finalizer of SplitMix64, Steele, Lea and Flood (2014).
    """
    with np.errstate(over="ignore"):
        z = values * _GOLDEN
        z = (z ^ (z >> UINT64(30))) * _MIX_1
        z = (z ^ (z >> UINT64(27))) * _MIX_2
        mixed: Values = z ^ (z >> UINT64(31))
        return mixed


@lru_cache(maxsize=16)
def row_keys(rows: int) -> npt.NDArray[np.int64]:
    """[rows] int64, odd."""
    return _odd(np.arange(1, rows + 1, dtype=np.uint64))


@lru_cache(maxsize=16)
def column_keys(columns: int) -> npt.NDArray[np.int64]:
    """[columns] int64, odd."""
    return _odd(np.arange(1, columns + 1, dtype=np.uint64) + UINT64(_COLUMNS))


def _odd(numbers: Values) -> npt.NDArray[np.int64]:
    return (scramble(numbers) | UINT64(1)).view(np.int64)


@dataclass(frozen=True, slots=True)
class Seal:
    """What binds digests to a place in one request.

    Attributes:
        key: Of identity and request.
        unit_tokens: Tokens in a unit.
        one_in: One unit in so many has a digest.
    """

    key: int
    unit_tokens: int
    one_in: int

    @classmethod
    def of(cls, identity: bytes, request_id: str, unit_tokens: int, one_in: int) -> Seal:
        """For a request's KV in a model of `identity`."""
        name = request_id.encode()
        digest = hashlib.blake2b(name, digest_size=8, key=identity, person=b"tasuki-kv").digest()
        return cls(int.from_bytes(digest, "little"), unit_tokens, one_in)

    def chosen(self, group: int, first_token: int, end_token: int) -> list[int]:
        """The first tokens of the units that have a digest, of those that begin in a range.

        Args:
            first_token: A multiple of `unit_tokens`.
        """
        tokens = np.arange(first_token, end_token, self.unit_tokens, dtype=np.uint64)
        if self.one_in > 1:
            tokens = tokens[self._keys(group, tokens) % UINT64(self.one_in) == 0]
        return [int(token) for token in tokens]

    def sealed(self, values: Values, group: int, tokens: Sequence[int], first_head: int) -> Values:
        """`values` [units, heads], bound to the units that begin with `tokens`."""
        heads = np.arange(first_head + 1, first_head + 1 + values.shape[1], dtype=np.uint64)
        keys = self._keys(group, np.asarray(tokens, dtype=np.uint64))
        with np.errstate(over="ignore"):
            return values ^ scramble(keys[:, None] + heads[None, :])

    def _keys(self, group: int, tokens: Values) -> Values:
        """One for each unit: [units] uint64."""
        place = (UINT64(group) << UINT64(40)) + tokens
        with np.errstate(over="ignore"):
            return scramble(scramble(place + UINT64(1)) + UINT64(self.key))


class DigestCheck:
    """Of one handoff.

    Args:
        seal: Of its request.

    Attributes:
        told: Tokens whose digests were heard, contiguously from 0.
        compared: Values that `wrong` compared.
    """

    def __init__(self, seal: Seal) -> None:
        self.told = 0
        self.compared = 0
        self._seal = seal
        self._expected: dict[_Place, Values] = {}
        self._places: dict[int, _Place] = {}  # of our units that were chosen
        self._arrived: list[UnitDigests] = []

    def choose(
        self, group: int, first_token: int, end_token: int, units: Sequence[int]
    ) -> list[int]:
        """Which of our units are to be compared.

        Args:
            first_token: Of the first unit.
            end_token: Of the tokens that are read.
            units: Ours, in the order of their tokens.
        """
        chosen = []
        for token in self._seal.chosen(group, first_token, end_token):
            unit = units[(token - first_token) // self._seal.unit_tokens]
            self._places[unit] = (group, token)
            chosen.append(unit)
        return chosen

    def hear(self, digests: pb.Digests) -> str:
        """Take in what the prefill worker says; with a gap before it, nothing.

        Returns:
            Why it cannot be so; empty: it can.
        """
        if digests.first_token > self.told:
            return ""  # one before it was lost; it is said again
        for part in digests.groups:
            row_bytes, rest = divmod(len(part.values), max(1, len(part.tokens)))
            if rest or row_bytes % 8 or (part.tokens and not row_bytes):
                return f"sent {len(part.values)} bytes of digests for {len(part.tokens)} units"
            values = np.frombuffer(part.values, dtype="<u8").reshape(len(part.tokens), -1)
            for token, row in zip(part.tokens, values, strict=True):
                self._expected[part.group, token] = row
        self.told = max(self.told, digests.end_token)
        return ""

    def arrived(self, digests: Sequence[UnitDigests]) -> None:
        """Digests of what was read, as it is here."""
        self._arrived += digests

    def wrong(self) -> list[_Place]:
        """The units (group, first token) that do not hold what was announced, in order."""
        here = {unit for part in self._arrived for unit in part.units}
        wrong = {place for unit, place in self._places.items() if unit not in here}
        for part in self._arrived:
            places = [self._places[unit] for unit in part.units]
            for group in {group for group, _ in places}:
                rows = [row for row, place in enumerate(places) if place[0] == group]
                tokens = [places[row][1] for row in rows]
                got = self._seal.sealed(part.values[rows], group, tokens, part.first_head)
                end = part.first_head + got.shape[1]
                for token, row in zip(tokens, got, strict=True):
                    expected = self._expected.get((group, token))
                    same = expected is not None and np.array_equal(
                        expected[part.first_head : end], row
                    )
                    if not same:
                        wrong.add((group, token))
                self.compared += got.size
        return sorted(wrong)

    @staticmethod
    def verdict(peer: str, wrong: Sequence[_Place]) -> str:
        """What people are told of units that are wrong, at least one."""
        group, token = wrong[0]
        return (
            f"{len(wrong)} units of KV from prefill worker {peer} are not what it announced, the"
            f" first at token {token} of cache group {group} (--kv-digest): check the memory and"
            " the network between the two"
        )
