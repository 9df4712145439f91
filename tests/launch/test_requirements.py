"""What pyproject.toml requires, and that the pinned files satisfy it."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

from tasuki.cli import app

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def named(lines: list[str]) -> dict[str, Requirement]:
    return {each.name: each for each in map(Requirement, lines)}


def pins(file: str) -> list[Requirement]:
    lines = (CHECKOUT / file).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("requirements.txt", ("plot",)),
        ("requirements-dev.txt", ("plot",)),
        ("requirements-gpu.txt", ("gpu",)),
    ],
)
def test_the_pins_satisfy_the_project(file: str, extras: tuple[str, ...]) -> None:
    wanted = named(PROJECT["dependencies"] + [line for extra in extras for line in EXTRAS[extra]])
    pinned = pins(file)
    assert wanted.keys() <= {each.name for each in pinned}
    for each in pinned:
        (specifier,) = each.specifier
        assert specifier.operator == "==", each
        if each.name in wanted:
            assert wanted[each.name].specifier.contains(specifier.version), (each, wanted)


def test_all_pins_are_of_one_version() -> None:
    """A machine may install them one after the other."""
    versions: dict[str, set[str]] = {}
    for file in ("requirements.txt", "requirements-dev.txt", "requirements-gpu.txt"):
        for each in pins(file):
            versions.setdefault(each.name, set()).add(str(each.specifier))
    by_python = {"contourpy", "networkx", "numpy"}
    assert not {n: v for n, v in versions.items() if len(v) > 1 and n not in by_python}


def test_versions_that_do_not_work_are_excluded() -> None:
    required = named(PROJECT["dependencies"])
    assert not required["typer"].specifier.contains("0.27.0")
    assert not required["nixl-cu13"].specifier.contains("1.6.0")
    assert not named(EXTRAS["gpu"])["flashinfer-python"].specifier.contains("0.7.0")


def test_only_torch_and_nixl_bring_cuda() -> None:
    cuda = ("cuda", "cupy", "flashinfer", "nvidia", "triton")
    names = named(PROJECT["dependencies"])
    assert [n for n in names if n.startswith(cuda) or "cu1" in n] == ["nixl-cu13"]
    assert not {"matplotlib", "pillow", "plotly", "pip"} & names.keys()


def test_the_installed_typer_keeps_options() -> None:
    said = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    version = importlib.metadata.version("typer")
    for option in ("--device", "--prefill", "--kv-dtype", "--strict-roles"):
        assert option in said, f"typer {version} lost {option}: exclude it in pyproject.toml"


def test_the_installed_nixl_has_the_private_part_that_kv_nixl_uses() -> None:
    version = importlib.metadata.version("nixl-cu13")
    assert (
        Version(version) in Requirement(str(named(PROJECT["dependencies"])["nixl-cu13"])).specifier
    )
    bindings = importlib.import_module("nixl_cu13._bindings")
    delay = getattr(bindings.nixlAgentConfig, "pthrDelay", None)
    assert isinstance(delay, property), f"nixl-cu13 {version}: no nixlAgentConfig.pthrDelay"
    assert delay.fset is not None, f"nixl-cu13 {version}: pthrDelay cannot be set"
