"""Where workers run, by name: this machine, or a Ray cluster. Ray is loaded for that alone."""

from __future__ import annotations

from types import ModuleType

from tasuki.launch.config import LOCAL, ServeConfig
from tasuki.launch.engine import Engine
from tasuki.launch.errors import LaunchError
from tasuki.launch.gpus import usable_gpus
from tasuki.launch.local import LocalEngine


def make_engine(config: ServeConfig) -> Engine:
    """The engine that the settings name.

    Raises:
        LaunchError: It cannot be had.
    """
    if config.on == LOCAL:
        return LocalEngine(config)
    engine: Engine = _load_ray(config.on).RayEngine(config)
    return engine


def count_gpus(on: str) -> int:
    """GPUs that workers may use there.

    Raises:
        LaunchError: The cluster cannot be had.
    """
    return len(usable_gpus()) if on == LOCAL else int(_load_ray(on).count_gpus(on))


def _load_ray(on: str) -> ModuleType:
    try:
        from tasuki.launch import on_ray
    except ImportError as error:
        raise LaunchError(
            f"--on {on} requires Ray, which is not installed ({error}): pip install 'tasuki[ray]'"
        ) from error
    return on_ray
