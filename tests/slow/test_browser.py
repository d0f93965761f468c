"""The HTML report in a real browser, opened as a file: nothing loads, everything answers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from residuum.auditing.result import AuditResult
from residuum.notebook import escape_invisible
from residuum.records import Knowledge
from residuum.report.html import DETERMINED, items_of, render
from tests import pages
from tests.documents import ROOT

pytestmark = pytest.mark.browser
FIGURES = ROOT / "docs" / "figures"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
all_recovered = partial(
    pages.audited, recovered_every=1
)  # every sample came back, so that every one has a card
VISIBLE = "[...document.querySelectorAll('.card')].filter(c => c.checkVisibility())"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One headless Chromium for the module; without it a reason, or a failure in CI."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        reason = "needs Chromium and playwright: apt-get install chromium; pip install playwright"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as driver:
        # The sandbox needs rights that containers lack; pages are our own files.
        browser_found = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser_found
        browser_found.close()


class Reports:
    """Writes reports and opens them from file://, keeping what went wrong or out."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.contexts: list[Any] = []
        self.problems: list[str] = []

    def __call__(
        self,
        page: AuditResult,
        width: int = 1280,
        scripts: bool = True,
        unfolded: bool = True,
        **options: bool,
    ) -> Any:
        path = self.folder / f"report-{len(self.contexts)}.html"
        path.write_text(render(page, **options), encoding="utf-8")
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=scripts
        )
        self.contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: self._asked_for(request.url, path.as_uri()))
        tab.goto(path.as_uri())
        if scripts and unfolded:
            tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        return tab

    def _asked_for(self, address: str, own_address: str) -> None:
        if address != own_address and not address.startswith("data:"):
            self.problems.append(f"request: {address}")


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Reports]:
    """At the end of every test nothing may have gone wrong, and nothing out."""
    reports = Reports(browser, tmp_path)
    yield reports
    for context in reports.contexts:
        context.close()
    assert reports.problems == []


def counts(tab: Any) -> tuple[float, float]:
    return float(tab.inner_text("#count-train")), float(tab.inner_text("#count-null"))


def numbers(tab: Any, name: str) -> list[float]:
    """A fact of every visible card, in the order on the page; cards without it are left out."""
    script = f"""(name) => {VISIBLE}.flatMap(card => [...card.querySelectorAll('.facts div')]
        .filter(row => row.querySelector('dt').textContent === name)
        .map(row => Number(row.querySelector('dd').textContent)))"""
    return list(tab.evaluate(script, name))


def test_policy_blocks_scripts_that_are_not_ours(opened: Reports) -> None:
    tab = opened(all_recovered(3))
    assert "default-src 'none'" in tab.get_attribute("meta[http-equiv]", "content")
    added = tab.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';
        let refused = ''; document.addEventListener('securitypolicyviolation',
            e => { refused = e.effectiveDirective; });
        document.head.append(s);
        return new Promise(done => setTimeout(() => done([window.ran ?? 0, refused]), 50)); }"""
    )
    assert added == [0, "script-src-elem"]
    assert ["Content Security Policy" in line for line in opened.problems] == [True]
    opened.problems.clear()  # the browser's own report of the refusal that was provoked


def test_requests_and_errors_would_be_noticed(opened: Reports) -> None:
    tab = opened(all_recovered(1))
    tab.evaluate("console.error('one'); setTimeout(() => { throw new Error('two'); })")
    tab.evaluate("location.href = 'file:///nowhere.html'")
    tab.wait_for_timeout(200)
    for problem in ("console: one", "two", "request: file:///nowhere.html"):
        assert any(problem in line for line in opened.problems), problem
    opened.problems.clear()


def test_slider_changes_both_counts_and_reset_brings_them_back(opened: Reports) -> None:
    page = pages.audited(60)
    tab = opened(page)
    assert page.control is not None
    assert page.evidence is not None
    start = counts(tab)
    assert start[0] == page.verdict.recovered
    rule = "document.querySelector('#histogram .rule').getBoundingClientRect().x"
    before = tab.evaluate(rule)
    tab.evaluate(
        "s => { const e = document.getElementById('threshold'); e.value = s;"
        "e.dispatchEvent(new Event('input', {bubbles: true})); }",
        60,
    )
    moved = counts(tab)
    value = float(tab.inner_text("#threshold-value"))
    assert value < page.control.threshold_null99
    assert moved[0] > start[0]
    assert moved[1] > start[1]
    assert moved[0] == int((page.evidence.values > value).sum())
    by_chance = int((page.evidence.null > value).sum()) / pages.SUBSETS
    assert moved[1] == pytest.approx(by_chance, rel=0.01)
    assert tab.evaluate(rule) < before - 5
    assert tab.is_visible("#moved")
    tab.click("#reset-threshold")
    assert counts(tab) == start
    assert tab.evaluate(rule) == pytest.approx(before, abs=0.5)
    assert tab.is_hidden("#moved")


def test_badges_follow_the_slider(opened: Reports) -> None:
    tab = opened(all_recovered(20))
    badges = "[...document.querySelectorAll('.badge')].filter(b => !b.hidden).length"
    assert tab.evaluate(badges) == int(counts(tab)[0])
    tab.focus("#threshold")
    tab.keyboard.press("End")
    assert (tab.evaluate(badges), counts(tab)) == (0, (0, 0))
    tab.keyboard.press("Home")
    assert (tab.evaluate(badges), counts(tab)) == (20, (20, 20))
    assert "beyond threshold" in tab.inner_text(".badge >> nth=0")
    tab.click("#reset-threshold")
    assert "beyond chance" in tab.inner_text(".badge >> nth=0")


@pytest.mark.parametrize(
    ("key", "name", "descending"),
    [
        ("scores:ncc", "ncc", True),
        ("scores:l2", "l2", False),
        ("margin", "margin", False),
        ("confidence", "confidence", True),
        ("determined_at_least", "others keep at least", True),
        ("radius_most", "distance at most", True),
    ],
)
def test_sorting(opened: Reports, key: str, name: str, descending: bool) -> None:
    tab = opened(all_recovered(20))
    tab.select_option("#sort", key)
    values = numbers(tab, name)
    assert len(values) >= 10
    assert values == sorted(values, reverse=descending)
    assert len(set(values)) > 5
    tab.click("#direction")
    assert numbers(tab, name) == sorted(values, reverse=not descending)
    tab.click("#reset-gallery")
    assert tab.get_attribute("#direction", "aria-pressed") == "false"


def test_filters(opened: Reports) -> None:
    page = all_recovered(24)
    tab = opened(page)
    visible = f"{VISIBLE}.length"
    assert tab.evaluate(visible) == 24
    tab.check("#recovered")
    assert tab.evaluate(visible) == page.verdict.recovered
    tab.uncheck("#recovered")
    label = sorted({item.label for item in items_of(page)})[0]
    tab.select_option("#label", label=label)
    assert tab.evaluate(visible) == sum(item.label == label for item in items_of(page))
    tab.select_option("#label", "")
    tab.select_option("#certificate-filter", label=DETERMINED)
    expected = sum(item.certificate == DETERMINED for item in items_of(page))
    assert 0 < tab.evaluate(visible) == expected < 24
    tab.select_option("#certificate-filter", "none")
    assert tab.evaluate(visible) == sum(not item.certificate for item in items_of(page))
    tab.select_option("#certificate-filter", "")
    tab.fill("#confidence", "0.9")
    assert (
        tab.evaluate(visible) == sum((item.confidence or 0) >= 0.9 for item in items_of(page)) > 0
    )
    assert tab.inner_text("#count-shown") == f"{tab.evaluate(visible)} of 24 cards"
    tab.click("#reset-gallery")
    assert tab.evaluate(visible) == 24


def test_filters_that_nothing_passes_say_so(opened: Reports) -> None:
    tab = opened(all_recovered(9))
    tab.focus("#threshold")
    tab.keyboard.press("End")
    tab.check("#recovered")
    assert tab.is_visible("#empty")
    assert tab.inner_text("#count-shown") == "0 of 9 cards"


def test_more_cards_come_when_asked_for(opened: Reports) -> None:
    tab = opened(all_recovered(60))
    seen = []
    for _ in range(2):
        seen.append(tab.evaluate(f"{VISIBLE}.length"))
        tab.click("#more")
    assert seen == [24, 48]
    assert tab.evaluate(f"{VISIBLE}.length") == 60
    assert tab.is_hidden("#more")


def test_keyboard_alone(opened: Reports) -> None:
    page = pages.audited(60, recovered_every=2)
    tab = opened(page)
    order = []
    for _ in range(150):
        tab.keyboard.press("Tab")
        order.append(tab.evaluate("document.activeElement.id"))
        ring = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none", order[-1]
        if order[-1] == "more":
            break
    assert [name for name in order if name] == [
        "threshold",
        "sort",
        "direction",
        "label",
        "certificate-filter",
        "confidence",
        "recovered",
        "reset-gallery",
        "more",
    ]
    tab.keyboard.press("Enter")
    assert tab.evaluate(f"{VISIBLE}.length") == 30
    start = counts(tab)
    tab.focus("#threshold")
    for _ in range(70):
        tab.keyboard.press("ArrowLeft")
    assert counts(tab)[0] > start[0]
    assert counts(tab)[1] > start[1]
    tab.focus("#reset-threshold")
    tab.keyboard.press("Enter")
    assert counts(tab) == start
    tab.focus("#recovered")
    tab.keyboard.press("Space")
    assert tab.inner_text("#count-shown").startswith(f"{page.verdict.recovered} of")
    tab.focus("#reset-gallery")
    tab.keyboard.press("Enter")
    assert tab.evaluate(f"{VISIBLE}.length") == 24


def test_every_control_has_a_name_and_counts_are_announced(opened: Reports) -> None:
    tab = opened(all_recovered(4), blur=True)
    unnamed = tab.evaluate(
        """[...document.querySelectorAll('input, select, button')].filter(e =>
        !(e.labels && e.labels.length) && !e.textContent.trim()).length"""
    )
    assert unnamed == 0
    assert tab.evaluate(
        "document.querySelector('#count-train').closest('[aria-live=polite]') !== null"
    )
    assert tab.evaluate("[...document.images].every(i => i.alt.length > 5 && i.naturalWidth > 0)")


def test_injected_names_stay_text(opened: Reports) -> None:
    page = all_recovered(14, names=pages.HOSTILE)
    tab = opened(page)
    assert "pwned" not in tab.evaluate("document.title.replace(/<.*>/, '')")
    assert tab.evaluate("document.scripts.length") == 2
    assert tab.evaluate("[...document.images].every(i => i.src.startsWith('data:'))")
    labels = tab.evaluate("[...document.querySelectorAll('.card .label')].map(e => e.textContent)")
    assert set(labels) == {escape_invisible(name) for name in pages.HOSTILE}
    assert tab.evaluate(
        "[...document.querySelectorAll('.card .label')].every(e => e.querySelector('bdi'))"
    )
    for name in pages.HOSTILE:
        tab.select_option("#label", label=escape_invisible(name).strip())
        assert tab.evaluate(f"{VISIBLE}.length") == 2, name
    assert not tab.evaluate("/[\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.textContent)")


def test_blurred_until_asked_for(opened: Reports) -> None:
    tab = opened(all_recovered(6), blur=True)
    sharp = """[...document.querySelectorAll('.card')].map(
        c => getComputedStyle(c.querySelector('img')).filter === 'none')"""
    assert not any(tab.evaluate(sharp))
    tab.focus(".card .reveal input")
    tab.keyboard.press("Space")
    assert tab.evaluate(sharp) == [True] + [False] * 5
    tab.check("#reveal-all")
    assert all(tab.evaluate(sharp))


def test_redacted_report_shows_no_image(opened: Reports) -> None:
    tab = opened(all_recovered(6), redact=True)
    assert tab.evaluate("document.images.length") == 0
    assert tab.evaluate(f"{VISIBLE}.length") == 6
    tab.focus("#threshold")
    tab.keyboard.press("Home")
    assert counts(tab) == (6, 6)


@pytest.mark.parametrize("kind", ["hostile", "without data", "points", "color", "empty", "blurred"])
def test_nothing_sticks_out(opened: Reports, kind: str) -> None:
    for width in [360, 768, 1280]:
        page, options = {
            "hostile": (all_recovered(14, names=(*pages.HOSTILE, "w" * 300)), {}),
            "without data": (pages.without_data(5), {}),
            "points": (all_recovered(5, (2,)), {}),
            "color": (all_recovered(3, (3, 32, 32)), {}),
            "empty": (all_recovered(0), {}),
            "blurred": (all_recovered(3), {"blur": True}),
        }[kind]
        tab = opened(page, width, **options)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_readable_without_scripts(opened: Reports) -> None:
    page = all_recovered(30)
    tab = opened(page, scripts=False)
    assert tab.locator(".card:visible").count() == 30
    assert tab.locator("#controls").is_hidden()
    assert tab.locator("#count-train").inner_text() == str(page.verdict.recovered)
    assert tab.locator("#histogram svg .area").first.is_visible()


def test_dark_and_print(opened: Reports) -> None:
    tab = opened(all_recovered(6))
    ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(tab.evaluate(ground)) > 200
    tab.emulate_media(color_scheme="dark")
    assert max(tab.evaluate(ground)) < 60
    tab.emulate_media(color_scheme="dark", media="print")
    assert tab.evaluate(ground) == [255, 255, 255]
    assert tab.locator("#controls").is_hidden()
    assert tab.locator("#threshold").is_hidden()
    assert tab.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("outcome", ["leak", "no-leak-found", "inconclusive"])
def test_text_has_enough_contrast(opened: Reports, outcome: str, scheme: str) -> None:
    """At least 4.5 to 1 (WCAG 2, AA) for every piece of text against what lies behind it."""
    tab = opened(all_recovered(3, outcome=outcome), blur=True)
    tab.emulate_media(color_scheme=scheme)
    worst = tab.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


def table_page() -> AuditResult:
    """Rows of a table instead of images."""
    result = all_recovered(8, (6,))
    assert result.evidence is not None
    known_arrays = {
        "nearest_holdout": result.evidence.x + 1,
        "spread": torch.ones(6, dtype=torch.float64),
    }
    named = {"features": ("age", "height", *"cdef"), "units": ("years", "cm", *[""] * 4)}
    return result.replace(
        evidence=result.evidence.replace(**known_arrays, **named), knowledge=Knowledge()
    )


PAGES = {outcome: partial(pages.example, outcome) for outcome in pages.OUTCOMES}
PAGES |= {"table": table_page, "bare": pages.bare, "without data": pages.without_data}
PAGES["members"] = partial(pages.members, 60, 40)


@pytest.mark.parametrize("outcome", pages.OUTCOMES)
def test_the_first_screen_answers_without_scrolling(
    opened: Reports, outcome: str, tmp_path: Path
) -> None:
    """Verdict, the three answers and the next step within 1280 x 800; pictures at 130 pixels."""
    tab = opened(pages.example(outcome), unfolded=False)
    tab.set_viewport_size({"width": 1280, "height": 800})
    bottom = "document.querySelector('.next').getBoundingClientRect().bottom"
    assert tab.evaluate(bottom) <= 800
    widths = tab.evaluate("[...document.querySelectorAll('.best img')].map(i => i.clientWidth)")
    assert len(widths) == 6
    assert min(widths) >= 130


@pytest.mark.parametrize("kind", PAGES)
def test_every_page_fits_phones_and_wide_screens(opened: Reports, kind: str) -> None:
    tab = opened(PAGES[kind]())
    for width in (390, 1280, 1920):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("leak", "light"),
        ("table", "dark"),
        ("without data", "dark"),
        ("members", "light"),
        ("no-leak-found", "dark"),
    ],
)
def test_axe_finds_nothing_to_complain_about(opened: Reports, kind: str, scheme: str) -> None:
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        reason = "needs axe: pip install axe-playwright-python"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    tab = opened(PAGES[kind]())
    tab.emulate_media(color_scheme=scheme)
    violations = Axe().run(tab).response["violations"]
    assert [
        (violation["id"], violation["nodes"][0]["html"][:120]) for violation in violations
    ] == []


def test_the_next_command_can_be_copied(opened: Reports) -> None:
    tab = opened(pages.example("leak"), unfolded=False)
    tab.click(".copy >> nth=0")
    selected = " ".join(tab.evaluate("getSelection().toString()").split())
    assert selected.startswith("residuum report runs/a --redact")


def test_a_word_leads_to_its_meaning_and_back(opened: Reports) -> None:
    tab = opened(pages.example("leak"), unfolded=False)
    assert tab.locator("#word-near-copy").is_hidden()
    tab.click(".term >> text=near-copies")
    assert tab.locator("#word-near-copy").is_visible()
    assert tab.locator("#metrics table").is_hidden()
    tab.click("nav >> text=Metrics")
    assert tab.locator("#metrics table").is_visible()


def test_the_finding_is_not_folded_away(opened: Reports) -> None:
    """Membership: its chart, counts and table are visible without a click or a script."""
    for scripts in (True, False):
        tab = opened(pages.members(60, 40), unfolded=False, scripts=scripts)
        assert tab.locator("#membership-chart .area").first.is_visible()
        assert tab.locator("#membership tbody tr:visible").count() == 40
    assert tab.locator(".question:visible").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_answers_keep_their_contrast_on_every_ground(opened: Reports, scheme: str) -> None:
    """A "no" in green is on the red ground of a leak."""
    tab = opened(pages.members(60, 40))
    tab.emulate_media(color_scheme=scheme)
    worst = tab.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


def test_a_narrow_screen_stacks_answers(opened: Reports) -> None:
    tab = opened(pages.members(60, 40), width=400, unfolded=False)
    left_edges = (
        "[...document.querySelectorAll('.question > *')].map(e => e.getBoundingClientRect().x)"
    )
    assert len(set(tab.evaluate(left_edges))) == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.disabled || !e.checkVisibility() || e.closest('script, style')) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e.closest('svg') ? style.fill : style.color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + '.' + (e.className.baseVal ?? e.className)];
  }
  return worst;
}"""
