"""The files of a Hugging Face folder that say what its model is, whatever will run it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.models.errors import ModelError


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: There is none, or it is not a JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, must be an object")
    return value


def architecture_of(config: Mapping[str, Any], folder: Path) -> str:
    """The class name of the model in a folder.

    Raises:
        ModelError: config.json names none, or several.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"{folder}/config.json: architectures is {names!r}, must be a list")
    if len(names) != 1:
        raise ModelError(f"{folder}/config.json names {len(names)} architectures, must be 1")
    return str(names[0])


def positive(name: str, value: Any) -> float:
    """The number that config.json has under a name.

    Raises:
        ValueError: It is not a finite number above 0.
    """
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, must be a number above 0")
    return float(value)


def read_eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end a generation: generation_config.json first, else config.json.

    Raises:
        ModelError: The file is not a JSON object, or its `eos_token_id` no token id or list
            of them.
    """
    file = folder / "generation_config.json"
    eos = _read_object(file).get("eos_token_id") if file.is_file() else None
    if eos is None:
        file, eos = folder / "config.json", config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{file}: eos_token_id is {eos!r}, must be a token id, a list of them or null"
        )
    return tuple(ids)
