"""Who may exchange KV: 16 bytes that are equal exactly when two workers' KV is.

Covers what the numbers in a block depend on: the parts of the model's config
that matter (rope among them), the weights and how they are quantized, the dtype
they are computed in, the dtype they are kept in with its scales, and the protocol.
Not the block size or the tensor-parallel degree: those are layout (`transfer_plan.py`).

Weights are fingerprinted from the safetensors headers and bytes sampled from
every tensor, so a folder of many gigabytes takes well under a second, and
sharding it otherwise changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tasuki.errors import TasukiError

PROTOCOL_VERSION = 2

_PERSON = b"tasuki-identity"
_SAMPLES = 4
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100 << 20

# Of config.json: what has no say in the numbers.
_COSMETIC = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)


class IdentityError(TasukiError):
    """A model folder cannot be fingerprinted."""


def model_identity(
    folder: Path,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    weights: str = "auto",
    quantization: str = "none",
    kv_scales: Sequence[tuple[int, int]] = (),
    states: Sequence[str] = (),
) -> bytes:
    """Identity of the KV that this model makes.

    Args:
        folder: local model folder with config.json and safetensors.
        dtype: of the computation.
        kv_dtype: of the cache.
        weights: `dummy`: random ones, a function of the config; no safetensors are read.
        quantization: How the weights are rounded when they are loaded; `none`: not at all.
        kv_scales: Of an fp8 cache, by layer (attention/kv_scales.py).
        states: Of layers that keep one, what its bytes are, in words; empty: no layer does.

    Returns:
        16 bytes.

    Raises:
        IdentityError: a file is missing or malformed.
    """
    parts = {
        "protocol": PROTOCOL_VERSION,
        "config": _config(folder / "config.json"),
        "weights": "dummy" if weights == "dummy" else _weights(folder).hex(),
        "dtype": str(dtype),
        "kv_dtype": str(kv_dtype),
    }
    if quantization != "none":
        parts["quantization"] = quantization
    if kv_scales:
        parts["kv_scales"] = [list(scales) for scales in kv_scales]
    if states:
        parts["states"] = list(states)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16, person=_PERSON).digest()


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise IdentityError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(config, dict):
        raise IdentityError(f"{path} is not a JSON object: fetch the model again")
    return {key: value for key, value in config.items() if key not in _COSMETIC}


def _weights(folder: Path) -> bytes:
    """Digest of every tensor's name, dtype, shape and sampled bytes, in order of names."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise IdentityError(f"no *.safetensors in {folder}: convert the model first")
    tensors: dict[str, bytes] = {}
    for file in files:
        tensors.update(_tensors(file))
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.digest()


def _tensors(file: Path) -> Iterator[tuple[str, bytes]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size_bytes = os.fstat(stream.fileno()).st_size
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise IdentityError(
                f"{file} has a header of {length} bytes in {size_bytes}: fetch the model again"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise IdentityError(
                f"{file} has a damaged header: {error}; fetch the model again"
            ) from error
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, end = info["data_offsets"]
            if not 0 <= begin <= end <= size_bytes - 8 - length:
                raise IdentityError(
                    f"{file}: {name} ends past the file: fetch the model again, the download is"
                    " partial"
                )
            digest = hashlib.blake2b(digest_size=16)
            digest.update(json.dumps([name, info["dtype"], info["shape"]]).encode())
            span = max(0, end - begin - _SAMPLE_BYTES)
            for sample in range(_SAMPLES):
                offset = begin + span * sample // (_SAMPLES - 1)
                count = min(_SAMPLE_BYTES, end - offset)
                digest.update(os.pread(stream.fileno(), count, 8 + length + offset))
            yield name, digest.digest()
