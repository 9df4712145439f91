"""The control groups of this process, of version 1 and 2, which limit its memory and its cores.

The limit of a group holds for all groups inside of it. In a container the path that the kernel
names may not be there: the container's own group is the root then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = _OWN) -> Iterator[Path]:
    """Each group that this process is in, the root included.

    Args:
        controller: As version 1 names it, such as `memory`. Version 2 has one folder for all.
        root: Where control groups are mounted.
        own: The kernel's list of this process's groups.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    paths = {".": ".", controller: "."}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["."] = path
        elif controller in controllers.split(","):
            paths[controller] = path
    for mount, path in paths.items():
        inside = PurePosixPath(path.lstrip("/"))
        for group in {inside, *inside.parents} if ".." not in inside.parts else {"."}:
            if (folder := root / mount / group).is_dir():
                yield folder
