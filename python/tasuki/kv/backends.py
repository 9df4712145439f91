"""What can move KV, by name: the values of `--transport`.

Data alone, imported by commands that start no transport: nothing here loads a library. What a
transport does is in `transport.py`. Both workers of a pair must use the same one; a pair that
does not is refused by name (`transfer_plan.make_plans`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT = "nixl-ucx"
ALIASES = {"nixl": DEFAULT}  # the name before there were several

_NIXL = "tasuki.kv.nixl:NixlTransport"
_NIXL_MODULES = ("nixl_cu13", "nixl_cu12")
_INSTALL_NIXL = "pip install nixl-cu13"
INSTALL_MOONCAKE = "pip install mooncake-transfer-engine-non-cuda"


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to move KV.

    Attributes:
        name: As `--transport` takes it.
        target: Module and class of its `Transport`.
        modules: Python packages, of which it needs one; empty: it needs none.
        install: The command that installs one of them.
        memory: Where pools may be.
        between: Which workers it connects, and by what.
        note: For the help of `--transport`, a few words.
        plugin: Of NIXL; empty: it is not NIXL's.
        tried: Whether Tasuki's tests have moved KV with it.
    """

    name: str
    target: str
    modules: tuple[str, ...]
    install: str
    memory: str
    between: str
    note: str = ""
    plugin: str = ""
    tried: bool = True


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            DEFAULT,
            _NIXL,
            _NIXL_MODULES,
            _INSTALL_NIXL,
            "host or GPU",
            "one host or several: CUDA IPC, shared memory, RDMA, TCP",
            "or nixl",
            plugin="UCX",
        ),
        Backend(
            "host-staged",
            "tasuki.kv.host_staged:HostStagedTransport",
            _NIXL_MODULES,
            _INSTALL_NIXL,
            "host or GPU",
            "one host or several: as nixl-ucx, from host memory to host memory",
            "through host memory",
            plugin="UCX",
        ),
        Backend(
            "mooncake",
            "tasuki.kv.mooncake:MooncakeTransport",
            ("mooncake",),
            INSTALL_MOONCAKE,
            "host",
            "one host or several: TCP",
            "TCP between CPU workers",
        ),
        Backend(
            "shm",
            "tasuki.kv.shm:ShmTransport",
            (),
            "",
            "host",
            "one host: shared memory",
            "shared memory of CPU workers of one host",
        ),
        Backend(
            "tcp",
            "tasuki.kv.tcp:TcpTransport",
            (),
            "",
            "host",
            "one host or several: TCP",
            "sockets between CPU workers",
        ),
        Backend(
            "nixl-libfabric",
            _NIXL,
            _NIXL_MODULES,
            f"{_INSTALL_NIXL}, and the system's libfabric",
            "host or GPU",
            "several hosts: EFA and other networks of libfabric",
            plugin="LIBFABRIC",
            tried=False,
        ),
        Backend(
            "nixl-uccl",
            _NIXL,
            _NIXL_MODULES,
            "build NIXL with its UCCL plugin, which no package has",
            "host or GPU",
            "several hosts: RDMA",
            plugin="UCCL",
            tried=False,
        ),
    )
}


def names() -> tuple[str, ...]:
    """All names that `--transport` takes."""
    return (*BACKENDS, *ALIASES)


def described() -> str:
    """All of them in one sentence, for the help of `--transport`."""
    tried = [f"{each.name} ({each.note})" for each in BACKENDS.values() if each.tried]
    untried = [each.name for each in BACKENDS.values() if not each.tried]
    return f"{', '.join(tried)}, or the untried {' and '.join(untried)}"


def missing(backend: Backend) -> str:
    """What this machine lacks of a backend, as far as files tell; empty: nothing is known.

    Loads no library: a backend may still refuse to start, and then says why.
    """
    places = [place for name in backend.modules if (place := _folder(name)) is not None]
    if backend.modules and not places:
        return f"{' or '.join(backend.modules)} is not installed: {backend.install}"
    if backend.plugin and not any(_has_plugin(place, backend.plugin) for place in places):
        return f"NIXL has no plugin {backend.plugin} here: {backend.install}"
    return ""


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    places: Sequence[str] = (spec and spec.submodule_search_locations) or ()
    return Path(places[0]) if places else None


def _has_plugin(package: Path, plugin: str) -> bool:
    """Whether a wheel of NIXL, whose libraries lie beside the package, has a plugin."""
    beside = (f".{package.name}.mesonpy.libs", f"{package.name}.libs")
    return any(list((package.parent / name).rglob(f"libplugin_{plugin}.so")) for name in beside)
