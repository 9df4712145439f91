"""The access log of a real router in front of real workers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Sequence

import httpx
import pytest
from support.deployment import Deployment
from support.processes import Process
from support.waiting import until

PHASES = (
    "queue_ms",
    "prefill_ms",
    "first_token_ms",
    "transfer_exposed_ms",
    "first_decode_ms",
    "decode_ms",
)


@pytest.mark.parametrize("form", ["json", "text", "off"])
def test_a_split_request_and_a_refusal_have_a_line_each(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment, form: str
) -> None:
    arguments = ["--model", str(tiny.model_path), "--served-model-name", tiny.model]
    arguments += ["--port", "0", "--access-log", form, "--role-preference", "1000"]
    for worker in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{worker.port}"]
    router, url = start(arguments)
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        ready = lambda: client.get("/ready").status_code == 200  # noqa: E731
        until(ready, router.tail, deadline_s=30)
        body = {"prompt": "gong", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={**body, "model": "sesame"}).status_code == 404
    router.signal(signal.SIGINT)
    router.wait()
    output = router.output()
    assert "sesame" not in output
    lines = [x for x in output.splitlines() if "request ended" in x or "request refused" in x]
    if form == "off":
        assert not lines
        return
    ended, refused = lines
    if form == "text":
        assert " INFO access: request ended " in ended
        assert 'why="split ' in ended
        assert "status=404" in refused
        return
    line = json.loads(ended)
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("finished", 200, 8)
    assert {line["prefill_worker"], line["decode_worker"]} == {"0", "1"}
    assert all(0 < line[phase] <= line["elapsed_ms"] for phase in PHASES), line
    why = re.fullmatch(
        r"split ([\d.]+) ms \(prefill ([\d.]+), handoff ([\d.]+), decode ([\d.]+)\).*", line["why"]
    )
    assert why, line
    total, *parts = map(float, why.groups())
    # Each is rounded to 0.1 ms.
    assert sum(parts) == pytest.approx(total, abs=0.21)
    line = json.loads(refused)
    assert (line["outcome"], line["status"]) == ("refused", 404)
    assert line["reason"] == "model_not_found"
