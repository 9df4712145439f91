"""KV between engines of different block sizes on GPUs, one or several: every byte compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))

from rank_processes import (
    DecodeEngine,
    PrefillEngines,
    Shape,
    check_pull,
    check_units,
    decode_engines,
    units_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

DEGREES = (1, 2)
SOURCE_SEED, OWN_SEED = 3, 5
DEVICES = tuple(f"cuda:{index}" for index in range(min(2, torch.cuda.device_count())))
READERS = Shape(head_kib=256, num_blocks=60, devices=DEVICES)


@pytest.fixture(scope="module", params=["nixl", "host-staged"])
def readers(request: pytest.FixtureRequest) -> Iterator[tuple[Shape, dict[int, DecodeEngine]]]:
    shape = replace(READERS, transport=request.param)
    with decode_engines(shape, DEGREES, OWN_SEED) as engines:
        yield shape, {engine.degree: engine for engine in engines}


@pytest.mark.parametrize("block_size", [16, 8, 12, 5])
def test_every_rank_gets_its_heads_of_the_tokens_and_nothing_else_is_written(
    readers: tuple[Shape, dict[int, DecodeEngine]], block_size: int
) -> None:
    own, engines = readers
    source = replace(own.with_blocks_of(block_size), devices=DEVICES[::-1])
    if source.num_blocks > 1 << 8:
        pytest.fail("contents need 8 bits for a block")
    sources = PrefillEngines(source, DEGREES, SOURCE_SEED)
    for prefill in DEGREES:
        for decode, reader in engines.items():
            name = f"prefill of {prefill} {block_size}"
            reader.ranked.connect(name, sources.pools[prefill])
            if block_size == own.block_size:
                pairs = tuple((theirs, ours) for theirs, ours in units_of(source, own))
                done = check_pull(reader, name, pairs, SOURCE_SEED)
            else:
                done = check_units(reader, name, (source, own), SOURCE_SEED)
            wire_s = done.finished_s - done.posted_s
            print(
                f"{own.transport}, {prefill} to {decode}, {block_size} to {own.block_size} tokens:"
                f" {done.moved_bytes / 1e6:.0f} MB in {1e3 * wire_s:.2f} ms,"
                f" {done.moved_bytes / wire_s / 1e9:.1f} GB/s"
            )
            reader.ranked.forget(name)
    sources.stop()
