"""Random numbers without a generator: a pure function of (seed, choice, position).

A request that goes on elsewhere, in another batch or after a preemption draws
the same numbers again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_KEY = struct.Struct("<QII")
_DOMAIN = b"tasuki-sample-v1"
_U64 = 2**64 - 1


def uniforms(keys: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """`uniform` of each (seed, choice, position)."""
    digests = [
        blake2b(_KEY.pack(seed & _U64, choice, position), digest_size=8, person=_DOMAIN).digest()
        for seed, choice, position in keys
    ]
    bits = np.frombuffer(b"".join(digests), dtype="<u8") >> np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1) for the token at an output position of a choice.

    53 bits of BLAKE2b over the three, as u64le, u32le and u32le.
    """
    return float(uniforms([(seed, choice, position)])[0])
