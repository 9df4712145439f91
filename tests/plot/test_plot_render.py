"""The drawings carry the figures' data; the page needs no network and renders."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from PIL import Image
from plot_synthetic import write_sweep
from plotly.offline import get_plotlyjs
from support.browser import BROWSER, HEADLESS, NO_BROWSER

from tasuki.plot import html, png
from tasuki.plot.figures.marks import Axis, Bars, Curve, Figure, Guide, Panel
from tasuki.plot.figures.registry import figures
from tasuki.plot.labels import free_place
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options
from tasuki.plot.palette import look
from tasuki.plot.write import write

SMALL = Figure(
    name="small",
    title="A title with <angle> & $dollar$",
    subtitle="a subtitle",
    panels=(
        Panel(
            Axis("x"),
            Axis("y", log=True),
            curves=(
                Curve("one", (1.0, 2.0, 3.0), (10.0, 100.0, 1000.0), 0, labels=("a", "b", "c")),
                Curve("other", (1.0, 2.0), (20.0, 30.0), 1, choice="heavy"),
                Curve("other", (1.0, 2.0), (40.0, 50.0), 1, choice="light"),
            ),
            guides=(Guide("y", 50.0, "limit"), Guide("x", 99.0, "far")),
        ),
        Panel(
            Axis("", categories=("p", "q")),
            Axis("height", from_zero=True),
            bars=(Bars("bars", (0.0, 1.0), (3.0, 4.0), (0, 1), low=(2.0, 3.5), high=(5.0, 4.5)),),
        ),
    ),
    columns=2,
    choices=("light", "heavy"),
    choice="light",
)


def test_png_draws_every_series() -> None:
    first, second = png.draw(SMALL).axes
    lines = {tuple(line.get_xdata()): line for line in first.lines}
    assert tuple(lines[1.0, 2.0, 3.0].get_ydata()) == (10.0, 100.0, 1000.0)
    assert tuple(lines[1.0, 2.0].get_ydata()) == (40.0, 50.0), "only the choice is drawn"
    assert to_hex(lines[1.0, 2.0].get_color()).upper() == look(1).color
    texts = [text.get_text() for text in first.texts]
    assert {"a", "b", "c", "limit", "far →"} == set(texts)
    assert first.get_yscale() == "log" and first.get_xlim()[1] < 99
    assert [patch.get_height() for patch in second.patches] == [3.0, 4.0]
    assert [tick.get_text() for tick in second.get_xticklabels()] == ["p", "q"]


def test_png_is_a_picture_of_readme_width(tmp_path: Path) -> None:
    png.write_png(SMALL, tmp_path / "small.png")
    with Image.open(tmp_path / "small.png") as image:
        assert image.width == 1350
        seen = {color for _, color in image.convert("RGB").getcolors(1 << 16) or []}
    assert tuple(bytes.fromhex(look(0).color[1:])) in seen
    assert (tmp_path / "small.png").stat().st_size < 100_000


def test_html_draws_every_series() -> None:
    canvas = html.draw(SMALL)
    one, heavy, light = [trace for trace in canvas.data if trace.type == "scatter"]
    assert (one.x, one.y) == ((1.0, 2.0, 3.0), (10.0, 100.0, 1000.0))
    assert (one.marker.color, one.visible, one.showlegend) == (look(0).color, True, True)
    assert (heavy.visible, light.visible, light.y) == (False, True, (40.0, 50.0))
    (bars,) = [trace for trace in canvas.data if trace.type == "bar"]
    assert bars.y == (3.0, 4.0)
    assert (bars.error_y.array, bars.error_y.arrayminus) == ((2.0, 0.5), (1.0, 0.5))
    assert canvas.layout.yaxis.type == "log"
    guides = {a.text: a for a in canvas.layout.annotations if a.name == "guide"}
    assert guides["limit"].y == pytest.approx(1.69897), "annotations are placed by the logarithm"
    assert guides["far →"].xref == "x domain"


def test_the_menu_shows_one_choice() -> None:
    (menu,) = html.draw(SMALL).layout.updatemenus
    assert [button.label for button in menu.buttons] == ["light", "heavy"]
    assert menu.active == 0
    shown = [button.args[0]["visible"] for button in menu.buttons]
    assert shown == [[True, False, True, True], [True, True, False, True]]


def test_labels_find_free_places() -> None:
    first = free_place((0.0, 0.0), "12/s", [])
    assert first is not None and first[0][2:] == ("left", "top")
    second = free_place((0.0, 0.0), "12/s", [first[1]])
    assert second is not None and second[0] != first[0]
    everywhere = [(-99.0, -99.0, 99.0, 99.0)]
    assert free_place((0.0, 0.0), "12/s", everywhere) is None


def test_lines_beyond_the_palette_still_differ() -> None:
    looks = [look(i) for i in range(21)]
    assert len({(each.color, each.plotly_marker) for each in looks}) == 21


class _References(HTMLParser):
    """What a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.style = ""
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        fetched = {"src", "srcset", "data", "poster", "action", "background"}
        fetched |= {"href"} if tag != "a" else set()
        for name, value in attrs:
            if name in fetched and value and not value.startswith("data:"):
                self.found.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.style += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), rates=(1, 2, 4), count=60)
    (written,) = write("", [str(folder)], Options(), folder / "page.html")
    return written


def test_the_page_fetches_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    references = _References()
    references.feed(text)
    assert not references.found
    assert not re.search(r"@import|url\((?!data:)", references.style)
    assert text.count(get_plotlyjs()) == 1, "inlined, and once"
    assert "cdn.plot.ly" not in text.partition("<script>")[0]


def test_the_page_has_every_figure_and_number(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    drawn = figures(load([Source(page.parent)]), Options())
    for figure in drawn:
        assert f"<section id={figure.name}>" in text and f'href="#{figure.name}"' in text
    rows = text.partition("<section id=numbers>")[2]
    assert rows.count("<tr>") == 1 + 4 * 3
    assert "<td>1p2d</td><td>4/s</td>" in rows


def test_labels_cannot_break_the_page(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", rates=(1,), count=30)
    word = f"<script>alert(1)</script>={folder / '3m' / 'rate-1.json'}"
    write("pareto", [word], Options(), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text


@pytest.mark.system
@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_the_page_renders_in_a_browser(page: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    picture = tmp_path / "page.png"
    words = [
        BROWSER,
        *HEADLESS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    words += ["--virtual-time-budget=10000", "--window-size=1200,9000"]
    dom = subprocess.run(
        [*words, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=200
    ).stdout
    drawn = figures(load([Source(page.parent)]), Options())
    for figure in drawn:
        _, _, section = dom.partition(f'id="plot-{figure.name}"')
        section = section.partition("</section>")[0]
        assert "main-svg" in section, f"{figure.name} was not drawn"
        traces = section.count('class="trace')
        assert traces >= sum(1 for trace in html.draw(figure).data if trace.visible and trace.x)
    subprocess.run(
        [*words, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=200
    )
    with Image.open(picture) as image:
        found = image.convert("RGB").getcolors(1 << 22) or []
    pixels = {color: count for count, color in found}
    for i in range(4):
        assert pixels.get(tuple(bytes.fromhex(look(i).color[1:])), 0) > 100
