"""The address that a worker binds: an error before the model is loaded, with the option to change.

A worker's port is bound only once its model is loaded. By then a large model has taken minutes.
"""

from __future__ import annotations

import errno
import os
import socket

from tasuki.errors import TasukiError
from tasuki.worker.config import join_host_port


class BindError(TasukiError):
    """The address or the port cannot be bound."""


def check_address(host: str, port: int) -> None:
    """Bind the address for a moment.

    Args:
        host: Address or name; one address of a name is enough.
        port: 0: any free one, so the address alone is checked.

    Raises:
        BindError: No server could bind it. Errors whose cause is not certain are left to the
            server.
    """
    where = join_host_port(host, port)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            return  # no name server answers yet
        found = []
    except (OSError, UnicodeError):
        found = []
    refused = errno.EADDRNOTAVAIL
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return
        except OSError as error:
            if refused not in (errno.EADDRINUSE, errno.EACCES):
                refused = error.errno or 0
    if refused == errno.EADDRNOTAVAIL:
        raise BindError(
            f"cannot listen on {where}, which is no address of this machine: correct --host"
            " (`tasuki serve`: --worker-host)"
        )
    if refused in (errno.EADDRINUSE, errno.EACCES):
        cause = os.strerror(refused).lower()
        raise BindError(
            f"cannot listen on {where} ({cause}): choose another --port (`tasuki serve`:"
            " --worker-base-port)"
        )
