"""The tensors of a model folder: safetensors in one file or in shards, read one at a time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tasuki.models.errors import ModelError
from tasuki.models.shard import Slice
from tasuki.models.weights import BLOCK, FP8, Fp8Weight

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SCALES = "_scale_inv"  # of the weight of this name: what its blocks are multiplied by
_KV_SCALES = (".k_scale", ".v_scale")  # of a cache in fp8; worker/kv_calibration.py reads them
_PROGRESS_EVERY_S = 2.0
_DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint:
    """Tensors of one folder by name, converted as they are read.

    Loads that take longer than a few seconds report how far they are on stderr.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open the folder's safetensors.

        Raises:
            ModelError: There are none, or one is missing or damaged.
        """
        self._folder, self._dtype, self._device = folder, dtype, device
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file in _files(folder):
            try:
                handle: Any = safe_open(folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{folder / file} cannot be read: {error}; fetch the model again"
                ) from error
            self._handles[file] = handle
            self._file_of.update(dict.fromkeys(handle.keys(), file))
        self._read = 0
        self._said_at = time.monotonic()

    @property
    def names(self) -> frozenset[str]:
        """All tensors of the folder."""
        return frozenset(self._file_of)

    def require(self, wanted: Iterable[str], ignored: Iterable[str] = ()) -> None:
        """Check that the folder holds exactly the tensors that the model needs.

        Args:
            wanted: Names that must be there.
            ignored: Names that may be there beside them.

        Raises:
            ModelError: Some are missing, or some are not known; named.
        """
        wanted = frozenset(wanted)
        missing = sorted(wanted - self.names)
        extra = sorted(
            name
            for name in self.names - wanted - frozenset(ignored)
            if not name.endswith(".rotary_emb.inv_freq")
            and name.removesuffix(_SCALES) not in wanted
            and not name.endswith(_KV_SCALES)
        )
        problems = [
            f"{len(names)} {what} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
            for what, names in (("missing", missing), ("not known", extra))
            if names
        ]
        if problems:
            raise ModelError(
                f"{self._folder}: tensors {' and '.join(problems)}: the weights do not belong to"
                f" this config.json"
            )

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """Read one tensor, in the dtype and on the device asked for at the start.

        Args:
            name: Its name.
            shape: Of the whole tensor.
            part: What to read of it; None: all.

        Raises:
            ModelError: Its shape differs from what config.json implies, or its numbers would
                need scales.
        """
        stored = self._handles[self._file_of[name]].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ModelError(
                f"{self._folder}: {name} is {tuple(stored.get_shape())}, config.json implies"
                f" {shape}"
            )
        tensor: torch.Tensor
        if part is None:
            tensor = stored[:]
        elif part.dim == 0:
            tensor = stored[part.begin : part.end]
        else:
            tensor = stored[:, part.begin : part.end]
        self._progress()
        if tensor.dtype == FP8:
            raise ModelError(
                f"{self._folder}: {name} is float8_e4m3fn: fp8 is supported for weights of GEMMs"
                f" with {name}{_SCALES} and a quantization_config of blocks of {BLOCK} x {BLOCK}"
            )
        if tensor.dtype not in _DENSE:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self._folder}: {name} is {kind}, must be float32, bfloat16, float16 or float64:"
                " give an unquantized model"
            )
        return tensor.to(device=self._device, dtype=self._dtype)

    def fp8(self, name: str, shape: tuple[int, ...]) -> Fp8Weight | None:
        """Read a weight in fp8 with its blocks' scales; None: it is not kept so.

        Raises:
            ModelError: A shape differs from what config.json implies, or the dtype; or a scale
                is not a positive number.
        """
        if name + _SCALES not in self._file_of:
            return None
        blocks = tuple(-(-size // BLOCK) for size in shape)
        values, scales = (
            self._handles[self._file_of[each]].get_tensor(each) for each in (name, name + _SCALES)
        )
        if tuple(values.shape) != shape or tuple(scales.shape) != blocks or values.dtype != FP8:
            raise ModelError(
                f"{self._folder}: {name} is {tuple(values.shape)} {values.dtype} with scales"
                f" {tuple(scales.shape)}, config.json implies {shape} float8_e4m3fn with {blocks}"
            )
        self._progress()
        scales = scales.float()
        if bad := int((~scales.isfinite() | (scales < 0)).sum()):  # 0: a block of zeros
            raise ModelError(
                f"{self._folder}: {bad} of {scales.numel()} scales in {name}{_SCALES} are NaN,"
                f" infinite or negative: fetch the model again"
            )
        scales = scales.to(self._device)
        return Fp8Weight(values.to(self._device), scales, BLOCK, BLOCK, self._dtype)

    def kv_scale(self, name: str) -> float:
        """Read a scale of the KV cache.

        Raises:
            ModelError: It is not one positive number.
        """
        stored = self._handles[self._file_of[name]].get_tensor(name).float()
        if stored.numel() != 1 or not 0 < float(stored) < math.inf:
            value = f"{float(stored):g}" if stored.numel() == 1 else f"{stored.numel()} numbers"
            raise ModelError(
                f"{self._folder}: {name} is {value}, must be one number above 0: use"
                f" --kv-dtype auto, or fetch the model again"
            )
        return float(stored)

    def _progress(self) -> None:
        self._read += 1
        now = time.monotonic()
        if now - self._said_at >= _PROGRESS_EVERY_S:
            self._said_at = now
            done = f"{self._read}/{len(self._file_of)} tensors"
            print(f"model: loading {self._folder.name}: {done}", file=sys.stderr, flush=True)


def _files(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():  # whatever index an earlier save left: as transformers
        return [_SINGLE]
    index = folder / _INDEX
    if index.is_file():
        try:
            files = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            missing = [file for file in files if not (folder / file).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(
                f"{index} is not a shard index: {error!r}; fetch the model again"
            ) from error
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(files)} shards are missing"
                f" ({', '.join(missing[:4])}): fetch the model again"
            )
        return files
    raise ModelError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}: convert the weights to safetensors"
        f" (transformers: save_pretrained)"
    )
