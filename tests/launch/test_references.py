"""The pages that are made of the source have all of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# Of tests, and of one process for its child.
INTERNAL = {"TASUKI_EMULATE_CAPABILITY", "TASUKI_EMULATE_NO_FLASHINFER", "TASUKI_PARENT_PID"}


@pytest.fixture(scope="module")
def make_errors() -> ModuleType:
    place = CHECKOUT / "tools" / "make_errors.py"
    found = importlib.util.spec_from_file_location("make_errors", place)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_environment_variable_is_in_the_reference() -> None:
    page = (CHECKOUT / "docs" / "configuration.md").read_text()
    source = "".join(
        path.read_text()
        for folder, suffix in (("python/tasuki", "py"), ("crates/router/src/config", "rs"))
        for path in (CHECKOUT / folder).rglob(f"*.{suffix}")
    )
    read = set(re.findall(r'"(TASUKI_[A-Z_]+)"', source)) - INTERNAL
    assert {"TASUKI_CACHE", "TASUKI_CPU_KERNELS", "TASUKI_LOG"} <= read
    assert not {name for name in read if f"`{name}`" not in page}


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("port is 0: use 1 or more", "port is 0", "use 1 or more"),
        ("a is b: its why; leave out --c", "a is b: its why", "leave out --c"),
        ("two run: choose one: x, y", "two run", "choose one: x, y"),
        ("<name> is <value>, must be at least 1", "<name> is <value>", "must be at least 1"),
        ("<arch> is not supported: its attention <reason>", None, ""),
        ("no Ray: ray start --head", "no Ray", "ray start --head"),
        ("user: settings are wrong", None, ""),
    ],
)
def test_an_error_is_divided_where_its_remedy_begins(
    make_errors: ModuleType, text: str, problem: str | None, remedy: str
) -> None:
    assert make_errors.split(text) == (text if problem is None else problem, remedy)


def test_errors_without_a_remedy_are_told_where_they_end_a_start(
    make_errors: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(
        'raise ModelError(f"{name} is gone")\n'
        'raise DefectError(f"{name} is gone too")\n'
        'raise DefectError(f"{name} is odd: give another")\n'
    )
    make_errors.SOURCE = tmp_path
    found = make_errors.errors(["*.py"])
    assert found == [("<name> is gone", ""), ("<name> is odd", "give another")]
