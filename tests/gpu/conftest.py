"""Tests that need an NVIDIA GPU: `python -m pytest -m gpu tests/gpu`.

They need no server and none of the other tests' packages: with
`--confcutdir tests/gpu` the conftest above is left out. Elsewhere they are
skipped. The first run compiles FlashInfer's kernels, a minute or so each;
later runs find them in its cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

_TESTS = Path(__file__).parent.parent
for _folder in (_TESTS, _TESTS / "models"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and skip it where there is no GPU."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
