"""KV between engines of different tensor-parallel degrees, over NVLink: every byte compared."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))

from rank_processes import DecodeEngine, PrefillEngines, Shape, check_pull, decode_engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(600),
]

DEGREES = (1, 2, 4)
# A rank reads from its own GPU in some pairs, from the other one in the others.
SOURCES = Shape(head_kib=64, num_blocks=200, devices=("cuda:0", "cuda:1"))
READERS = replace(SOURCES, devices=("cuda:1", "cuda:0"))
SOURCE_SEED, OWN_SEED = 3, 5
SCATTERED = tuple(((i * 7 + 3) % 200, i) for i in range(0, 200, 2))
ADJACENT = tuple((i, i + 9) for i in range(4, 130))


@pytest.fixture(scope="module")
def sources() -> Iterator[PrefillEngines]:
    sources = PrefillEngines(SOURCES, DEGREES, SOURCE_SEED)
    yield sources
    sources.stop()


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[int, DecodeEngine]]:
    with decode_engines(READERS, DEGREES, OWN_SEED) as engines:
        yield {engine.degree: engine for engine in engines}


@pytest.mark.parametrize(
    ("prefill", "decode"), list(itertools.product(DEGREES, DEGREES)), ids=lambda d: str(d)
)
def test_every_rank_gets_its_heads_and_nothing_else_is_written(
    sources: PrefillEngines, readers: dict[int, DecodeEngine], prefill: int, decode: int
) -> None:
    reader, name = readers[decode], f"prefill of {prefill}"
    reader.ranked.connect(name, sources.pools[prefill])
    for pairs in (SCATTERED, ADJACENT):
        check_pull(reader, name, pairs, SOURCE_SEED)
    reader.ranked.forget(name)
