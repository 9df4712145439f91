"""Certificates for tests, made by the commands of docs/operations.md."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tasuki.kv.fleet import FLEET_NAME, Fleet

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A CA in a folder of its own, which is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._openssl(
            *("req", "-x509", *_KEY, "-days", "3650", "-subj", "/CN=Tasuki fleet CA"),
            *("-keyout", "ca.key", "-out", "ca.pem"),
        )

    def fleet(self, name: str, *, dns: str = FLEET_NAME, days: int = 365) -> Fleet:
        """A new certificate in files of this name; with negative `days` it has expired."""
        cert, key = f"{name}.pem", f"{name}.key"
        self._openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", f"{name}.csr")
        (self.folder / "extensions").write_text(
            f"subjectAltName=DNS:{dns}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", str(days), "-extfile", "extensions", "-out", cert),
        )
        return Fleet(self.folder / cert, self.folder / key, self.folder / "ca.pem")

    def _openssl(self, *words: str) -> None:
        subprocess.run(("openssl", *words), cwd=self.folder, capture_output=True, check=True)


def trusting(fleet: Fleet, other: Authority) -> Fleet:
    """The same certificate at a side that trusts another CA."""
    return Fleet(fleet.cert, fleet.key, other.folder / "ca.pem")


def options(fleet: Fleet) -> list[str]:
    """The command line's options for it."""
    paths = {"--fleet-cert": fleet.cert, "--fleet-key": fleet.key, "--fleet-ca": fleet.ca}
    return [word for flag, path in paths.items() for word in (flag, str(path))]
