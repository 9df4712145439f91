"""Each check on pictures: the fault is found, and what is close to it but well is not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.pictures import found, scrapes, unseen, worker

from tasuki.doctor.checks import CHECKS
from tasuki.doctor.checks.speed import looks_slow
from tasuki.doctor.picture import Fleet, Pair, Probe, Router, Scrapes, Worker
from tasuki.doctor.samples import parse, read
from tasuki.doctor.series import VLLM
from tasuki.preflight.expect import Expectation


def prompts(requests: int, computed: int, loaded: int) -> dict[str, float]:
    return {
        "requests": requests,
        "prompt_computed": computed,
        "prompt_cached": 0,
        "prompt_loaded": loaded,
    }


def test_decode_that_computes_prompts_is_found_by_its_share() -> None:
    bad = worker("d", prompts(10, 0, 3000), prompts(20, 1500, 4500), role="decode")
    assert found("recomputed prompts", Fleet([bad])) == [
        "d computes 50% of its prompt tokens again"
    ]


def test_the_last_token_of_a_prompt_is_no_recomputation() -> None:
    good = worker("d", prompts(10, 10, 900), prompts(20, 20, 1800), role="decode")
    outcome = CHECKS["recomputed prompts"](Fleet([good]))
    assert (outcome.findings, len(outcome.looked_at)) == ([], 1)


def test_what_was_long_ago_does_not_count_where_enough_happens_now() -> None:
    mended = worker("d", prompts(100, 30000, 0), prompts(120, 30000, 6000), role="decode")
    assert not found("recomputed prompts", Fleet([mended]))


def test_a_split_probe_that_decode_computes_is_found() -> None:
    fleet = Fleet([prefill := worker("p"), decode := worker("d")])
    fleet.pairs = [Pair(prefill, decode, probe=0.0)]
    assert found("recomputed prompts", fleet) == ["d computed a prompt again whose KV p had"]
    fleet.pairs = [Pair(prefill, decode, probe=0.97)]
    assert not found("recomputed prompts", fleet)


def test_a_pair_that_cannot_serve_a_split_request_is_found() -> None:
    fleet = Fleet([prefill := worker("p"), decode := worker("d")])
    fleet.pairs = [Pair(prefill, decode, probe_fault=("status 500", "decode"))]
    assert found("recomputed prompts", fleet) == ["d cannot use KV of p: the request fails"]
    fleet.pairs = [Pair(prefill, decode, probe_fault=("no kv_transfer_params", "prefill"))]
    finding = CHECKS["recomputed prompts"](fleet).findings[0]
    assert "hands no KV over" in finding.what and "--kv-transfer-config" in finding.remedy


def test_a_fleet_that_shows_no_sources_is_not_called_healthy() -> None:
    fleet = Fleet([worker("d", {"requests": 9}, role="decode")])
    outcome = CHECKS["recomputed prompts"](fleet)
    assert not outcome.looked_at and "where its prompts came from" in outcome.unseen[0]


@pytest.mark.parametrize(
    "name", ["kv_failed", "kv_expired", "kv_late", "kv_timeouts", "digest_mismatches"]
)
def test_kv_that_is_lost_in_the_window_is_found(name: str) -> None:
    before, after = {name: 0.0, "kv_transfers": 1e6}, {name: 1.0, "kv_transfers": 1e6}
    assert len(found("lost KV", Fleet([worker("w", before, after)]))) == 1
    assert not found("lost KV", Fleet([worker("w", before, before)]))


def test_memory_that_is_held_for_nobody_is_found() -> None:
    held = {"kv_used": 0.3, "running": 0.0, "waiting": 0.0}
    assert found("stranded KV", Fleet([worker("p", *[held] * 4)])) == [
        "p holds 30% of its KV memory for nobody"
    ]
    busy = {**held, "running": 1.0}
    assert not found("stranded KV", Fleet([worker("p", *[held] * 3, busy)]))
    # Short prompts come and go between the scrapes, and their KV waits for decode.
    for counter in ("requests", "prompt_tokens", "prompt_computed"):
        first, then = {**held, counter: 5.0}, {**held, counter: 9.0}
        assert not found("stranded KV", Fleet([worker("p", *[first] * 3, then)])), counter
    freed = {**held, "kv_used": 0.0}
    assert not found("stranded KV", Fleet([worker("p", *[held] * 3, freed)]))


def test_a_worker_that_was_seen_for_a_moment_has_no_full_or_stranded_memory() -> None:
    held = {"kv_used": 0.9, "running": 0.0, "waiting": 0.0}
    for check, moment in (("stranded KV", held), ("KV memory", {**held, "waiting": 3.0})):
        assert len(found(check, Fleet([worker("w", *[moment] * 4)]))) == 1, check
        fleet = Fleet([worker("w", *[moment] * 2)])
        assert not found(check, fleet), check
        assert "read 2 times, where 4 are needed" in unseen(check, fleet)


def pair(transport: str, hosts: tuple[str, str]) -> Fleet:
    sides = [worker(name, {"kv_used": 0.0}, engine="tasuki") for name in ("p", "d")]
    for side, host in zip(sides, hosts, strict=True):
        side.host = host
    moved = {"kv_bytes": 1e8, "kv_seconds": 1.0, "kv_transfers": 10, "kv_descriptors": 100}
    return Fleet(sides, [Pair(sides[0], sides[1], transport, scrapes(moved, moved))])


def remedy(transport: str) -> str:
    return CHECKS["KV transport"](pair(transport, ("h", "h"))).findings[0].remedy


def test_tcp_on_one_host_is_found_and_between_hosts_it_is_a_question() -> None:
    assert "travels by TCP" in found("KV transport", pair("nixl/UCX/tcp", ("h", "h")))[0]
    assert not found("KV transport", pair("nixl/UCX/shm", ("h", "h")))
    assert "unset UCX_TLS" in remedy("nixl/UCX/tcp")
    assert "--transport nixl-ucx" in remedy("mooncake/tcp")
    assert "--transport nixl-ucx" in remedy("tcp/tcp")
    apart = pair("nixl/UCX/tcp", ("a", "b"))
    assert not found("KV transport", apart)
    assert "tasuki preflight" in unseen("KV transport", apart)


def test_a_link_below_what_is_expected_is_found() -> None:
    fleet = pair("nixl/UCX/rdma", ("a", "b"))
    assert "--expect" in unseen("KV transport", fleet)
    fleet.expected = Expectation(0.05e9)
    assert not found("KV transport", fleet)
    fleet.expected = Expectation(20e9)
    assert "at 0.10 GB/s" in found("KV transport", fleet)[0]


def test_a_link_is_compared_with_what_was_measured_of_such_transfers(tmp_path: Path) -> None:
    """Of 10 MB in blocks of 1 MB: larger ones are quicker on the same link."""
    rows = [(16e6, 1e6, 20e9), (8e6, 2e6, 9e9), (8e6, 1e6, 0.12e9), (8e6, 16e3, 0.01e9)]
    names = "payload_bytes", "block_bytes", "bytes_per_s"
    saved = tmp_path / "link.json"
    fleet = pair("nixl/UCX/rdma", ("a", "b"))

    def expect(*rows: tuple[float, ...]) -> Fleet:
        content = {"rows": [dict(zip(names, row, strict=True)) for row in rows]}
        saved.write_text(json.dumps(content))
        fleet.expected = Expectation.of(str(saved))
        return fleet

    assert not found("KV transport", expect(*rows)), "0.8 of 0.12 GB/s is reached"
    quick = expect((8e6, 1e6, 0.2e9), *rows[:2])
    assert found("KV transport", quick) == [
        "p → d: KV moves at 0.10 GB/s, expected are 0.16",
    ]
    assert "in transfers of 10.0 MB) are as fast" in unseen("KV transport", expect(*rows[:2]))
    assert "--payload" in unseen("KV transport", fleet)
    moved = {"kv_bytes": 1e8, "kv_seconds": 1.0, "kv_transfers": 10}
    fleet.pairs[0].scrapes = scrapes(moved, moved)
    assert not found("KV transport", expect(*rows)), "its blocks may be the smallest"


@pytest.mark.parametrize(("descriptors", "count"), [(20_000, 1), (100, 0)])
def test_many_small_descriptors_are_found(descriptors: int, count: int) -> None:
    moved = {"kv_bytes": 60e6, "kv_transfers": 10, "kv_descriptors": descriptors}
    fleet = Fleet([worker("d", moved, moved, role="decode")])
    assert len(found("KV layout", fleet)) == count
    if count:
        assert "VLLM_KV_CACHE_LAYOUT" in CHECKS["KV layout"](fleet).findings[0].remedy


@pytest.mark.parametrize("field", ["block_size", "max_model_len", "kv_dtype", "model_path"])
def test_settings_that_differ_are_found(field: str) -> None:
    one, other = worker("a"), worker("b")
    one.config, other.config = {field: "1"}, {field: "1"}
    assert not found("configuration", Fleet([one, other]))
    other.config = {field: "2"}
    assert found("configuration", Fleet([one, other]))[0].startswith(f"{field} differs")
    other.model = "another"
    assert not found("configuration", Fleet([one, other]))


def test_tasuki_hands_over_between_block_sizes() -> None:
    one, other = worker("a", engine="tasuki"), worker("b", engine="tasuki")
    one.config, other.config = {"block_size": "16"}, {"block_size": "32"}
    assert not found("configuration", Fleet([one, other]))


def test_versions_that_differ_are_found() -> None:
    one, other = worker("a"), worker("b")
    one.config, other.config = {"version": "0.31"}, {"version": "0.32"}
    assert len(found("versions", Fleet([one, other]))) == 1


def test_a_server_in_another_mode_than_its_role_is_found() -> None:
    one = worker("a", engine="sglang", role="prefill")
    one.config = {"disaggregation_mode": "decode"}
    assert "was started as decode" in found("configuration", Fleet([one]))[0]


def probed(name: str, *seconds: float, running: float = 0.0) -> Worker:
    made = worker(name, {"running": running}, {"running": running})
    made.probes = [Probe(number, each, each / 10) for number, each in enumerate(seconds)]
    return made


def test_a_worker_that_is_slow_in_most_rounds_is_found() -> None:
    slow = probed("slow", 0.30, 0.28, 0.31, 0.09, 0.33, 0.30, 0.29)
    peers = [probed(name, 0.10, 0.11, 0.10, 0.10, 0.12, 0.10, 0.10) for name in "abc"]
    assert len(found("slow worker", Fleet([*peers, slow]))) == 1
    assert found("slow worker", Fleet([*peers, slow]))[0].startswith("slow is 3.0 times")


def test_a_machine_that_stalls_all_in_turn_has_no_slow_worker() -> None:
    a = probed("a", 0.1, 0.9, 0.1, 0.9, 0.1, 0.9, 0.1)
    b = probed("b", 0.9, 0.1, 0.1, 0.1, 0.9, 0.1, 0.9)
    assert not found("slow worker", Fleet([a, b]))


@pytest.mark.parametrize("rounds", [5, 6, 8, 11, 15])
def test_noise_makes_no_equal_worker_slow_however_few_the_rounds(rounds: int) -> None:
    draw, accused = random.Random(rounds), 0
    for _ in range(200):
        times = [[0.1 * draw.lognormvariate(0, 0.8) for _ in range(rounds)] for _ in "ab"]
        fleet = Fleet([probed("a", *times[0]), probed("b", *times[1])])
        accused += len(found("slow worker", fleet))
    assert accused <= 2


def test_too_few_rounds_to_tell_ask_for_more() -> None:
    fleet = Fleet([probed("a", *[0.1] * 6), probed("b", *[0.3] * 6)])
    assert looks_slow(fleet), "more are sent"
    assert not found("slow worker", fleet)
    assert "the slowest in 6 of 6 rounds, which may be chance" in unseen("slow worker", fleet)
    fleet = Fleet([probed("a", *[0.1] * 7), probed("b", *[0.3] * 7)])
    assert found("slow worker", fleet) == ["b is 3.0 times as slow as its peers"]


def test_probes_that_were_cut_short_are_counted() -> None:
    says = "only 4 rounds of probes, where 5 are needed (--probe-budget-s), and too few tokens"
    assert says in unseen("slow worker", Fleet([probed(name, *[0.1] * 4) for name in "ab"]))


def test_a_worker_with_more_to_do_is_not_called_slow() -> None:
    busy = probed("busy", *[0.4] * 7, running=12.0)
    fleet = Fleet([busy, probed("a", *[0.1] * 7), probed("b", *[0.1] * 7)])
    assert not found("slow worker", fleet)
    assert "more to do" in unseen("slow worker", fleet)


def test_without_probes_the_reported_pace_decides() -> None:
    quick = {"itl_sum": 0.0, "itl_count": 0.0, "running": 2.0}
    fleet = Fleet(
        [
            worker("a", quick, {**quick, "itl_sum": 10.0, "itl_count": 1000.0}),
            worker("b", quick, {**quick, "itl_sum": 30.0, "itl_count": 1000.0}),
        ]
    )
    assert found("slow worker", fleet) == ["b is 3.0 times as slow as its peers"]
    for each in fleet.workers:
        each.scrapes = scrapes(quick, quick)
    assert not found("slow worker", fleet)
    assert "too few tokens" in unseen("slow worker", fleet)


@pytest.mark.parametrize("tokens", [100, 300, 1000, 3000])
def test_stalls_by_others_prompts_make_no_equal_worker_slow(tokens: int) -> None:
    draw, accused = random.Random(tokens), 0
    for _ in range(100):
        fleet = Fleet()
        for name in "ab":
            stalls = sum(draw.random() < 0.01 for _ in range(tokens))  # of one second each
            before = {"itl_sum": 0.0, "itl_count": 0.0, "running": 2.0}
            took_s = 0.01 * tokens + stalls
            after = {**before, "itl_sum": took_s, "itl_count": float(tokens)}
            fleet.workers.append(worker(name, before, after))
        accused += len(found("slow worker", fleet))
    assert accused <= 2


def test_errors_preemptions_and_full_memory_are_found() -> None:
    before = {"requests": 0.0, "errors": 0.0, "preemptions": 0.0, "kv_used": 0.99, "waiting": 3.0}
    after = {**before, "requests": 50.0, "errors": 5.0, "preemptions": 20.0}
    for check in ("errors", "preemptions", "KV memory"):
        assert len(found(check, Fleet([worker("w", *[before] * 3, after)]))) == 1, check
    good = {**after, "errors": 0.0, "preemptions": 0.0, "waiting": 0.0}
    for check in ("errors", "preemptions", "KV memory"):
        begun = {**good, "requests": 0.0}
        assert not found(check, Fleet([worker("w", *[begun] * 3, good)])), check


@pytest.mark.parametrize(
    ("failed", "requests", "findings", "open_"),
    [(1, 5, 1, 0), (1, 20, 0, 1), (1, 100, 0, 1), (2, 20, 1, 0), (2, 1000, 0, 0), (20, 1000, 1, 0)],
)
def test_few_errors_are_judged_by_how_many_requests_there_were(
    failed: float, requests: float, findings: int, open_: int
) -> None:
    before, after = {"requests": 1e6, "errors": 9.0}, {"requests": 1e6 + requests}
    after["errors"] = before["errors"] + failed
    outcome = CHECKS["errors"](Fleet([worker("w", before, after)]))
    assert (len(outcome.findings), len(outcome.unseen)) == (findings, open_)
    assert len(outcome.looked_at) == 1 - open_
    reason = {("tasuki_failures_total", "worker"): (before["errors"], after["errors"])}
    shown = scrapes({"requests": 1e6}, {"requests": 1e6 + requests})
    router = Router("r", "tasuki", scrapes=shown, by_reason=reason)
    outcome = CHECKS["errors"](Fleet(routers=[router]))
    assert (len(outcome.findings), len(outcome.unseen)) == (findings, open_)
    assert len(outcome.looked_at) == 1 - open_


def test_a_fleet_that_fails_one_of_500_requests_is_seldom_accused() -> None:
    draw, accused = random.Random(1), 0
    for _ in range(500):
        failed = sum(draw.random() < 0.002 for _ in range(100))
        after = {"requests": 1e6 + 100, "errors": 2000.0 + failed}
        fleet = Fleet([worker("w", {"requests": 1e6, "errors": 2000.0}, after)])
        accused += len(found("errors", fleet))
    assert accused <= 5


def test_errors_of_a_router_that_was_started_again_are_found() -> None:
    reason = "tasuki_failures_total", "worker"
    shown = scrapes({"requests": 500.0}, {"requests": 40.0})
    for before, after, findings in ((90.0, 8.0, 1), (90.0, 0.0, 0), (2.0, 8.0, 1)):
        router = Router("r", "tasuki", scrapes=shown, by_reason={reason: (before, after)})
        assert len(found("errors", Fleet(routers=[router]))) == findings, (before, after)


def test_requests_that_admission_refuses_are_no_failures() -> None:
    """They count among those of kind overload, as do requests that find no worker."""
    shown = scrapes({"requests": 500.0}, {"requests": 600.0})
    for refused, unavailable, said in (
        (60.0, 0.0, "60 of 100 requests were refused"),
        (0.0, 60.0, "60 of 100 requests failed"),
        (1.0, 0.0, ""),
    ):
        by_reason = {
            ("tasuki_failures_total", "overload"): (7.0, 7.0 + refused + unavailable),
            ("tasuki_requests_total", "refused"): (7.0, 7.0 + refused),
        }
        router = Router("r", "tasuki", scrapes=shown, by_reason=by_reason)
        findings = CHECKS["errors"](Fleet(routers=[router])).findings
        assert len(findings) == bool(said)
        assert all(each.what.startswith(said) for each in findings), findings
        assert all(("log" in each.remedy) == (refused == 0) for each in findings)


def test_preemptions_of_our_workers_are_judged_by_their_routers_requests() -> None:
    ours = worker(
        "w",
        {"preemptions": 0.0, "running": 20.0},
        {"preemptions": 4.0, "running": 20.0},
        engine="tasuki",
    )
    assert "give the router's address" in unseen("preemptions", Fleet([ours]))
    for requests, findings in ((500.0, 0), (20.0, 1)):
        shown = scrapes({"requests": 0.0}, {"requests": requests})
        fleet = Fleet([ours], routers=[Router("r", "tasuki", scrapes=shown)])
        assert len(found("preemptions", fleet)) == findings, requests


@pytest.mark.parametrize(
    ("preempted", "requests", "findings", "open_"),
    [(1, 10, 0, 0), (2, 7, 1, 0), (2, 40, 0, 1), (2, 100, 0, 0), (5, 40, 1, 0)],
)
def test_few_preemptions_are_judged_by_how_many_requests_there_were(
    preempted: float, requests: float, findings: int, open_: int
) -> None:
    before = {"preemptions": 0.0, "requests": 0.0, "running": 4.0}
    after = {"preemptions": preempted, "requests": requests, "running": 4.0}
    outcome = CHECKS["preemptions"](Fleet([worker("w", before, after)]))
    assert (len(outcome.findings), len(outcome.unseen)) == (findings, open_)
    assert len(outcome.looked_at) == 1 - open_


def test_a_worker_that_the_router_lost_is_found() -> None:
    lost = worker("w", {"up": 1.0}, {"up": 0.0}, engine="tasuki")
    assert len(found("workers", Fleet([lost]))) == 1


def test_an_empty_picture_has_no_findings() -> None:
    for name, check in CHECKS.items():
        assert not check(Fleet()).findings, name
        assert not check(Fleet([worker("a"), worker("b", role="decode")])).findings, name


def test_a_counter_that_appears_with_its_first_error_has_grown_from_nothing() -> None:
    shown = Scrapes()
    success, errors = "vllm:request_success_total", "http_requests_total"
    for now, count in ((0.0, 0), (1.0, 30), (2.0, 30)):
        lines = [f'{success}{{finished_reason="stop"}} {100 + 100 * now}']
        lines.append(f'{errors}{{status="2xx"}} {100 + 100 * now}')
        lines += [f'{errors}{{status="5xx"}} {count}'] if count else []
        shown.add(now, *read(parse("\n".join(lines) + "\n"), VLLM))
    fleet = Fleet([Worker("w", "vllm", "mixed", "m", scrapes=shown)])
    (finding,) = CHECKS["errors"](fleet).findings
    assert finding.evidence == ('http_requests_total{status="5*"}: 30 of 200 requests in 2 s',)
