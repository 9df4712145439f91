"""What waits for a stream goes out together, in order, and nothing after the end."""

from __future__ import annotations

import asyncio

from tasuki.kv.grpc_streams import Outbox

DEADLINE_S = 10.0


async def batches(outbox: Outbox[int]) -> list[list[int]]:
    async with asyncio.timeout(DEADLINE_S):
        return [batch async for batch in outbox]


def test_what_waits_goes_out_at_once() -> None:
    async def play() -> list[list[int]]:
        outbox: Outbox[int] = Outbox()
        taken = asyncio.create_task(batches(outbox))
        outbox.put([1])
        outbox.put([2, 3])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        outbox.put([4])
        outbox.close()
        return await taken

    assert asyncio.run(play()) == [[1, 2, 3], [4]]


def test_nothing_goes_out_after_the_end() -> None:
    async def play() -> list[list[int]]:
        outbox: Outbox[int] = Outbox()
        outbox.put([1])
        outbox.close()
        outbox.put([2])
        outbox.close()
        return await batches(outbox)

    assert asyncio.run(play()) == [[1]]


def test_an_empty_one_ends_when_it_is_closed() -> None:
    async def play() -> list[list[int]]:
        outbox: Outbox[int] = Outbox()
        taken = asyncio.create_task(batches(outbox))
        await asyncio.sleep(0)
        outbox.close()
        return await taken

    assert asyncio.run(play()) == []
