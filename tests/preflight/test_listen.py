"""A peer that listens answers at the address that it tells."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.kv.net_devices import Network
from tasuki.preflight.listen import listen
from tasuki.preflight.transfers import Peer, Plan, ask
from tasuki.v1 import kv_pb2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_peer_is_found_at_the_address_that_it_tells(host: str) -> None:
    blocks: Any = SimpleNamespace(pool=kv_pb2.RankPool())
    plan = Plan(Network(host), timeout_s=30.0)

    async def find() -> Peer:
        ending, told = asyncio.Event(), asyncio.Queue[str]()
        serving = asyncio.create_task(listen(plan, 0, told.put_nowait, ending, blocks))
        try:
            async with asyncio.timeout(30.0):
                hearing = asyncio.create_task(told.get())
                await asyncio.wait({serving, hearing}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                return await ask(await hearing, plan)
        finally:
            ending.set()
            await serving

    assert asyncio.run(find()) == Peer(kv_pb2.RankPool(), serves=False)
