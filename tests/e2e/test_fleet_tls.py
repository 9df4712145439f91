"""mTLS with real workers and a real router: a split request is served, and strangers are not."""

from __future__ import annotations

import queue
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from support.certificates import Authority, options, trusting
from support.deployment import Deployment, Options
from support.direct import WorkerStream
from support.processes import Process
from support.serving import Serve, wait_for_url
from support.waiting import until

from tasuki import _native
from tasuki.kv.fleet import Fleet

pytestmark = pytest.mark.skipif(
    not _native.HAS_TLS, reason="the extension has no TLS: make setup FEATURES=tls"
)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("fleet") / "ca")


@pytest.fixture(scope="module")
def secure(
    deploy_for_module: Callable[[Options], Deployment], tiny_model: Path, ca: Authority
) -> Deployment:
    """1 prefill + 1 decode; the router has another certificate than the workers."""
    return deploy_for_module(
        Options(
            tiny_model,
            prefill=1,
            decode=1,
            worker=("--kv-memory", "64000000", *options(ca.fleet("workers"))),
            router=options(ca.fleet("router")),
        )
    )


@pytest.fixture
def refused(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[[int, Fleet | None], str]]:
    """Starts a router before a worker's port; gives what it logs about the refusal."""
    started: list[Process] = []

    def start(port: int, fleet: Fleet | None) -> str:
        words = ["router", "--port", "0", "--model", str(tiny_model)]
        words += ["--worker", f"127.0.0.1:{port}", *(options(fleet) if fleet else [])]
        router = Process("router", words, tmp_path / "router.log")
        started.append(router)
        router.start()
        url = router.wait_for_line("listening on ", deadline_s=DEADLINE_S)

        def refusal() -> str | None:
            lines = router.output().splitlines()
            return next((line for line in lines if "worker refused" in line), None)

        line = until(refusal, router.tail, deadline_s=DEADLINE_S)
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
        return line

    yield start
    for process in started:
        process.kill()


def test_a_split_request_is_served(secure: Deployment) -> None:
    answer = secure.http.complete(list(range(3, 103)), max_tokens=12)
    assert len(answer.tokens) == 12
    assert answer.timings is not None
    assert answer.timings["prefill_worker"] != answer.timings["decode_worker"]
    secure.wait_quiet()
    assert secure.total("kv_pulled_blocks_total", "decode") == 7


def test_a_worker_does_not_speak_plain_text(secure: Deployment) -> None:
    port = secure.workers["decode-0"].port
    with pytest.raises(grpc.RpcError):
        WorkerStream(f"127.0.0.1:{port}", queue.Queue())


@pytest.mark.parametrize("who", ["plain", "other ca", "other name", "expired"])
def test_a_router_without_a_certificate_of_the_fleet_is_refused(
    secure: Deployment,
    ca: Authority,
    who: str,
    tmp_path: Path,
    refused: Callable[[int, Fleet | None], str],
) -> None:
    stranger = {
        "plain": lambda: None,
        "other ca": lambda: trusting(Authority(tmp_path / "other").fleet("stranger"), ca),
        "other name": lambda: ca.fleet("elsewhere", dns="example.com"),
        "expired": lambda: ca.fleet("old", days=-1),
    }[who]()
    line = refused(secure.workers["prefill-0"].port, stranger)
    assert "--fleet-cert, --fleet-key and --fleet-ca" in line


def test_a_worker_without_a_certificate_is_refused(
    tiny: Deployment, ca: Authority, refused: Callable[[int, Fleet | None], str]
) -> None:
    line = refused(tiny.workers["prefill-0"].port, ca.fleet("lonely"))
    assert "--fleet-cert, --fleet-key and --fleet-ca" in line


def test_a_router_says_which_file_is_wrong(tmp_path: Path, tiny_model: Path, ca: Authority) -> None:
    fleet = Fleet(ca.fleet("one").cert, ca.fleet("two").key, ca.folder / "ca.pem")
    words = ["router", "--port", "0", "--model", str(tiny_model), "--worker", "127.0.0.1:1"]
    router = Process("router", [*words, *options(fleet)], tmp_path / "router.log")
    router.start()
    assert router.wait(deadline_s=DEADLINE_S) == 1
    assert "--fleet-cert and --fleet-key do not fit together" in router.output()


def test_serve_passes_certificates_on(serve: Serve, tiny_model: Path, ca: Authority) -> None:
    own = ca.fleet("front", dns="localhost")
    process = serve(
        *("--model", str(tiny_model), "--dtype", "float32", "--max-model-len", "512"),
        *("--port", "0", "--mixed", "1", "--tls-cert", str(own.cert), "--tls-key", str(own.key)),
        *options(ca.fleet("all")),
    )
    url = wait_for_url(process)
    assert url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(own.ca))
    with httpx.Client(verify=trusted, trust_env=False) as client:
        at = url.replace("127.0.0.1", "localhost")
        body = {"prompt": "gong", "max_tokens": 3}
        body["model"] = client.get(f"{at}/v1/models").json()["data"][0]["id"]
        assert client.post(f"{at}/v1/completions", json=body).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/ready", trust_env=False)
