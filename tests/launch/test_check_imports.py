"""The import check finds what it is there for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    place = CHECKOUT / "tools" / "check_imports.py"
    found = importlib.util.spec_from_file_location("check_imports", place)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["check_imports"] = module
    found.loader.exec_module(module)
    return module


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"tasuki/__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tasuki/kv/link.py": "import nixl_cu13._api"}, "only tasuki.kv.nixl"),
        ({"tasuki/engine/plan.py": "import torch.nn"}, "engine may not import torch"),
        (
            {"tasuki/engine/plan.py": "def late():\n    from torch import nn"},
            "plan.py:2: tasuki.engine may not import torch",
        ),
        (
            {
                "tasuki/engine/plan.py": "from tasuki.execution import runner",
                "tasuki/execution/__init__.py": "",
                "tasuki/execution/runner.py": "import torch",
            },
            "tasuki.engine may not import tasuki.execution",
        ),
        (
            {"tasuki/cli.py": "from .helper import f", "tasuki/helper.py": "from torch import nn"},
            "tasuki.cli -> tasuki.helper -> torch",
        ),
        (
            {"tasuki/kv/link.py": "from tasuki.worker import x", "tasuki/worker/__init__.py": ""},
            "tasuki.kv may not import tasuki.worker",
        ),
        (
            {
                "tasuki/kv/link.py": "from tasuki.engine.api import a\nfrom tasuki.engine import b",
                "tasuki/engine/__init__.py": "",
            },
            "link.py:2: tasuki.kv may not import tasuki.engine.b",
        ),
        (
            {"tasuki/plot/a.py": "from tasuki import engine", "tasuki/engine/__init__.py": ""},
            "tasuki.plot may not import tasuki.engine",
        ),
        (
            {
                "tasuki/kv/a.py": "def late():\n    from .b import f",
                "tasuki/kv/b.py": "from .c import f",
                "tasuki/kv/c.py": (
                    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import f"
                ),
            },
            "a circle: tasuki.kv.",
        ),
    ],
)
def test_violations_are_found(
    check: ModuleType, tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    found = check.check_python(plant(tmp_path, files))
    assert len(found) == 1
    assert expected in found[0]


def test_what_is_allowed_passes(check: ModuleType, tmp_path: Path) -> None:
    files = {
        "tasuki/kv/nixl_agent.py": "import nixl_cu13",
        "tasuki/cli.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
            "def late():\n    import torch\n"
        ),
    }
    assert check.check_python(plant(tmp_path, files)) == []


def test_crates_are_held_to_their_direction(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core/Cargo.toml").write_text("[dependencies]\ntasuki-policy = '1'\nserde = '1'\n")
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel/Cargo.toml").write_text("")
    found = check.check_crates(tmp_path)
    assert len(found) == 2
    assert "core may not depend on policy" in found[0]
    assert "unknown crate novel" in found[1]
