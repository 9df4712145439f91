"""The pool's size and the longest request are settled from what is asked and what there is."""

from pathlib import Path

import pytest

from tasuki.worker.config import ConfigError
from tasuki.worker.memory import PoolSize, available_bytes, size_pool


def size(**overrides: int | None) -> PoolSize:
    settings: dict[str, int | None] = {
        "block_bytes": 1_000,
        "block_size": 16,
        "model_context": 2_048,
        "kv_memory": None,
        "max_model_len": None,
        "available": 100_000_000,
    }
    return size_pool(**(settings | overrides))  # type: ignore[arg-type]


def test_with_room_the_context_is_the_models() -> None:
    assert size() == PoolSize(num_blocks=32 * 128, max_model_len=2_048)


def test_the_default_takes_a_share_of_what_is_free() -> None:
    assert size(available=800_000) == PoolSize(num_blocks=100, max_model_len=800)


def test_a_gpus_share_is_taken_whole() -> None:
    assert size(available=800_000, spare=False) == PoolSize(num_blocks=800, max_model_len=2_048)
    assert size(spare=False).num_blocks == 100_000
    with pytest.raises(ConfigError, match="the pool holds 0 blocks"):
        size(available=-5, spare=False)
    with pytest.raises(ConfigError, match="900 are free for it on this GPU"):
        size(available=900, kv_memory=1_000, spare=False)


def test_a_small_pool_shortens_the_context_so_that_two_requests_fit() -> None:
    assert size(kv_memory=20_000) == PoolSize(num_blocks=20, max_model_len=160)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_model_len": 4_096}, ["4096", "2048"]),
        ({"max_model_len": 1_024, "kv_memory": 20_000}, ["1024", "20 blocks", "160", "128000"]),
        ({"kv_memory": 1_500}, ["1 blocks", "2000"]),
        ({"kv_memory": 10**12}, [str(10**12), "100000000"]),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_limit(
    overrides: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        size(**overrides)
    for word in words:
        assert word in str(error.value)


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 1 << 20


def test_page_cache_of_a_container_is_memory_that_can_be_taken(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{63 << 20}\n")
    stat = f"anon {3 << 20}\nfile {60 << 20}\ninactive_file {50 << 20}\nactive_file {8 << 20}\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_bytes(tmp_path) == 59 << 20


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(f"{64 << 20}\n")
    (group / "memory.usage_in_bytes").write_text(f"{63 << 20}\n")
    stat = f"active_file 0\ntotal_inactive_file {50 << 20}\ntotal_active_file {8 << 20}\n"
    (group / "memory.stat").write_text(stat)
    assert available_bytes(tmp_path) == 59 << 20
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(tmp_path) > 1 << 20


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 1 << 20
