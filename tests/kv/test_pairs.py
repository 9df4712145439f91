"""What a decode worker counts of each prefill engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from handoff_rig import Rig, spec

from tasuki.engine.stats import EngineCounters
from tasuki.kv import pairs as pairs_module
from tasuki.kv.effects import PullDone
from tasuki.kv.pairs import MAX_PAIRS, LossCause, PairCounters, Pairs
from tasuki.kv.ways import Way, slowest
from tasuki.worker.convert import load_to_wire


def only_pair(pairs: Pairs) -> PairCounters:
    [(_, pair)] = pairs
    return pair


def test_a_handoff_is_counted_with_its_engine_and_told_to_the_router(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    rig.place(spec("r.0", list(range(22)), max_tokens=3), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    load = load_to_wire(decode.engine.load(), EngineCounters(), decode.handoffs)
    [pair] = load.kv_pairs
    assert (pair.engine_id, pair.transport) == (prefill.engine_id, "copy")  # of no known way
    assert pair.bytes == 6 * decode.layout.block_bytes
    assert pair.pulls >= 1 and pair.descriptors >= 1
    assert pair.wire_s > 0 and pair.post_s > 0
    timings = decode.ended["r.0"].timings
    assert pair.exposed_s == timings.transfer_exposed_s
    assert (pair.post_s, pair.descriptors) == (
        timings.transfer_post_s,
        timings.transfer_descriptors,
    )
    assert timings.transport == pair.transport
    assert not pair.failures and not pair.reconnects
    assert not list(prefill.handoffs.counters.pairs), "it pulled nothing"
    rig.pump_until_idle()


@pytest.mark.parametrize("cause", [LossCause.TRANSFER, LossCause.PEER, LossCause.SILENT])
def test_failures_are_counted_by_cause(rig: Rig, cause: LossCause) -> None:
    prefill, decode = rig.worker(lease_s=0.4), rig.worker(lease_s=0.4)
    decode.transport.hold.set()
    rig.place(spec("r.0", list(range(12)), max_tokens=3), prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0)
    if cause is LossCause.TRANSFER:
        prefill.transport.die()
        decode.transport.hold.clear()
    elif cause is LossCause.PEER:
        port = int(prefill.endpoint.split(":")[1])
        rig.stop_server(prefill)
        prefill.frozen = True
        rig.workers.remove(prefill)
        rig.worker(port=port)
    else:
        prefill.frozen = True
        prefill.handoffs._read_ahead = lambda event: False  # type: ignore[method-assign]
    rig.pump(lambda: "r.0" in decode.ended)
    decode.transport.hold.clear()
    assert only_pair(decode.handoffs.counters.pairs).failures == {cause: 1}
    if cause is LossCause.PEER:
        prefill.handoffs.close()
    prefill.frozen = False


def test_a_failed_read_is_followed_by_a_new_connection(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    fails = iter([True])
    post = decode.transport.post
    decode.transport.post = lambda peer, runs: _fail() if next(fails, False) else post(peer, runs)  # type: ignore[method-assign]
    for number in (0, 1):
        rig.place(spec(f"r.{number}", list(range(12)), max_tokens=3), prefill, decode)
        rig.pump(lambda number=number: f"r.{number}" in decode.ended)  # type: ignore[misc]
        prefill.abort(f"r.{number}")
    pair = only_pair(decode.handoffs.counters.pairs)
    assert (pair.failures, pair.reconnects) == ({LossCause.TRANSFER: 1}, 1)
    rig.pump_until_idle()


def _fail() -> None:
    from tasuki.kv.transport import TransportError

    raise TransportError("planted")


def test_engines_that_were_not_used_for_longest_are_forgotten() -> None:
    pairs = Pairs()
    done = PullDone(1, posted_s=0.0, finished_s=1.0, moved_bytes=5, descriptors=1)
    for number in range(MAX_PAIRS):
        pairs.pulled(f"e{number}", done)
    pairs.pulled("e0", done)
    pairs.lost("new", LossCause.LEASE)
    known = dict(pairs)
    assert len(known) == MAX_PAIRS
    assert known["e0"].bytes == 10 and "e1" not in known and "new" in known


def test_every_cause_says_what_it_means() -> None:
    text = Path(pairs_module.__file__).read_text()
    for cause in LossCause:
        assert re.search(rf'{cause.name} = "{cause}"  # \S', text)


def test_the_transport_that_a_router_is_told_has_the_slowest_way_of_all_ranks(rig: Rig) -> None:
    decode = rig.worker()
    pairs = decode.handoffs.counters.pairs
    pairs.of("e").transport = "nixl/UCX"
    ways = [Way("rdma", ("rc/mlx5_0:1",)), None, Way("tcp", ("tcp/eth0",))]
    pairs.pulled("e", PullDone(1, 0.0, 1.0, 10, 1, way=slowest(ways)))
    told = load_to_wire(decode.engine.load(), EngineCounters(), decode.handoffs).kv_pairs
    assert [pair.transport for pair in told] == ["nixl/UCX/tcp"]
    assert slowest([None]) is None
