"""The HTML report as text: what it says, what it carries, and what it never carries."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from residuum.auditing.verdict import INCONCLUSIVE
from residuum.report import html
from residuum.report.charts import histogram
from residuum.report.drawing import MAX_SIDE, data_uri, fitted
from residuum.report.html import Item, frames, inline, isolated, items_of, render, visible
from tests import pages

DIRECTION_MARKS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069\x00\x1b]")


class Elements(HTMLParser):
    """Tags with their attributes, and the text outside script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.raw = "", {"style": "", "script": ""}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag in self.raw and "type" not in dict(attrs):
            self._inside = tag
        elif tag == "script":
            self._inside = "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag in self.raw else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside in self.raw:
            self.raw[self._inside] += data
        elif self._inside != "data":
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("outcome", pages.OUTCOMES)
def test_the_verdict_comes_first_with_its_numbers(outcome: str) -> None:
    page = pages.audited(30, outcome=outcome)
    text = Elements(render(page)).text
    verdict = page.verdict
    assert verdict.expected_by_chance is not None
    count = f"{verdict.recovered} of 30" if outcome == "leak" else "30 training samples"
    for part in (
        verdict.headline,
        count,
        f"{verdict.expected_by_chance:g}",
        "Next step",
        "residuum ",
    ):
        assert part in text
    assert text.index(verdict.sentence) < text.index("Next step") < text.index("Reconstructions")
    assert text.count(verdict.sentence) == 1
    assert "no guarantee of privacy" in text
    assert not re.search(r"\b(is|are) (safe|private|secure)\b", text)


def test_policy_admits_exactly_this_style_and_script() -> None:
    elements = Elements(render(pages.audited(3)))
    policy = next(m for m in elements.named("meta") if m.get("http-equiv"))["content"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "unsafe" not in policy
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(elements.raw[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"


def test_nothing_points_outside_the_file() -> None:
    elements = Elements(render(pages.audited(12)))
    links = [
        value
        for _, attributes in elements.found
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "action", "data", "poster") and value
    ]
    assert len(links) > 30
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not [a for _, a in elements.found if "style" in a or any(k.startswith("on") for k in a)]
    assert "url(" not in elements.raw["style"]
    assert "@import" not in elements.raw["style"]


def test_counts_at_every_stop_are_those_of_a_plain_loop() -> None:
    page = pages.audited(50)
    assert page.control is not None
    assert page.evidence is not None
    table = data_of(render(page))["threshold"]
    scores, chance = page.evidence.values.tolist(), page.evidence.null.tolist()
    for value, train, null in zip(table["values"], table["train"], table["null"], strict=True):
        assert train == sum(1 for score in scores if score > value)
        held_out = sum(1 for score in chance if score > value) / page.evidence.null_sets
        assert null == pytest.approx(held_out, abs=1e-4)
    assert table["values"][table["start"]] == page.control.threshold_null99
    assert table["train"][table["start"]] == page.verdict.recovered
    assert (table["train"][0], table["train"][-1]) == (50, 0)
    assert table["null"][-1] == 0


def test_distances_count_below_the_threshold() -> None:
    page = pages.compared([1.0, 2, np.nan, 9], [3.0, 4, 5, 6], 2.5, 2, "l2", higher=False)
    table = data_of(render(page))["threshold"]
    assert (table["train"][table["start"]], table["null"][table["start"]]) == (2, 0)
    assert table["n"] == 4
    assert (table["train"][0], table["train"][-1]) == (0, 3)
    assert table["null"][-1] == 2


def test_a_threshold_that_nothing_can_beat() -> None:
    text = render(pages.compared([0.1, 0.9], [0.5], np.inf, 1, "ncc", higher=True))
    table = data_of(text)["threshold"]
    assert table["train"][table["start"]] == 0
    assert "no value would count" in text


@pytest.mark.parametrize(
    ("shape", "mode"), [((1, 28, 28), "L"), ((3, 32, 32), "RGB"), ((8, 8), "L"), ((2, 9, 9), "L")]
)
def test_images_are_pngs_of_the_samples(shape: tuple[int, ...], mode: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=shape)
    item = Item(0, (3 * x - 1).ravel(), x, ambiguity=np.zeros(shape))
    found, nearest, difference, free = (
        Image.open(io.BytesIO(base64.b64decode(frame.uri.split(",")[1])))
        for frame in frames(item, shape, "sample 0")
    )
    assert found.mode == nearest.mode == mode
    assert np.array_equal(np.asarray(found), np.asarray(nearest))  # up to scale and offset
    for blank in (difference, free):
        assert (np.asarray(blank) == 250).all()
    assert max(found.size) >= 56
    assert found.size[0] % shape[-1] == 0


def test_differences_are_signed_and_fitted() -> None:
    sample = np.zeros((1, 4, 4))
    sample[0, 0, 0], sample[0, 3, 3] = 1.0, 0.5
    assert fitted(2 * sample + 5, sample) == pytest.approx(sample)
    assert fitted(-sample, sample) == pytest.approx(np.full((1, 4, 4), sample.mean()))
    assert fitted(np.ones((1, 4, 4)), sample) == pytest.approx(np.full((1, 4, 4), sample.mean()))
    blank = frames(Item(0, np.zeros((1, 4, 4)), sample), (1, 4, 4), "")[2]
    colours = np.asarray(Image.open(io.BytesIO(base64.b64decode(blank.uri.split(",")[1]))))
    top_left, elsewhere = colours[0, 0].astype(int), colours[0, -1].astype(int)
    assert top_left[2] > top_left[0]  # blue: the reconstruction is below the sample
    assert elsewhere[0] > elsewhere[2]  # orange: above it


def test_large_and_broken_images_stay_small() -> None:
    large = np.random.default_rng(0).uniform(size=(300, 500, 3))
    uri = data_uri(large)
    assert Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).width == MAX_SIDE
    broken = np.full((1, 8, 8), np.nan)
    broken[0, 0, 0] = np.inf
    assert frames(Item(0, broken, broken), (1, 8, 8), "")[0].uri


def test_vectors_are_numbers() -> None:
    text = render(pages.audited(12, (2,)))
    elements = Elements(text)
    assert not elements.named("img")
    item = html.items_of(pages.audited(12, (2,)))[0]
    assert item.found is not None
    assert f"{item.found[0]:.3f}" in elements.text
    assert "… 64 values" in render(pages.audited(3, (64,)))


def test_the_gallery_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(pages.audited(500, (3, 32, 32), every=1))
    assert len(text.encode()) < 3_000_000
    assert "120 of 500 shown, best first; 380 left out" in Elements(text).text
    assert text.count('data-card="') == 120
    monkeypatch.setattr(html, "MAX_BYTES", 60_000)
    few = render(pages.audited(40, (3, 32, 32), every=1))
    shown = few.count('data-card="')
    assert 1 <= shown < 20
    assert f"{shown} of 40 shown" in Elements(few).text


def test_without_data_candidates_are_ranked_by_confidence() -> None:
    text = render(pages.without_data())
    confidence = [card["confidence"] for card in data_of(text)["cards"]]
    assert confidence == sorted(confidence, reverse=True)
    assert "Inconclusive" in text
    assert 'id="threshold"' not in text


def test_matches_without_a_control_are_shown_as_such() -> None:
    page = pages.audited(5, outcome=INCONCLUSIVE)
    assert page.scores is not None
    text = Elements(render(page.replace(scores=page.scores.replace(calibrated=False)))).text
    assert "Without a held-out control" in text
    assert "Reconstructions and what they match" in text
    assert "Without the data" not in text
    assert "Without the data" in Elements(render(pages.without_data())).text


def test_redaction_leaves_no_image() -> None:
    page = pages.audited(20, every=1)
    text = render(page, redact=True, blur=True)
    assert "base64," not in text
    assert "<img" not in text
    assert text.count("images withheld") == 20
    assert "data:image" in render(page)  # the page itself is as it was


def test_redaction_leaves_no_vector_either() -> None:
    page = pages.audited(3, (2,))
    assert page.evidence is not None
    best, part = int(page.evidence.index[0]), page.reconstructions[0]
    found, sample = part.x.clone(), page.evidence.x.clone()
    found[best], sample[0] = torch.tensor([1234.5, 0.0]), torch.tensor([2345.25, 0.0])
    page = page.replace(
        reconstructions=(part.replace(x=found),), evidence=page.evidence.replace(x=sample)
    )
    plain, redacted = render(page), render(page, redact=True)
    for number in ("1234.5", "2345.25", "-1110.75"):
        assert number in plain
        assert number not in redacted


def test_blurring_is_off_unless_asked_for() -> None:
    page = pages.audited(4, every=1)
    plain, blurred = render(page), render(page, blur=True)
    assert '<body class="blur">' in blurred
    assert blurred.count('class="reveal button"') == 4 + 3  # the cards, and the best on top
    assert '<body class="blur">' not in plain
    assert "reveal button" not in plain


def test_hostile_names_stay_text() -> None:
    text = render(pages.audited(14, names=pages.HOSTILE, every=1))
    text.encode()  # no half of a surrogate pair
    assert not DIRECTION_MARKS.search(text)
    elements = Elements(text)
    assert len(elements.named("script")) == 2
    assert all(str(image["src"]).startswith("data:") for image in elements.named("img"))
    for name in pages.HOSTILE:
        assert visible(name) in elements.text
    assert "‹U+202E›" in elements.text
    data = data_of(text)
    assert {card["label"] for card in data["cards"]} == set(pages.HOSTILE)
    assert "49" not in elements.text.split("7*7")[1][:12]


def test_visible_and_isolated() -> None:
    assert visible("plain, größe 漢字") == "plain, größe 漢字"
    assert visible("a\u202eb\n") == "a‹U+202E›b‹U+000A›"
    assert isolated("<b>") == "<bdi>&lt;b&gt;</bdi>"
    assert "(5000 characters)" in isolated("x" * 5000)
    assert len(isolated("x" * 5000)) < 700


@pytest.mark.parametrize("count", [0, 1])
def test_few_items(count: int) -> None:
    text = render(pages.audited(count))
    assert text.count('data-card="') == count
    assert ("no candidate" in text) == (count == 0)
    assert "No training sample came back closer" in render(pages.audited(4, outcome=INCONCLUSIVE))
    bare = render(pages.bare())
    assert "Nothing but the weights" in bare
    assert not re.search(r"\bNone\b(?! of)", Elements(bare).text)


def test_numbers_that_are_none_of_them() -> None:
    page = pages.audited(6)
    assert page.evidence is not None
    assert page.scores is not None
    best, missing = int(page.evidence.index[0]), torch.full((6,), torch.nan)
    rows = list(page.scores.per_sample)
    rows[best] = rows[best].replace(margin=np.nan, multiplier=np.inf)
    text = render(
        page.replace(
            scores=page.scores.replace(per_sample=tuple(rows)),
            evidence=page.evidence.replace(values=missing, outputs=missing),
            reconstructions=(page.reconstructions[0].replace(selection=None),),
        )
    )
    card = data_of(text)["cards"][0]
    assert (card["margin"], card["confidence"]) == (None, None)
    assert "∞" in text
    assert not re.search(r"\b(nan|NaN|Infinity)\b", text.replace(Elements(text).raw["script"], ""))
    assert html.keys(Item(0, None, radius_most=np.inf))["radius_most"] > 1e100


def test_residuals_that_are_zero_or_diverged() -> None:
    page = pages.audited(2)
    part = page.reconstructions[0]
    layers = part.layers.clone()
    layers[:, 3:, 0], layers[0, :, 1], layers[:, :, 2] = 0.0, torch.inf, torch.nan
    text = render(page.replace(reconstructions=(part.replace(layers=layers),)))
    assert text.count('class="line k') >= 2
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', text))
    gone = part.replace(layers=torch.full_like(layers, torch.nan))
    assert "Relative residual" not in render(page.replace(reconstructions=(gone,)))


def test_every_test_has_a_row_with_what_it_means() -> None:
    result = pages.audited()
    one = next(row for row in result.attacks if row.decides and row.ran)
    counts = {"recovered": 3, "expected_by_chance": 0.5, "rule": "ncc > 0.8"}
    rows = (
        one.replace(name="first", surface="weights", p_value=0.0005, adjusted=0.001, **counts),
        one.replace(name="second", surface="moment", p_value=0.008, adjusted=0.02, **counts),
        one.replace(name="third", p_value=0.4, adjusted=0.5, silent="it is silent", **counts),
        one.replace(name="fourth", ran=False, recovered=None),
    )
    text = render(result.replace(attacks=rows))
    table = text[text.index('id="tests"') : text.index('id="metrics"')]
    assert table.count('<th scope="row">') == 3
    assert "fourth" not in table
    for said in (
        "finds more than chance gives all tests together",
        "(ncc &gt; 0.8)",
        "finds more than chance by itself, and not over all tests",
        "finds no more than chance; it is silent",
        "moment",
    ):
        assert said in table


def test_rendering_twice_gives_the_same_file() -> None:
    assert render(pages.audited(8)) == render(pages.audited(8))


def test_notebook_summary_holds_no_image_and_no_script() -> None:
    page = pages.audited(10, names=pages.HOSTILE)
    short = inline(page)
    assert page.verdict.headline in short
    assert page.verdict.sentence in Elements(short).text
    assert not {"img", "script", "iframe"} & {tag for tag, _ in Elements(short).found}
    assert len(short) < 3000
    assert not DIRECTION_MARKS.search(short)


def test_only_a_leak_says_that_a_match_goes_beyond_chance() -> None:
    """A threshold that one sample beats by chance is no finding, whatever its card would say."""
    for outcome in pages.OUTCOMES:
        result = pages.example(outcome)
        matched = [item for item in items_of(result) if item.recovered]
        assert bool(matched) == (outcome == "leak")
        text = re.sub(r"<[^>]+>", " ", render(result))
        assert (": beyond chance" in text) == (outcome == "leak")


def test_charts_leave_their_looks_to_the_style_sheet() -> None:
    page = render(pages.audited(30))
    charts = re.findall(r'<figure class="chart".*?</figure>', page, re.S)
    assert len(charts) == 3
    for chart in charts:
        assert 'role="img" aria-label=' in chart
        assert not re.search(r"style=|<style|<g|<defs|url\(|http:", chart)
        looks = {look for text in re.findall(r'class="([^"]*)"', chart) for look in text.split()}
        assert looks >= {"grid", "base", "tick"}
        assert all(f".{look}" in page.split("</style>")[0] for look in looks), looks


def test_the_threshold_line_lies_where_the_axis_says() -> None:
    result = pages.audited(60)
    assert result.evidence is not None
    assert result.control is not None
    chart = histogram(result.evidence, result.control)
    assert chart is not None
    line = re.findall(r'class="rule" d="M([\d.]+) ', chart.drawing)
    ticks = re.findall(r'text-anchor="middle" x="([\d.]+)"[^>]*>([^<]+)', chart.drawing)
    (x, value), *_ = [(float(x), float(text)) for x, text in ticks]
    assert chart.threshold["axis"] == "x"
    moved = (chart.threshold["value"] - value) * chart.threshold["scale"]
    assert float(line[0]) == pytest.approx(x + moved, abs=0.3)
