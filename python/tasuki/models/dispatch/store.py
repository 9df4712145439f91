"""The choices measured on this machine, in the cache folder: one file for what they depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasuki.models import cache, gemm_kernels, gemms, kernels
from tasuki.models.dispatch.table import CHOICES, DispatchError, Table
from tasuki.whole_file import write_whole


def facts_of(device: torch.device) -> dict[str, str]:
    """What timings depend on beside shapes, dtype and rows."""
    facts = {name: _version(name) for name in ("torch", "triton")}
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts["driver"] = _driver()
    digest = hashlib.sha256()
    for module in (kernels, gemm_kernels, gemms):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(" ".join(map(str, CHOICES)).encode())
    facts["kernels"] = digest.hexdigest()[:16]
    return facts


def path_of(facts: Mapping[str, str]) -> Path:
    """Where the choices of such a machine lie."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache.cache_root() / "dispatch" / f"{key}.json"


def load(path: Path) -> Table:
    """The choices in a file.

    Raises:
        DispatchError: It cannot be read, or holds something else.
    """
    try:
        given: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DispatchError(
            f"dispatch is {path}, which cannot be read: {error}; use a file that"
            " --dispatch measured wrote"
        ) from None
    if not isinstance(given, dict):
        raise DispatchError(
            f"dispatch is {path}, which is no JSON object: use a file that --dispatch"
            " measured wrote"
        )
    return Table.from_json(given.get("choices"))


def store(path: Path, facts: Mapping[str, str], table: Table) -> None:
    """Write whole or not at all.

    Raises:
        OSError: There is no room, or no permission.
    """
    text = json.dumps({"facts": facts, "choices": table.to_json()}, indent=1) + "\n"
    write_whole(path, lambda part: part.write_text(text))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
