"""mTLS within a fleet: routers and workers show one another certificates of one CA.

Workers move, so a certificate is for no address. Each has the DNS name `FLEET_NAME`, and the
processes of a fleet may share one. A worker's ports accept such certificates alone; streams to
other workers show them. New certificates are used for new connections.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.errors import TasukiError

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

FLEET_NAME = "tasuki"
DIRECT = (("grpc.enable_http_proxy", 0),)
"""Options of a channel: workers are never behind a proxy."""
REMEDY = (
    "both sides need --fleet-cert, --fleet-key and --fleet-ca, with certificates that are valid"
    f" now, have the DNS name {FLEET_NAME} and come from the other's --fleet-ca"
)


class FleetError(TasukiError):
    """The fleet's certificates cannot be used."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Where our certificate is, and the CA's of all others.

    Attributes:
        cert: Certificate chain in PEM.
        key: Its private key in PEM.
        ca: Certificates in PEM of the CA.
    """

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> Fleet | None:
        """What was said; None: nothing, so connections are plain.

        Raises:
            FleetError: Only a part was said.
        """
        if cert and key and ca:
            return cls(cert, key, ca)
        given = {"--fleet-cert": cert, "--fleet-key": key, "--fleet-ca": ca}
        missing = [flag for flag, path in given.items() if path is None]
        if len(missing) < len(given):
            raise FleetError(f"{' and '.join(missing)} missing: give {', '.join(given)}, or none")
        return None

    def check(self) -> None:
        """Read everything once, so that an error in it ends the start.

        Raises:
            FleetError: A file cannot be read or is no PEM, or the key is another's.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:  # SSLError too
            raise FleetError(f"--fleet-ca {self.ca} cannot be used: {error}") from error
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise FleetError(
                f"--fleet-cert {self.cert} with --fleet-key {self.key} cannot be used: {error}"
            ) from error

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind a server that requires certificates; its port, or 0.

        Raises:
            OSError: A file cannot be read.
            RuntimeError: As gRPC does where the address cannot be had.
        """
        import grpc

        def read() -> grpc.ServerCertificateConfiguration:
            pairs = [(self.key.read_bytes(), self.cert.read_bytes())]
            return grpc.ssl_server_certificate_configuration(pairs, self.ca.read_bytes())

        def read_again() -> grpc.ServerCertificateConfiguration | None:
            try:
                return read()
            except OSError as error:
                log.warning("the fleet's certificates stay as they were: %s", error)
                return None

        credentials = grpc.dynamic_ssl_server_credentials(
            read(),
            read_again,  # type: ignore[arg-type]  # None: as they were
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def channel(self, endpoint: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to another worker, with the certificates as they are now.

        Raises:
            OSError: A file cannot be read.
        """
        import grpc

        credentials = grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )
        named = (*options, ("grpc.ssl_target_name_override", FLEET_NAME))
        return grpc.aio.secure_channel(endpoint, credentials, options=named)


async def refuse_strangers(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """End a call whose certificate is the CA's, but of no router or worker."""
    import grpc

    identity = context.auth_context()
    if identity.get("transport_security_type") != [b"ssl"]:
        return  # plain, since a port with certificates accepts nothing else
    names = identity.get("x509_subject_alternative_name", [])
    if FLEET_NAME.encode() not in names:
        said = b", ".join(names).decode(errors="replace") or "no name"
        message = f"the certificate is for {said}: {REMEDY}"
        log.warning("%s refused: %s", context.peer(), message)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
