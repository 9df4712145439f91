"""What `--transport` names: data that commands read without loading a library."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasuki.kv import backends
from tasuki.kv.backends import BACKENDS, missing
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transfer_plan import LayoutMismatchError, make_plans
from tasuki.kv.transport import TransportError, create_transport
from tasuki.options import options_of
from tasuki.worker.config import ConfigError, WorkerConfig


def test_every_name_leads_to_a_transport() -> None:
    assert set(backends.ALIASES.values()) <= set(BACKENDS)
    for name, backend in BACKENDS.items():
        assert backend.name == name
        module, attribute = backend.target.split(":")
        assert hasattr(importlib.import_module(module), attribute)
    untried = [name for name, backend in BACKENDS.items() if not backend.tried]
    assert untried == ["nixl-libfabric", "nixl-uccl"]


def test_the_option_describes_every_name() -> None:
    help_text = options_of(WorkerConfig)["transport"].help
    for name, backend in BACKENDS.items():
        assert (f"{name} ({backend.note})" if backend.tried else name) in help_text
        assert bool(backend.note) == backend.tried


@pytest.mark.system
def test_the_names_load_no_library() -> None:
    loaded = "import sys; import tasuki.kv.backends; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_what_is_missing_is_said_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nixl_here"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    here = backends.Backend("x", "", ("nixl_here",), "pip install it", "host", "", plugin="FAST")
    assert missing(here) == "NIXL has no plugin FAST here: pip install it"
    plugins = tmp_path / ".nixl_here.mesonpy.libs" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "libplugin_FAST.so").touch()
    assert missing(here) == ""
    gone = backends.Backend("x", "", ("nixl_gone", "nixl_lost"), "pip install it", "host", "")
    assert missing(gone) == "nixl_gone or nixl_lost is not installed: pip install it"


def test_a_package_that_is_missing_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportError, match=f"needs Mooncake.*: {backends.INSTALL_MOONCAKE}$"):
        create_transport("mooncake")


def test_an_untried_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(TransportError):
        create_transport("nixl-uccl")
    assert "no test of Tasuki has moved KV with it" in caplog.text


def test_a_worker_takes_the_names_alone() -> None:
    assert WorkerConfig(model=Path("m")).kv_transport == "nixl-ucx"
    assert WorkerConfig(model=Path("m"), transport="nixl").kv_transport == "nixl"
    with pytest.raises(ConfigError, match=r"transport is 'carrier-pigeon': use one of nixl-ucx, "):
        WorkerConfig(model=Path("m"), transport="carrier-pigeon")


def test_two_workers_of_different_transports_are_refused_by_name() -> None:
    layout = CacheLayout(4, 1, 1, 1, 16, torch.float32)
    pool = layout.allocate()
    ours, theirs = (layout.to_wire(pool, transport=name) for name in ("mooncake", "nixl/UCX"))
    with pytest.raises(LayoutMismatchError, match="mooncake here and nixl/UCX at the prefill"):
        make_plans([ours], [theirs])
