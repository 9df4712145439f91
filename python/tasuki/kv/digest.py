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

This finds errors, not attackers: the keys are no secret.

Source: multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
`digest_kernel.py` computes the same on a GPU. Pure but for cached keys; any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

UINT64 = np.uint64
Values = npt.NDArray[np.uint64]

_GOLDEN = UINT64(0x9E3779B97F4A7C15)
_MIX_1 = UINT64(0xBF58476D1CE4E5B9)
_MIX_2 = UINT64(0x94D049BB133111EB)
_COLUMNS = 1 << 32  # where column keys begin, apart from those of rows


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
