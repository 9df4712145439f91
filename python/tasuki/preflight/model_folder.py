"""Whether a model folder is whole: configuration, tokenizer, every shard, every byte."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from tasuki.preflight.result import Check, fail, ok, warn

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOKENIZER = "tokenizer.json"
_LONGEST_HEADER = 100_000_000  # bytes. Source: the format's own limit
_AGAIN = "fetch the model again (`tasuki model fetch`)"
# What reading JSON raises that is none, nests too deeply, or has another form.
_DAMAGED = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def model_checks(
    folder: Path, weights: bool = True, slow: bool = True, hashes: bool = False
) -> list[Check]:
    """All of them, in the order in which a worker needs the files.

    Args:
        folder: Of the model.
        weights: Whether they are read (not with --load-format dummy).
        slow: Also parse the tokenizer, which may have tens of megabytes.
        hashes: Compare contents with the SHA-256 that came with the model; reads everything.
    """
    checks = [_json(folder, "config.json")]
    if (folder / _TOKENIZER).is_file():
        name = "model tokenizer"
        checks.append(_json(folder, _TOKENIZER) if slow else ok(name, _TOKENIZER))
    else:
        remedy = f"put a {_TOKENIZER} there: the router needs it beside the weights"
        checks.append(warn("model tokenizer", f"no {_TOKENIZER}", "one", remedy))
    if weights:
        checks.append(_shards(folder))
    if hashes:
        checks.append(_hashes(folder))
    return checks


def _json(folder: Path, file: str) -> Check:
    name = "model " + file.removesuffix(".json")
    try:
        json.loads((folder / file).read_bytes())
    except (OSError, *_DAMAGED) as error:
        return fail(name, f"{file}: {error}", "JSON that can be read", _AGAIN)
    return ok(name, file)


def _shards(folder: Path) -> Check:
    name = "model weights"
    try:
        files = _shard_files(folder)
        missing = [file for file in files if not (folder / file).is_file()]
    except (OSError, *_DAMAGED) as error:
        return fail(name, f"{_INDEX}: {error!r}", "an index of shards", _AGAIN)
    if not files:
        remedy = "convert the weights to safetensors (transformers: save_pretrained)"
        return fail(name, f"neither {_SINGLE} nor {_INDEX}", "safetensors", remedy)
    if missing:
        found = f"{len(missing)} of {len(files)} shards are missing: {', '.join(missing[:4])}"
        return fail(name, found, "all of them", _AGAIN)
    total = 0
    for file in files:
        try:
            size, told = (folder / file).stat().st_size, _told_size(folder / file)
        except (OSError, struct.error, *_DAMAGED) as error:
            return fail(name, f"{file}: {error!r}", "a file of safetensors", _AGAIN)
        if size != told:
            return fail(name, f"{file} has {size:,} bytes", f"{told:,}, as its header says", _AGAIN)
        total += size
    return ok(name, f"{len(files)} files, {total / 1e9:.2f} GB", total_bytes=total)


def _shard_files(folder: Path) -> list[str]:
    """The files of the weights, there or not; none where there is no index and no single file."""
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    if not (folder / _INDEX).is_file():
        return []
    return sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))


def _told_size(file: Path) -> int:
    """The size that a file of safetensors must have by its header. Source: the format."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(stream.read(length))
    ends = [each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)


def _hashes(folder: Path) -> Check:
    name, compared = "model hashes", 0
    for file, wanted in _given_hashes(folder):
        try:
            with (folder / file).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            return fail(name, f"{file}: {error}", "a file that can be read", _AGAIN)
        if found != wanted:
            return fail(name, f"{file} has sha256 {found}", wanted, _AGAIN)
        compared += 1
    if not compared:
        return ok(name, "none came with the model")
    return ok(name, f"all files compared are as they came: {compared}")


def _given_hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, SHA-256) from a SHA256SUMS file, and as huggingface_hub keeps them."""
    sums = folder / "SHA256SUMS"
    if sums.is_file():
        for line in sums.read_text(errors="replace").splitlines():
            digest, _, file = line.partition(" ")
            if _SHA256.fullmatch(digest):
                yield file.strip().lstrip("*"), digest
    for path in sorted(folder.glob("*")):
        blob = path.resolve().name if path.is_symlink() else ""  # cache: link to blobs/SHA-256
        if _SHA256.fullmatch(blob):
            yield path.name, blob
    for kept in sorted((folder / ".cache/huggingface/download").glob("*.metadata")):
        lines = kept.read_text(errors="replace").splitlines()
        if len(lines) > 1 and _SHA256.fullmatch(lines[1]):
            yield kept.name.removesuffix(".metadata"), lines[1]
