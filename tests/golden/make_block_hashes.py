"""Writes block_hashes.json, the golden values of the chained block hash.

Rust (`crates/core`) and Python (`tasuki.engine.block_hash`) are both tested
against the file, so that a router and a worker never disagree about a prefix.
Run it by hand when the definition changes, which also needs a new root string:

    python tests/golden/make_block_hashes.py

Definition, with BLAKE2b and a digest of 16 bytes:

    root   = H("tasuki-block-v1" || identity[16] || u32le(len(tenant)) || tenant as UTF-8)
    hash_0 = H(root       || tokens of block 0, each u32le)
    hash_i = H(hash_{i-1} || tokens of block i, each u32le)

Only full blocks have a hash.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

ROOT = b"tasuki-block-v1"


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def case(
    name: str, identity: bytes, tenant: str, block_size: int, tokens: Sequence[int]
) -> dict[str, object]:
    tenant_bytes = tenant.encode()
    root = digest(ROOT + identity + struct.pack("<I", len(tenant_bytes)) + tenant_bytes)
    hashes = []
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        parent = digest(parent + struct.pack(f"<{block_size}I", *block))
        hashes.append(parent.hex())
    return {
        "name": name,
        "identity": identity.hex(),
        "tenant": tenant,
        "block_size": block_size,
        "tokens": list(tokens),
        "root": root.hex(),
        "hashes": hashes,
    }


def main() -> None:
    zero = bytes(16)
    counting = bytes(range(16))
    ramp = list(range(40))
    cases = [
        case("no tokens", zero, "", 16, []),
        case("less than a block", zero, "", 16, ramp[:15]),
        case("exactly one block", zero, "", 16, ramp[:16]),
        case("two blocks and a rest", zero, "", 16, ramp),
        case("another identity", counting, "", 16, ramp),
        case("a tenant", zero, "team-a", 16, ramp),
        case("a tenant beyond ASCII", counting, "équipe 襷", 16, ramp),
        case("another block size", zero, "", 4, ramp[:11]),
        case("a block size of one", zero, "", 1, [7, 7, 7]),
        case("the largest tokens", counting, "t", 2, [0, 2**32 - 1, 2**31, 151_643]),
        case("equal blocks differ by place", zero, "", 2, [1, 2, 1, 2, 1, 2]),
    ]
    text = "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in cases) + "\n]\n"
    (Path(__file__).parent / "block_hashes.json").write_text(text)


if __name__ == "__main__":
    main()
