"""The page: nothing of a user's runs as HTML, nothing is fetched, and a browser shows it well."""

import copy
import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.evaluation.loads import Loads, find_load_maps
from acm_compiler.evaluation.times import BASE, OURS, Row, Times
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.reporting.contents import Report
from acm_compiler.reporting.time_chart import time_facts
from acm_compiler.reporting.write import environment, write_report
from acm_compiler.runtime.control import FixedK
from tests.helpers import golden
from tests.helpers.pictures import OPEN, TASK, picture_batch, picture_model

EVIL = '<script>alert("x")</script>&$x_1$'
ROW = {"time_ms": 2.0, "ratio_q1": 0.4, "ratio_q3": 0.6, "mac_ratio": 0.45, "error": None}
TIMES = Times(
    rows=tuple(
        Row(batch=batch, budget=budget, contender=OURS if budget else BASE, ratio=budget or 1.0, **ROW)
        for batch in (1, 8)
        for budget in (None, OPEN, 0.5, 1.0)
    ),
    versions={"torch": "2.99", "acm_compiler": EVIL},
    device=f"cpu {EVIL}",
    clock="wall time",
    threads=3,
    date="2026-11-23",
    break_even_budget=OPEN,
    break_even_batch=8,
)
VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Every start tag with its attributes, and the tree without rows of tables; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.skeleton = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if "tbody" not in self.open:
            kind = dict(attrs).get("class")
            self.skeleton.append("  " * len(self.open) + tag + (f".{kind.replace(' ', '.')}" if kind else ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)
        if self.open[-1:] in (["h1"], ["h2"], ["h3"], ["th"]) and "tbody" not in self.open:
            self.skeleton[-1] += f": {re.sub('[0-9]+', '0', data)}"

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report about a model whose every name is hostile."""
    model = picture_model()
    plan = conversion(model).plan
    found = evaluate(
        model, [picture_batch(36)], TASK, budgets=[OPEN, 0.5, 1.0, FixedK(1), FixedK(4)], dense=copy.deepcopy(model)
    )
    maps = find_load_maps(model, picture_batch(12), TASK, [OPEN, 0.5])
    sites = tuple(dataclasses.replace(site, name=f"{i}{EVIL}") for i, site in enumerate(plan.sites))
    budgets = tuple(
        dataclasses.replace(
            b, per_site=tuple(dataclasses.replace(s, name=f"{i}{EVIL}") for i, s in enumerate(b.per_site))
        )
        for b in found.budgets
    )
    metric = dataclasses.replace(found.metric, name=f"{EVIL} accuracy")
    report = Report(
        title=EVIL,
        description=EVIL,
        evaluation=dataclasses.replace(found, metric=metric, budgets=budgets, model=f"my.{EVIL}"),
        plan=dataclasses.replace(plan, sites=sites),
        loads=Loads(maps=maps),
        times=TIMES,
    )
    return write_report(tmp_path_factory.mktemp("run") / "report", report)


@pytest.fixture(scope="module")
def page(written):
    return Page(written.read_text())


def test_what_is_not_markup_is_escaped():
    show = environment().from_string('<p title="{{ title }}">{{ text }}</p>').render
    assert show(title='"', text="a < b & c") == '<p title="&#34;">a &lt; b &amp; c</p>'
    assert show(title="5 %", text=Markup("<b>5 %")) == '<p title="5\u00a0%"><b>5 %</p>'


def test_the_skeleton_of_the_page_is_that_of_the_golden_file(page):
    golden.check("page.txt", "\n".join(page.skeleton) + "\n")


def test_names_of_users_stay_text(page, written):
    assert page.all("script") == []
    assert EVIL in page.text
    assert "<script" not in written.read_text()
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]


def test_nothing_is_fetched(page, written):
    places = [a.get("src") or a.get("srcset") or a.get("href") for _, a in page.tags]
    assert all(place.startswith("data:image/") for place in places if place)
    assert not re.search(r"url\(|@import|https?:", written.read_text())


def test_every_picture_has_words_for_those_who_cannot_see_it(page):
    pictures = page.all("img")
    assert len(pictures) == 2 + 6 * 3
    assert all(len(attributes["alt"]) > 5 for attributes in pictures)


def test_the_page_is_made_for_phones_and_for_dark_rooms(page, written):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme:dark" in written.read_text()
    assert page.all("html")[0]["lang"] == "en"
    assert sum("dark" in source["media"] for source in page.all("source")) == 3


def test_the_page_says_what_was_measured_and_what_was_modelled(page):
    said = page.text
    for words in ("36 examples", "9 sources", "MACs are not time", "Measured", "Modelled", "reached", "torch "):
        assert words in said


def test_the_page_says_with_what_times_were_measured(page):
    for words in (
        "Time over budget",
        "3 threads",
        "torch 2.99",
        "wall time",
        "faster than the dense model from batch 8",
    ):
        assert words in page.text
    (chart,) = [attributes["alt"] for attributes in page.all("img") if "time of the" in attributes["alt"]]
    assert "batch 8, budget 0.50: 50 % of the dense model's time, 45 % of its MACs" in chart


@pytest.mark.parametrize("without", [BASE, OURS])
def test_times_stand_below_their_headings_also_where_a_contender_has_none(without):
    times = dataclasses.replace(
        TIMES, rows=tuple(row for row in TIMES.rows if (row.contender, row.batch) != (without, 8))
    )
    table = time_facts(times)["table"]
    assert {len(row) for row in table.groups[0]} == {len(table.headers)}
    empty = [cell for cell, head in zip(table.groups[0][1], table.headers, strict=True) if cell == ""]
    assert len(empty) == (1 if without == BASE else 3)


def test_charts_lie_beside_the_page_as_png_and_svg_on_an_opaque_ground(written):
    image = pytest.importorskip("matplotlib.image")
    names = {path.name for path in written.parent.iterdir()}
    charts = ("accuracy_over_cost", "learners_per_site", "load_maps", "time_over_budget")
    assert names == {"index.html", *(f"{chart}.{kind}" for chart in charts for kind in ("png", "svg"))}
    for chart in charts:
        pixels = image.imread(written.parent / f"{chart}.png")
        assert (pixels[..., 3:] == 1).all() and (pixels[0, 0, :3] == 1).all()  # read on dark pages, too
        ground = re.search(r'<path[^>]*style="([^"]*)"', (written.parent / f"{chart}.svg").read_text())
        assert ground[1] == "fill: #ffffff"


HARNESS = """<!doctype html><title>harness</title><body style="margin:0">
<iframe id="frame" src="index.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<script>
onload = () => {
  const page = document.getElementById("frame").contentDocument, root = page.documentElement;
  const images = [...page.images].map(i => i.naturalWidth);
  const inside = e => e.closest(".scroll") !== null;
  const wide = [...page.body.querySelectorAll("*")].filter(
    e => !inside(e) && e.getBoundingClientRect().right > WIDTH + .5).map(e => e.tagName);
  const cut = [...page.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.ariaLabel);
  document.title = JSON.stringify({cut, images, wide, scroll: root.scrollWidth, text: page.body.innerText.length});
};
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_every_picture_and_needs_no_sideways_scrolling(written, tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    harness = written.parent / f"harness{width}.html"
    harness.write_text(HARNESS.replace("WIDTH", str(width)))
    try:
        done = _browse(browser, harness, tmp_path)
    finally:
        harness.unlink()
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]
    seen = json.loads(title.replace("&quot;", '"'))
    assert len(seen["images"]) == 2 + 6 * 3 and all(pixels > 0 for pixels in seen["images"])
    assert seen["scroll"] <= width and seen["wide"] == []
    assert seen["text"] > 1000
    assert width < 1280 or seen["cut"] == [], "tables that need a scrollbar where the margins have room"
    assert "CONSOLE" not in done.stderr


def _browse(browser, page, profile):
    quiet = ["no-first-run", "disable-background-networking", "disable-component-update", "disable-sync"]
    options = ["headless", "no-sandbox", "disable-gpu", *quiet, "allow-file-access-from-files", "enable-logging=stderr"]
    command = [browser, *(f"--{option}" for option in options), f"--user-data-dir={profile}", "--window-size=1400,900"]
    return subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
