"""From a model's name to a local Hugging Face folder.

A name is an alias of the default model, a local folder, or a hub id. Nothing
here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from tasuki.models import cache, default_model, hub
from tasuki.models.fetch_errors import FetchError

DEFAULT_MODEL = default_model.ALIASES[0]

__all__ = [
    "DEFAULT_MODEL",
    "FetchError",
    "config_folder",
    "list_models",
    "may_be_fetched",
    "model_path",
    "refuse_absent",
    "resolve_model",
]


def resolve_model(name: str) -> Path:
    """The model's local folder, after fetching it if need be.

    Args:
        name: `smollm2-135m`, a folder with a `config.json`, or `owner/model[@revision]`.

    Raises:
        FetchError: There is no such model, or it could not be had.
    """
    found = model_path(name)
    if found is not None:
        return found
    if name.lower() in default_model.ALIASES:
        return default_model.ensure()
    if hub.is_hub_id(name):
        return hub.fetch(name)
    refuse_absent(name)


def may_be_fetched(name: str) -> bool:
    """Whether a name is of a model that need not be on this machine."""
    return name.lower() in default_model.ALIASES or hub.is_hub_id(name)


def refuse_absent(name: str) -> NoReturn:
    """Say why there is no folder of this model on this machine, and what helps.

    Raises:
        FetchError: Always.
    """
    if may_be_fetched(name):
        raise FetchError(f"{name} is not on this machine: run `tasuki model fetch {name}`")
    raise FetchError(
        f"no model {name!r}: give {DEFAULT_MODEL!r}, a folder that holds a config.json, "
        "or a hub id owner/model"
    )


def config_folder(name: str) -> Path:
    """A folder with the model's `config.json`; of a model of the hub nothing else is fetched.

    Args:
        name: As of `resolve_model`.

    Raises:
        FetchError: There is no such model, or it could not be had.
    """
    if model_path(name) is None and hub.is_hub_id(name):
        return hub.fetch_config(name)
    return resolve_model(name)


def model_path(name: str) -> Path | None:
    """The model's folder if that is known without fetching, else None.

    A hub id always gives None: only the hub's own client knows its cache.

    Raises:
        FetchError: `name` is empty, or a folder but not a model's, or it cannot be read.
    """
    if not name:  # which `Path` takes for the current folder
        refuse_absent(name)
    folder = Path(os.path.expanduser(name))  # as it is where there is no such home folder
    try:
        is_folder = folder.is_dir()
        has_config = is_folder and (folder / "config.json").is_file()
    except OSError as error:
        raise FetchError(f"folder {folder} cannot be read: {error.strerror}") from error
    if is_folder:
        if not has_config:
            raise FetchError(f"folder {folder} has no config.json: not a Hugging Face model folder")
        return folder.resolve()
    if name.lower() in default_model.ALIASES and default_model.is_present(default_model.folder()):
        return default_model.folder()
    return None


def list_models() -> list[tuple[str, Path | None]]:
    """What can be named without a hub: (name, folder), the folder None until fetched."""
    known: list[tuple[str, Path | None]] = [(DEFAULT_MODEL, model_path(DEFAULT_MODEL))]
    root = cache.models_dir()
    if root.is_dir():
        for entry in sorted(root.iterdir()):
            if entry.name not in default_model.ALIASES and (entry / "config.json").is_file():
                known.append((entry.name, entry))
    return known
