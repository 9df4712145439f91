"""Memory that processes of one host share: a memfd, which has no name and ends with its processes.

Its owner maps it for writing and seals it: nobody can shrink it afterwards, or map it for writing
once more. A reader gets its descriptor (`shm_door.py`) and checks the seals before it maps it.
So no owner can crash a reader by shrinking it, and no reader can change what it reads. The kernel
frees it when the last process that maps it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

from tasuki.kv.transport import TransportError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_NO_EXEC = 0x0008  # MFD_NOEXEC_SEAL, since Linux 6.3
_NO_MORE_WRITERS = 0x0010  # F_SEAL_FUTURE_WRITE, since Linux 5.1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _NO_MORE_WRITERS


class Segment:
    """Zeroed memory of ours that other processes can read.

    Args:
        size_bytes: Of it, at least 1. The kernel provides a page of it when the page is first used.

    Attributes:
        descriptor: What a reader maps.
        memory: Ours, writable.

    Raises:
        TransportError: The kernel has no such memory.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self.descriptor = _memfd()
            os.ftruncate(self.descriptor, size_bytes)
            self.memory = mmap.mmap(self.descriptor, size_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except (AttributeError, OSError) as error:
            raise TransportError(
                f"no shared memory of {size_bytes} bytes, which --transport shm takes from memfd of"
                f" Linux 5.1 ({error}): use --transport nixl-ucx"
            ) from error
        with contextlib.suppress(OSError):  # as the system's setting for shared memory allows
            self.memory.madvise(mmap.MADV_HUGEPAGE)


def map_to_read(descriptor: int, size_bytes: int) -> Bytes:
    """Map a peer's segment.

    Args:
        descriptor: Of it; may be closed afterwards.
        size_bytes: That the peer says it has.

    Returns:
        [size_bytes], read-only; mapped as long as it, or a view of it, lives.

    Raises:
        TransportError: It is smaller, or could become so.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if not seals & fcntl.F_SEAL_SHRINK or size < size_bytes:
            raise TransportError(
                f"a segment of {size} bytes with seals {seals:#x} is not one of {size_bytes} that"
                " keeps its size: run the same version"
            )
        return np.frombuffer(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise TransportError(f"the peer's shared memory cannot be mapped: {error}") from error


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("tasuki-kv", flags | _NO_EXEC)
    except OSError:  # an older kernel
        return os.memfd_create("tasuki-kv", flags)
