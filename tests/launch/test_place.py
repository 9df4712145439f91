"""Where workers run, by name."""

from __future__ import annotations

import sys

import pytest

from tasuki import launch
from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError
from tasuki.launch.place import count_gpus, make_engine


def test_without_ray_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(launch, "on_ray", raising=False)
    for name in ("on_ray", "ray_child"):
        monkeypatch.delitem(sys.modules, f"tasuki.launch.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    for ask in (
        lambda: make_engine(ServeConfig(model="m", on="ray://10.0.0.1:6379")),
        lambda: count_gpus("ray://10.0.0.1:6379"),
    ):
        with pytest.raises(LaunchError, match=r"requires Ray.*pip install 'tasuki\[ray\]'"):
            ask()
