"""What the world of `handoff_model.py` is made of: requests, streams, transfers, actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.prefill_side import PrefillSide
from tasuki.v1 import kv_pb2 as pb

LEASE_S = 10.0
RUBBISH = ("", -1)


class Violation(AssertionError):  # noqa: N818
    """The protocol did what it must never do."""


@dataclass(frozen=True)
class Action:
    """Something that may happen next."""

    name: str
    run: Callable[[], None]

    @property
    def kind(self) -> str:
        """The first word of the name."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Sides:
    """The state machines under test; broken ones are put in to see them caught."""

    prefill: type[PrefillSide] = PrefillSide
    decode: type[DecodeSide] = DecodeSide


@dataclass
class Request:
    """What the router knows of one."""

    request_id: str
    tokens: int
    prefix_tokens: int
    finished_at_once: bool
    prefill: str
    decode: str
    prefill_over: bool = False
    decode_over: bool = False
    decoded: bool = False
    retargets_left: int = 2  # the second one may lead back


@dataclass
class Stream:
    """Between one decode and one prefill engine; what is in it is not yet delivered."""

    up: bool = False
    to_prefill: list[pb.FromDecode] = field(default_factory=list)
    to_decode: list[pb.FromPrefill] = field(default_factory=list)

    def cut(self) -> None:
        self.up = False
        self.to_prefill.clear()
        self.to_decode.clear()


@dataclass
class Transfer:
    """A pull order under way."""

    order_id: int
    decode: str
    prefill: str
    tags: dict[int, str]  # local unit: who owned its block when the pull was ordered
    todo: list[tuple[int, int]]
    cancelled: bool = False
    error: str = ""


@dataclass
class PrefillLeg:
    tokens: int
    total_blocks: int
    finished_at_once: bool
    admitted: bool = False
    stopped: bool = False
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
