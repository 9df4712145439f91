"""A model folder that lacks something, or whose files are damaged, fails by the file's name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasuki.preflight.model_folder import model_checks
from tasuki.preflight.result import Check

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in SHARDS:
        save_file({f"weight of {shard}": np.ones((4, 8), np.float32)}, tmp_path / shard)
    index = {"weight_map": {f"weight of {shard}": shard for shard in SHARDS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    return tmp_path


def _bad(folder: Path, **options: bool) -> list[Check]:
    return [check for check in model_checks(folder, **options) if check.status != "ok"]


def test_a_whole_folder(folder: Path) -> None:
    assert _bad(folder, hashes=True) == []


def test_a_missing_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    [check] = _bad(folder)
    assert (check.name, check.status) == ("model weights", "fail")
    assert check.found == f"1 of 2 shards are missing: {SHARDS[1]}"
    assert _bad(folder, weights=False) == []


def test_a_shard_that_ends_early(folder: Path) -> None:
    whole = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes(whole[:-5])
    [check] = _bad(folder)
    assert (check.status, check.expected[:3]) == ("fail", f"{len(whole)}")


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff" * 64, header("nojson"), header("[]"), header('{"a": 5}'), header(DEEP)),
        *(header('{"a": {}}'), header('{"a": {"data_offsets": ["x", "y"]}}')),
        header('{"a": {"data_offsets": [0]}}'),
    ],
)
def test_a_shard_that_is_none(folder: Path, content: bytes) -> None:
    (folder / SHARDS[0]).write_bytes(content)
    [check] = _bad(folder)
    assert check.status == "fail" and SHARDS[0] in check.found


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_none(folder: Path, file: str) -> None:
    (folder / file).write_text("{")
    [check] = _bad(folder)
    assert check.status == "fail" and file in check.found


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_json_that_nests_deeply(folder: Path, file: str) -> None:
    (folder / file).write_text(DEEP)
    [check] = _bad(folder)
    assert check.status == "fail" and file in check.found


@pytest.mark.parametrize("name", ["5", "null"])
def test_an_index_without_names_of_files(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {name}}}}}')
    [check] = _bad(folder)
    assert check.status == "fail" and "model.safetensors.index.json" in check.found


def test_sums_that_are_no_text(folder: Path) -> None:
    (folder / "SHA256SUMS").write_bytes(b"\xff\xfe\n")
    assert _bad(folder, hashes=True) == []


def test_no_tokenizer_and_no_weights(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors.index.json").unlink()
    assert [(check.name, check.status) for check in _bad(folder)] == [
        ("model tokenizer", "warn"),
        ("model weights", "fail"),
    ]


def test_one_turned_bit_by_each_kind_of_hash(folder: Path) -> None:
    contents = bytearray((folder / SHARDS[0]).read_bytes())
    digest = hashlib.sha256(contents).hexdigest()
    contents[-1] ^= 1
    (folder / SHARDS[0]).write_bytes(contents)
    sums, kept = folder / "SHA256SUMS", folder / ".cache/huggingface/download"
    kept.mkdir(parents=True)
    for path, text in (
        (sums, f"{digest}  {SHARDS[0]}\n"),
        (kept / f"{SHARDS[0]}.metadata", f"{'0' * 40}\n{digest}\n1.0\n"),
    ):
        path.write_text(text)
        [check] = _bad(folder, hashes=True)
        assert (check.name, check.expected) == ("model hashes", digest)
        path.unlink()
    blobs = folder / "blobs"
    blobs.mkdir()
    (folder / SHARDS[0]).rename(blobs / digest)
    (folder / SHARDS[0]).symlink_to(blobs / digest)
    assert [check.name for check in _bad(folder, hashes=True)] == ["model hashes"]
    assert _bad(folder) == []  # it takes long, so only where it is asked for
