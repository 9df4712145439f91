"""Names for blocks by content: chained BLAKE2b-128, the same in Rust and Python.

`root = H("tasuki-block-v1" || identity || u32le(len(tenant)) || tenant)` and
`hash_i = H(hash_{i-1} || tokens of block i as u32le)`. Equal hashes mean equal
model, tenant and tokens from the sequence's start to the block's end. Golden
values: tests/golden/block_hashes.json.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16
_DOMAIN = b"tasuki-block-v1"


def root_hash(identity: bytes, tenant: str) -> bytes:
    """The start of every chain of one model identity (16 bytes) and tenant."""
    name = tenant.encode()
    data = _DOMAIN + identity + len(name).to_bytes(4, "little") + name
    return blake2b(data, digest_size=HASH_BYTES).digest()


def token_array(tokens: Sequence[int]) -> array[int]:
    """Tokens as unsigned 32-bit integers, the form that hashing and batching read."""
    return array("I", tokens)


def extend_hashes(
    hashes: list[bytes], root: bytes, tokens: array[int], block_size: int, num_blocks: int
) -> None:
    """Append the hashes of the blocks `len(hashes)` to `num_blocks - 1`.

    Args:
        hashes: Those of the sequence's first blocks; changed in place.
        root: Of the chain.
        tokens: Of the whole sequence, as `token_array` gives them.
        block_size: Tokens in a block.
        num_blocks: How many blocks are to have a hash; they must be full.
    """
    previous = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        chunk = tokens[index * block_size : (index + 1) * block_size]
        if sys.byteorder == "big":
            chunk.byteswap()
        previous = blake2b(previous + chunk.tobytes(), digest_size=HASH_BYTES).digest()
        hashes.append(previous)
