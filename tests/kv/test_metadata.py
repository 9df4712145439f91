"""What a peer tells of its pool and is none, as of another version, ends no worker."""

from __future__ import annotations

import json

import pytest
from kv_source_process import layout
from support.transports import TRANSPORTS, skip_unless_there

from tasuki.kv.transfer_plan import make_plans
from tasuki.kv.transport import TransportError, create_transport

STRANGE = (None, -1, "", 10**30, "\0x", "ü" * 300, [], {})


@pytest.mark.system
@pytest.mark.parametrize("name", TRANSPORTS)
def test_metadata_that_is_none_is_refused(name: str) -> None:
    skip_unless_there(name)
    transport, shape = create_transport(name), layout(4, 64)
    transport.register(transport.allocate(shape), shape)
    own = transport.metadata
    cases = [b"", b"x", own[:9], own[: len(own) // 2], b"{}", b"[]", b"null", b"\xff\xfe" * 50]
    if own.startswith(b"{"):
        told = json.loads(own)
        cases += [json.dumps({**told, key: value}).encode() for key in told for value in STRANGE]
    [pair] = make_plans([transport.layout], [transport.layout])
    for case in cases:
        with pytest.raises(TransportError):
            transport.connect("peer", case, pair.plan)
        transport.disconnect("peer")
    transport.close()
