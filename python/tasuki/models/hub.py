"""Fetches a model from a Hugging Face hub by id, into the hub's own cache.

`HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_HOME` and the rest mean what
`huggingface_hub` says they mean.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tasuki.models.fetch_errors import FetchError, say

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
# Of folders the chat templates: additional_chat_templates/tool_use.jinja.
_OF_FOLDERS = [f"*/{each}" for each in _WANTED if each != "*.jinja"]
_UNWANTED = [*_OF_FOLDERS, "consolidated*", "*.gguf", "training_args*", "README*"]
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR}


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `owner/model` or `owner/model@revision`."""
    return _ID.fullmatch(name) is not None


def fetch(name: str) -> Path:
    """Make sure that the model `owner/model[@revision]` is in the hub's cache.

    Returns:
        Its folder there.

    Raises:
        FetchError: The hub cannot be reached, refuses, or has no such model, its cache
            cannot be written, or the model has no safetensors.
    """
    folder = _snapshot(name, _WANTED)
    if not any(folder.glob("*.safetensors")):
        raise FetchError(f"{name} has no *.safetensors file: choose a model that has")
    say(f"ready: {folder}")
    return folder


def fetch_config(name: str) -> Path:
    """A folder of the hub's cache with the `config.json` of `owner/model[@revision]`.

    Raises:
        FetchError: As `fetch`, or there is no such file.
    """
    folder = _snapshot(name, ["config.json"])
    if not (folder / "config.json").is_file():
        raise FetchError(f"{name} has no config.json: choose a model that has")
    return folder


def _snapshot(name: str, wanted: list[str]) -> Path:
    """The cached folder of a model's snapshot, with the files wanted."""
    match = _ID.fullmatch(name)
    if match is None:
        raise FetchError(f"{name!r} is not a hub id of the form owner/model[@revision]")
    from huggingface_hub import snapshot_download

    say(f"looking for {name} in the hub's cache and at the hub …")
    try:
        got = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=wanted,
            ignore_patterns=_UNWANTED,
        )
    except Exception as error:
        raise FetchError(_explain(name, error)) from error
    return Path(got)


def _explain(name: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: the hub has no such revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{name}: the hub has no such model, or it is private and HF_TOKEN is not set"
    if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
        return (
            f"{name} cannot be written to the hub's cache {constants.HF_HUB_CACHE}: "
            f"{os.strerror(error.errno)}; set HF_HUB_CACHE to a writable folder with room"
        )
    if constants.HF_HUB_OFFLINE:
        return f"{name} is not in the hub's cache, and HF_HUB_OFFLINE is set: unset it, or fetch it"
    first_line = (str(error).strip() or repr(error)).splitlines()[0]
    return (
        f"{name}: the hub at {constants.ENDPOINT} cannot be reached and the model is not in its "
        f"cache ({type(error).__name__}: {first_line}); give a local folder instead: --model DIR"
    )
