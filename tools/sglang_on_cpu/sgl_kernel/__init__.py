"""In place of SGLang's package of kernels, which is built for CUDA only: every name, no kernel.

SGLang imports kernels by name as it starts, on any machine, and on a CPU computes by torch. A
kernel that it calls there all the same raises.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


class _Name:
    """A kernel, or a table of constants such as `scalar_types`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> _Name:
        return _named(self._name, part)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} runs with CUDA only")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Name:
        return _named(self.__name__, name)


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _named(where: str, name: str) -> _Name:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(f"{where}.{name}")


def __getattr__(name: str) -> _Name:
    return _named(__name__, name)


sys.meta_path.insert(0, _Submodules())
