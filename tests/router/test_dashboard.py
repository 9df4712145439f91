"""The dashboard in a browser, before real workers under load."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.browser import BROWSER, NO_BROWSER, Browser, Page
from support.client import Client
from support.deployment import Deployment
from support.processes import Process
from support.waiting import free_port, until

LOAD_PAUSE_S = 0.1
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
# WCAG 2, level AA.
LEAST_CONTRAST = 4.5

SHOWN = """({
  workers: [...document.querySelectorAll('.worker')].map((each) =>
    [each.dataset.worker, each.closest('.role').dataset.role, each.innerText]),
  requests: Object.fromEntries([...document.querySelectorAll('#requests li')].map((each) =>
    [each.dataset.request, {
      bar: each.querySelector('.bar').getAttribute('aria-label'),
      route: each.querySelector('.route').textContent,
      width: each.querySelector('.phase.decode')?.getBoundingClientRect().width ?? 0,
    }])),
  links: [...document.querySelectorAll('#link-table tbody tr')].map((row) =>
    [...row.cells].slice(0, 2).map((cell) => cell.textContent)),
  drawn: document.querySelectorAll('#links .link').length,
  table: document.getElementById('link-table').offsetHeight > 0,
  lines: [...document.querySelectorAll('.chart .line[d^=M]')].length,
  goodput: document.querySelector('.chart small:not(:empty)').textContent,
  live: document.getElementById('live').textContent,
  width: document.documentElement.scrollWidth,
  background: getComputedStyle(document.body).backgroundColor,
})"""

# Of each element with text of its own: its contrast with the first ground that is opaque. A
# hatched ground has the color of its first stripe.
CONTRASTS = """(() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => channels(color).slice(0, 3)
    .map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    const style = getComputedStyle(element);
    const stripe = style.backgroundImage.match(/rgb\\([^)]*\\)/);
    if (stripe) return stripe[0];
    const color = channels(style.backgroundColor);
    const opaque = color.length === 3 || color[3] === 1;
    return opaque ? style.backgroundColor : ground(element.parentElement);
  };
  const own = (element) => [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.body.querySelectorAll('*')]
    .filter((element) => own(element) && element.getClientRects().length)
    .map((element) => {
      const style = getComputedStyle(element);
      const color = element instanceof SVGElement ? style.fill : style.color;
      const [a, b] = [luminance(color), luminance(ground(element))].sort((x, y) => y - x);
      return [`${element.tagName} ${element.textContent.slice(0, 30)}`, (a + 0.05) / (b + 0.05)];
    });
})()"""


# Three columns, workers without a role, and names as long as they get. Measured before the next
# state is shown: the page's width, the narrowest card's and the highest card's height.
CROWDED = """(async () => {
  const state = await (await fetch('dashboard/state')).json();
  const like = (id, role, address) => ({...state.workers[0], id, role, address,
    model: 'organisation/a-model-of-a-long-name-instruct-fp8'});
  state.workers.push(
    like(2, 'mixed', 'vllm://worker-0.of.a.long.name.cluster.local:8000?role=decode'),
    like(3, null, '10.0.0.1:7001'), like(4, null, '10.0.0.2:7001'));
  state.links.push({...state.links[0], from: '0', to: '2'});
  show(state);
  const cards = [...document.querySelectorAll('.worker')]
    .map((each) => each.getBoundingClientRect());
  return [document.documentElement.scrollWidth, Math.min(...cards.map((each) => each.width)),
    Math.max(...cards.map((each) => each.height))];
})()"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip(NO_BROWSER)
    browser = Browser(tmp_path)
    yield browser
    browser.close()


@pytest.fixture
def dashboard(
    start: Callable[[Sequence[str]], tuple[Process, str]], tiny: Deployment
) -> Iterator[str]:
    """The page's URL, of a router under load."""
    port = free_port()
    arguments = ["--model", str(tiny.model_path), "--port", "0", "--admin-port", str(port)]
    arguments += ["--role-preference", "1000", "--ttft-target-ms", "60000"]
    for handle in tiny.workers.values():
        arguments += ["--worker", f"127.0.0.1:{handle.port}"]
    router, url = start(arguments)
    client = Client(url, tiny.model_path.name)
    until(lambda: client.http.get("/ready").status_code == 200, router.tail, deadline_s=30)
    over = threading.Event()

    def load() -> None:
        number = 0
        while not over.wait(LOAD_PAUSE_S):
            number += 1
            client.complete([number % 97] * 200, max_tokens=32)

    loads = [threading.Thread(target=load) for _ in range(2)]
    for each in loads:
        each.start()
    yield f"http://127.0.0.1:{port}/dashboard"
    over.set()
    for each in loads:
        each.join()
    client.close()
    tiny.wait_idle()


def test_the_page_shows_the_state(
    dashboard: str, tiny: Deployment, browser: Browser, tmp_path: Path
) -> None:
    # Pictures for a person to look at, if a folder is named.
    pictures = Path(os.environ.get("TASUKI_DASHBOARD_PICTURES", tmp_path))
    with httpx.Client(trust_env=False) as http:

        def state() -> dict[str, Any]:
            found: dict[str, Any] = http.get(f"{dashboard}/state").json()
            return found

        def known() -> bool:
            found = state()
            return bool(found["links"]) and len(found["series"]) > 2

        until(known, "links and series", deadline_s=30)
        grounds = set()
        for width in WIDTHS:
            for scheme in SCHEMES:
                page = Page(browser, dashboard, width, scheme)
                until(
                    lambda page=page: page.evaluate("document.documentElement?.dataset.shown"),
                    "a page that shows the state",
                )
                shown = page.evaluate(SHOWN)
                check(shown, state(), tiny)
                assert shown["width"] <= width, "the page is wider than the window"
                # Where the columns stand side by side the links are drawn between them.
                assert (shown["drawn"] == 1) == (width == 1280) != shown["table"]
                grounds.add((scheme, shown["background"]))
                weak = [each for each in page.evaluate(CONTRASTS) if each[1] < LEAST_CONTRAST]
                assert not weak, (width, scheme)
                page.screenshot(pictures / f"dashboard-{width}-{scheme}.png")
                is_live(page)
                assert not page.complaints()
        assert len(grounds) == len(SCHEMES), grounds


def test_many_columns_and_long_names_fit(dashboard: str, browser: Browser) -> None:
    with httpx.Client(trust_env=False) as http:
        linked = lambda: http.get(f"{dashboard}/state").json()["links"]  # noqa: E731
        until(linked, "a link", deadline_s=30)
    for width in (*WIDTHS, 800):
        page = Page(browser, dashboard, width, "light")
        until(
            lambda page=page: page.evaluate("document.documentElement?.dataset.shown"),
            "a page that shows the state",
        )
        whole, narrowest, highest = page.evaluate(CROWDED)
        assert whole <= width, "the page is wider than the window"
        assert narrowest > 200 and highest < 300, (width, narrowest, highest)


def check(shown: dict[str, Any], state: dict[str, Any], tiny: Deployment) -> None:
    """What the page shows is what the router said a moment ago."""
    assert [(each[0], each[1]) for each in shown["workers"]] == [("0", "prefill"), ("1", "decode")]
    for handle, (_, _, text) in zip(tiny.workers.values(), shown["workers"], strict=True):
        assert f"127.0.0.1:{handle.port}" in text and "ready" in text
        assert tiny.model_path.name in text
    assert shown["links"] == [["0", "1"]]
    # Two lines of each of two quantiles, and one at least of each other chart.
    assert shown["lines"] >= 8
    assert shown["goodput"] == "TTFT ≤ 60.0 s"
    assert shown["live"].startswith("● live")
    both = [each for each in state["requests"] if each["id"] in shown["requests"]]
    assert both, "a finished request"
    for request in both:
        row = shown["requests"][request["id"]]
        assert row["route"] == "0 → 1"
        assert row["width"] > 1
        for phase, name in (("prefill", "prefill"), ("decode", "decode")):
            assert f"{name} {milliseconds(request['phases'][phase])}" in row["bar"]
        assert request["outcome"] == "done" and request["output_tokens"] == 32
        assert request["phases"]["transfer_bytes"] > 0


def milliseconds(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.{0 if ms >= 100 else 1 if ms >= 10 else 2}f} ms"


def is_live(page: Page) -> None:
    """A request appears that was not there before."""
    latest = "document.querySelector('#requests li').dataset.request"
    before = page.evaluate(latest)
    until(lambda: page.evaluate(latest) != before, "a page that follows the state", deadline_s=15)


@pytest.mark.system
def test_a_router_that_does_not_answer_is_not_called_live(
    start: Callable[[Sequence[str]], tuple[Process, str]], browser: Browser
) -> None:
    port = free_port()
    router, _ = start(["--worker", "vllm://127.0.0.1:1", "--port", "0", "--admin-port", str(port)])
    page = Page(browser, f"http://127.0.0.1:{port}/dashboard", WIDTHS[0], "light")
    live = "document.getElementById('live')?.textContent ?? ''"
    until(lambda: page.evaluate(live).startswith("●"), "a live page")
    router.signal(signal.SIGSTOP)
    try:
        until(lambda: "no answer" in page.evaluate(live), "a page that notices", deadline_s=20)
    finally:
        router.signal(signal.SIGCONT)
    until(lambda: page.evaluate(live).startswith("●"), "a live page again", deadline_s=20)


def test_pages_of_other_names_see_nothing(dashboard: str) -> None:
    with httpx.Client(trust_env=False) as http:
        for path in ("", "/state"):
            assert http.get(f"{dashboard}{path}").status_code == 200
            # As after DNS rebinding.
            answer = http.get(f"{dashboard}{path}", headers={"host": "example.org"})
            assert answer.status_code == 403 and "localhost" in answer.text


def test_the_page_uses_nothing_but_its_own_files(dashboard: str) -> None:
    with httpx.Client(trust_env=False) as http:
        page = http.get(dashboard)
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "http" not in policy
        for path in ("charts.js", "dashboard.js", "dashboard.css", "icon.svg"):
            assert f"dashboard/{path}" in page.text
            answer = http.get(f"{dashboard}/{path}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == policy
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
