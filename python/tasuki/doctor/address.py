"""Where the user says the fleet is. The same addresses as the router's `--worker`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from tasuki.doctor.picture import Role
from tasuki.doctor.result import DoctorError

_SCHEMES = ("http", "https", "vllm", "sglang", "tasuki")
_ROLES = ("prefill", "decode", "mixed", "")
_EXAMPLES = (
    "http://HOST:PORT of a router or an engine, vllm://HOST:PORT?role=decode, sglang://HOST:PORT,"
    " or HOST:PORT of a Tasuki worker"
)


@dataclass(frozen=True, slots=True)
class Address:
    """One of the command's arguments.

    Attributes:
        kind: `url` is asked what it is.
        where: URL without a slash at the end, or `host:port` of a Tasuki worker.
        role: That the user says.
    """

    kind: str
    where: str
    role: Role = ""

    @property
    def host(self) -> str:
        """The host's name or address."""
        text = self.where if "://" in self.where else f"tasuki://{self.where}"
        return urlsplit(text).hostname or ""

    @classmethod
    def of(cls, text: str) -> Address:
        """From what the user wrote.

        Raises:
            DoctorError: It is no address.
        """
        try:
            parts = urlsplit(text if "://" in text else f"tasuki://{text}")
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise DoctorError(f"{text!r} is no address ({error}): give {_EXAMPLES}") from error
        role = parse_qs(parts.query).get("role", [""])[-1]
        if parts.scheme not in _SCHEMES or not host or role not in _ROLES:
            raise DoctorError(f"{text!r} is no address: give {_EXAMPLES}")
        known: Role = role  # type: ignore[assignment]
        if parts.scheme == "tasuki":
            if port is None:
                raise DoctorError(f"{text!r} has no port: give {_EXAMPLES}")
            return cls("tasuki", parts.netloc, known)
        scheme = parts.scheme if parts.scheme == "https" else "http"
        path = parts.path.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        kind = parts.scheme if parts.scheme in ("vllm", "sglang") else "url"
        return cls(kind, f"{scheme}://{parts.netloc}{path}", known)
