"""How transfers through host memory are cut, and with whom they are possible."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kv_source_process import DEADLINE_S, block_value, fill, layout
from support.waiting import until

from tasuki.kv import host_staged, staging_server
from tasuki.kv.nixl_agent import Agent
from tasuki.kv.staging import MAX_PEERS, SLOT_BYTES, Slots, parts_of
from tasuki.kv.staging_server import IDLE_S, StagingServer
from tasuki.kv.transfer_plan import LayoutMismatchError, Region, Run, TransferPlan, make_plans
from tasuki.kv.transport import create_transport


def test_both_sides_must_stage() -> None:
    shape = layout(num_blocks=2, block_kib=64)
    pool = shape.allocate()
    ours, theirs = (shape.to_wire(pool, transport=f"{t}/UCX") for t in ("host-staged", "nixl"))
    with pytest.raises(LayoutMismatchError, match="transport is host-staged/UCX here and nixl/UCX"):
        make_plans([ours], [theirs])


@pytest.mark.parametrize("slot_bytes", [100, 256, 1000, SLOT_BYTES])
@pytest.mark.parametrize("whole", [True, False])
def test_parts_fill_slots_and_cover_every_byte_once(whole: bool, slot_bytes: int) -> None:
    stride = 256 if whole else 512
    local, remote = Region(10_000, stride, 9, 0, "DRAM"), Region(50_000, stride, 9, 0, "DRAM")
    plan = TransferPlan(256, local, remote)
    runs = [Run(0, 3, 3), Run(7, 1, 1)] if whole else [Run(0, 3, 1), Run(1, 4, 1), Run(7, 1, 1)]
    moved = []
    parts = list(parts_of(runs, plan, slot_bytes))
    for part in parts:
        size = sum(segment.size_bytes for segment in part)
        assert size == slot_bytes or part is parts[-1]
        for each in part:
            moved += [(each.remote + i, each.local + i) for i in range(each.size_bytes)]
    pairs = [(r.remote + k, r.local + k) for r in runs for k in range(r.count)]
    wanted = [
        (50_000 + theirs * stride + i, 10_000 + own * stride + i)
        for theirs, own in pairs
        for i in range(256)
    ]
    assert moved == wanted


@pytest.mark.system
def test_workers_that_read_one_another_leave_one_another_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = threading.Event()
    forget = Agent.forget

    def noted(agent: Agent, remote: Any) -> None:
        forget(agent, remote)
        if threading.current_thread().name == "kv-staging":
            left.set()

    monkeypatch.setattr(Agent, "forget", noted)
    shape = layout(num_blocks=8, block_kib=64)
    one, other = create_transport("host-staged"), create_transport("host-staged")
    for seed, each in enumerate((one, other)):
        pool = each.allocate(shape)
        fill(pool, seed)
        each.register(pool, shape)
    [pair] = make_plans([one.layout], [other.layout])
    [back] = make_plans([other.layout], [one.layout])
    one.connect("other", other.metadata, pair.plan)
    other.connect("one", one.metadata, back.plan)
    other.disconnect("one")
    assert left.wait(DEADLINE_S)
    for number in range(2):
        read = one.post("other", [Run(3, 4 + number, 1)])
        until(read.done, "the read")
        assert (one.pool[4 + number] == block_value(3, 1)).all()
        one.disconnect("other")
        one.connect("other", other.metadata, pair.plan)
    one.close()
    other.close()


@pytest.mark.system
def test_a_reader_whose_set_was_given_away_gets_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_staged, "_REPLY_S", 2.0)
    monkeypatch.setattr(staging_server, "MAX_PEERS", 1)
    for module in (host_staged, staging_server):
        monkeypatch.setattr(module, "IDLE_S", 0.0)
    shape = layout(num_blocks=8, block_kib=64)
    source, *readers = (create_transport("host-staged") for _ in range(3))
    for seed, each in enumerate((source, *readers)):
        pool = each.allocate(shape)
        fill(pool, seed)
        each.register(pool, shape)
    for reader in readers:
        [pair] = make_plans([reader.layout], [source.layout])
        reader.connect("source", source.metadata, pair.plan)
    for number in range(2):
        for reader in readers:
            reads = [reader.post("source", [Run(3, 4 + i, 1)]) for i in range(2)]
            for i, read in enumerate(reads):
                until(read.done, "the read")
                assert (reader.pool[4 + i] == block_value(3, 0)).all(), number
    for each in (source, *readers):
        each.close()


class Readers:
    """An agent without a network."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.loaded = 0

    def load(self, metadata: bytes) -> None:
        assert metadata == b"x"
        self.loaded += 1

    def send(self, agent: str, message: dict[str, str]) -> None:
        self.told.append((agent, message["reply"]))

    def forget(self, agent: str) -> None:
        self.forgotten.append(agent)


def test_a_reader_that_is_gone_makes_room_for_another() -> None:
    now_s = 0.0
    agent: Any = Readers()
    pool = layout(num_blocks=2, block_kib=64).allocate()
    server = StagingServer(agent, pool, Slots(pinned=False), lambda: now_s)

    def hello(reader: str) -> str:
        message = {"ask": "hello", "id": "1", "metadata": b"x".hex()}
        server._on_message(reader, message)
        told, reply = agent.told.pop()
        assert told == reader
        return reply

    assert hello("gone") == "0"
    now_s = 10.0
    assert [hello(f"r{index}") for index in range(1, MAX_PEERS)] == [
        str(index) for index in range(1, MAX_PEERS)
    ]
    assert "no more" in hello("late")
    now_s = IDLE_S
    assert hello("late") == "0"
    assert agent.forgotten == ["gone"]
    assert agent.loaded == MAX_PEERS + 2, "also for a refusal"
    assert hello("r1") == "1", "it keeps its set"
    assert agent.forgotten == ["gone", "r1"] and agent.loaded == MAX_PEERS + 3, "connected anew"
    server._stage("gone", {"id": "2", "lane": 0, "bytes": []})
    assert "connect anew" in agent.told.pop()[1]
    server._on_message("r2", {"ask": "bye"})
    assert hello("again") == "2"
