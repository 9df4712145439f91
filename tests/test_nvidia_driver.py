"""A driver that is too old for the installed PyTorch, by what both say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tasuki import nvidia_driver
from tasuki.errors import TasukiError
from tasuki.launch import gpus

Install = Callable[[int, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """A driver that says so of itself, with a GPU; and torch for a version of CUDA."""

    class Driver:
        def __init__(self, version: int) -> None:
            self.version = version

        def cuDriverGetVersion(self, version: object) -> int:  # noqa: N802
            version._obj.value = self.version  # type: ignore[attr-defined]
            return 0

        def cuInit(self, flags: int) -> int:  # noqa: N802
            return 0

        def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
            count._obj.value = 1  # type: ignore[attr-defined]
            return 0

    def set_up(version: int, line: str) -> None:
        (tmp_path / "version.py").write_text(f"debug = False\n{line}\nhip = None\n")
        spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(nvidia_driver.ctypes, "CDLL", lambda name: Driver(version))
        monkeypatch.setattr(nvidia_driver.importlib.util, "find_spec", lambda name: spec)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_up


def test_a_driver_that_is_too_old_is_named_with_the_one_required(install: Install) -> None:
    install(12040, "cuda: Optional[str] = '13.2'")
    problem = nvidia_driver.driver_problem()
    assert problem is not None
    assert "supports CUDA up to 12.4" in problem
    assert "takes CUDA 13.2 (install driver 580.65.06 or newer" in problem
    assert gpus.usable_gpus() == ()
    with pytest.raises(TasukiError, match=r"--device is cuda, the NVIDIA driver .*use --device"):
        gpus.is_on_gpus("cuda", gpus.usable_gpus())


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (13000, "cuda: Optional[str] = '13.2'"),  # minor versions are compatible
        (13020, "cuda = '12.8'"),
        (12040, "cuda = None"),
    ],
)
def test_others_are_fine(install: Install, version: int, line: str) -> None:
    install(version, line)
    assert nvidia_driver.driver_problem() is None
    assert gpus.usable_gpus() == ("0",)


def test_the_installed_torch_says_what_its_file_says() -> None:
    found = nvidia_driver.torch_cuda_version()
    assert (found and "{}.{}".format(*found)) == torch.version.cuda
