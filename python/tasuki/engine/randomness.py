"""Random numbers without a generator: a pure function of (seed, choice, position).

A request that goes on elsewhere, in another batch or after a preemption draws
the same numbers again.
"""

from __future__ import annotations

from hashlib import blake2b

_DOMAIN = b"tasuki-sample-v1"
_U64 = 2**64 - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """One number in [0, 1) for the token at an output position of a choice.

    53 bits of BLAKE2b over the three, as u64le, u32le and u32le.
    """
    data = (
        (seed & _U64).to_bytes(8, "little")
        + choice.to_bytes(4, "little")
        + position.to_bytes(4, "little")
    )
    digest = blake2b(data, digest_size=8, person=_DOMAIN).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
