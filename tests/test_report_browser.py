"""report.html in a real Chromium: drawn, free of errors, no wider than a phone, dark where asked, usable by keyboard."""

import os
import shutil

import pytest
from test_report import EVIL, a_line, a_run, a_step, judged

from specresearch.report import comparison_report, run_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[browser]'")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (or set CHROMIUM=/path/to/it)")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS.split(), "--disable-component-update", "--disable-sync"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run with hostile tokens, and a comparison of three -> their addresses."""
    root = tmp_path_factory.mktemp("pages")
    wide = [a_step([9, *range(1, 8), *[1] * 8], [-1, *[0] * 7, *range(1, 9)], [0, 3, 10])]
    lines = [a_line(i, a_line()["steps"] * 6 + wide, kind) for i, kind in enumerate(["qa", "math" * 9, "rag"])]
    pieces = {t: f" w{t}" for t in range(10)} | {2: EVIL, 3: "a" * 300}
    costs = {"target": {"1": 0.01, "8": 0.02}}
    run = a_run(lines, pieces=pieces, costs=costs, predicted_speedup=1.2)
    lossy = {"kind": "none", "verdict": "lossy", "reason": EVIL, "tv_bound": 0.1}
    others = [a_run(lines, config={"seed": "1" * 60}, lossless=lossy), a_run(lines, lossless=judged("violation"))]
    addresses = {}
    for name, html in (("run", run_report(run)), ("comparison", comparison_report([run, *others]))):
        (root / f"{name}.html").write_text(html, encoding="utf-8")
        addresses[name] = (root / f"{name}.html").as_uri()
    return addresses


@pytest.fixture
def opened(browser, pages):
    """Open a page -> it and its complaints; whatever it asks the network for counts as one."""
    contexts = []

    def open_page(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, faults = context.new_page(), []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append("a dialog"))
        page.on("request", lambda request: request.url in pages.values() or faults.append(request.url))
        page.goto(pages[name])
        return page, faults

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["run", "comparison"])
@pytest.mark.parametrize("width", [390, 1280])
def test_charts_are_drawn_within_the_page(opened, name, width):
    page, faults = opened(name, width)
    assert [fault for fault in faults if not fault.startswith("data:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.evaluate(
        """[...document.querySelectorAll('svg.chart')].map(svg => [
            svg.getBoundingClientRect().width, svg.querySelectorAll('.mark').length,
            [...svg.querySelectorAll('path.line')].every(path => path.getTotalLength() > 0)])"""
    )
    assert len(charts) >= 9
    assert all(250 < wide <= 430 and marks > 0 and lines for wide, marks, lines in charts)
    overflow = """[...document.querySelectorAll('svg.chart text')].filter(text => {
        const box = text.getBoundingClientRect(); return box.left < -1 || box.right > innerWidth + 1; }).length"""
    assert page.evaluate(overflow) == 0


def colours(page):
    """Of the paper, of the words, and of what is drawn."""
    return page.evaluate(
        """() => { const of = (css, what) => getComputedStyle(document.querySelector(css))[what];
        return [of('body', 'backgroundColor'), of('h1', 'color'), of('.chart .fill', 'fill'), of('.chart text', 'fill'),
                of('.chart .line', 'stroke')]; }"""
    )


def luminance(colour):
    r, g, b = (int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (r, g, b))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_dark_and_light_differ_also_when_it_switches(opened):
    page, _ = opened("run")
    light = colours(page)
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)  # a transition of the marks
    dark = colours(page)
    assert all(a != b for a, b in zip(light, dark))
    for paper, *rest in (light, dark):
        for colour in rest:
            high, low = sorted((luminance(paper), luminance(colour)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3
    assert luminance(light[0]) > 0.9 and luminance(dark[0]) < 0.05
    page.emulate_media(color_scheme="dark", media="print")
    assert luminance(colours(page)[0]) > 0.9  # paper is white


def test_the_keyboard_shows_what_the_pointer_shows(opened):
    page, faults = opened("run")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('mark')"):
            break
    tip = page.locator("#tip")
    assert tip.is_visible() and tip.inner_text() == "emitted 1 token: 31.6%"
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() == "emitted 2 tokens: 31.6%"
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator(".chart .mark").nth(0).hover()
    assert tip.inner_text() == "emitted 1 token: 31.6%"
    assert faults == []


def test_the_generation_shows_rejected_branches_as_text(opened):
    page, faults = opened("run")
    steps = page.locator("#tokens .step")
    assert steps.count() == 19
    steps.nth(0).focus()
    panel = page.locator("#step")
    assert "Step 1" in panel.inner_text() and "3 emitted, 4 drafted" in panel.inner_text()
    assert [item.strip() for item in panel.locator(".kept code").all_inner_texts()] == ["w1", "w4"]
    assert panel.locator(".rejected code").all_inner_texts() == ["a" * 300, EVIL]  # in the tree's order
    page.keyboard.press("ArrowRight")
    assert "Step 2" in panel.inner_text()
    steps.nth(2).hover()
    assert "Step 3" in panel.inner_text()
    assert page.locator("#tokens .t-draft").count() == 6 * 3 + 2 and page.locator("#tokens .t-bonus").count() == 19
    assert page.locator("img").count() == 0
    page.select_option("#answer", index=2)
    assert page.locator("#tokens .step").count() == 19
    assert faults == []


def test_a_press_on_the_legend_brings_a_run_forward(opened):
    page, _ = opened("comparison")
    button = page.locator("[data-run]").nth(1)
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    page.wait_for_timeout(200)
    shown = """[...document.querySelectorAll('#acceptance .mark')].map(mark => [mark.classList.contains('s1'),
        getComputedStyle(mark).opacity])"""
    assert {(own, opacity) for own, opacity in page.evaluate(shown)} == {(True, "1"), (False, "0.15")}
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"


def test_lossy_and_violation_stand_on_the_first_screen(opened):
    for width in (390, 1280):
        page, _ = opened("comparison", width)
        for word in ("LOSSY", "VIOLATION"):
            box = page.locator("header .verdict.loud strong", has_text=word).bounding_box()
            assert 0 <= box["y"] < 700
