"""The decode worker's comparison of one handoff's KV with the digests of what was announced.

Part of the state of `decode_handoff.py`: no I/O, no clock. Digests may come before or after
the bytes; they are compared when all of both are here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasuki.kv.digest import Seal, UnitDigests, Values
from tasuki.v1 import kv_pb2 as pb

_Place = tuple[int, int]  # group, first token


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
