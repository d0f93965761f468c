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

from residuum.auditing.power import PositiveControls
from residuum.auditing.verdict import INCONCLUSIVE
from residuum.notebook import escape_invisible
from residuum.report import html
from residuum.report.charts import draw_histogram, membership_chart, tail_threshold
from residuum.report.drawing import MAX_SIDE, encode_data_uri, fit_to_sample, to_pixels
from residuum.report.html import (
    Item,
    inline,
    isolate,
    items_of,
    make_pictures,
    render,
)
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
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert match is not None
    return json.loads(match[1])


@pytest.mark.parametrize("outcome", pages.OUTCOMES)
def test_the_verdict_comes_first_with_its_numbers(outcome: str) -> None:
    page = pages.audited(30, outcome=outcome)
    text = Elements(render(page)).text
    verdict = page.verdict
    assert verdict.expected_by_chance is not None
    count = f"{verdict.recovered} of 30" if outcome == "leak" else "30 training samples"
    chance = f"{verdict.expected_by_chance:g} expected by chance"
    for phrase in (verdict.headline, count, chance, "Next step", "residuum "):
        assert phrase in text
    places = [text.index(answer.question) for answer in verdict.answers]
    assert places == sorted(places)
    assert text.index(verdict.headline) < places[0] < places[2] < text.index("Next step")
    assert text.index("Next step") < text.index("Reconstructions")
    assert all(text.count(answer.evidence) == 1 for answer in verdict.answers)
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
    stops = zip(table["values"], table["train"], table["null"], strict=True)
    for stop, (value, train, null) in enumerate(stops):
        assert train == sum(1 for score in scores if score > value)
        held_out = sum(1 for score in chance if score > value) / page.evidence.null_sets
        if stop != table["start"]:
            assert null == pytest.approx(held_out, abs=1e-4)
    assert table["null"][table["start"]] == page.verdict.expected_by_chance  # that of the verdict
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
    images, nearest, difference, free = (
        Image.open(io.BytesIO(base64.b64decode(frame.uri.split(",")[1])))
        for frame in make_pictures(item, shape, "sample 0")
    )
    assert images.mode == nearest.mode == mode
    assert np.array_equal(np.asarray(images), np.asarray(nearest))  # up to scale and offset
    for blank in (difference, free):
        assert (np.asarray(blank) == 250).all()
    assert max(images.size) >= 56
    assert images.size[0] % shape[-1] == 0


def test_differences_are_signed_and_fitted() -> None:
    sample = np.zeros((1, 4, 4))
    sample[0, 0, 0], sample[0, 3, 3] = 1.0, 0.5
    assert fit_to_sample(2 * sample + 5, sample) == pytest.approx(sample)
    assert fit_to_sample(-sample, sample) == pytest.approx(np.full((1, 4, 4), sample.mean()))
    assert fit_to_sample(np.ones((1, 4, 4)), sample) == pytest.approx(
        np.full((1, 4, 4), sample.mean())
    )
    blank = make_pictures(Item(0, np.zeros((1, 4, 4)), sample), (1, 4, 4), "")[2]
    colors = np.asarray(Image.open(io.BytesIO(base64.b64decode(blank.uri.split(",")[1]))))
    top_left, elsewhere = colors[0, 0].astype(int), colors[0, -1].astype(int)
    assert top_left[2] > top_left[0]  # blue: the reconstruction is below the sample
    assert elsewhere[0] > elsewhere[2]  # orange: above it


def test_large_and_broken_images_stay_small() -> None:
    large = np.random.default_rng(0).uniform(size=(300, 500, 3))
    uri = encode_data_uri(large)
    assert Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).width == MAX_SIDE
    broken = np.full((1, 8, 8), np.nan)
    broken[0, 0, 0] = np.inf
    assert make_pictures(Item(0, broken, broken), (1, 8, 8), "")[0].uri


def test_vectors_are_numbers() -> None:
    text = render(pages.audited(12, (2,)))
    elements = Elements(text)
    assert not elements.named("img")
    item = html.items_of(pages.audited(12, (2,)))[0]
    assert item.reconstruction is not None
    assert f"{item.reconstruction[0]:.3f}" in elements.text
    assert "… 64 values" in render(pages.audited(3, (64,)))


def test_the_gallery_is_bounded_and_says_so() -> None:
    text = render(pages.audited(500, (3, 32, 32), recovered_every=1))
    assert len(text.encode()) < 3_000_000
    assert "120 of 500 shown, best first. 380 are left out" in Elements(text).text
    assert text.count('data-card="') == 120
    few = render(pages.audited(40, (3, 150, 150), recovered_every=1))  # large pictures
    card_count = few.count('data-card="')
    assert 1 <= card_count < 20
    assert f"{card_count} of 40 shown" in Elements(few).text


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
    assert "Without held-out samples nothing shows which" in text
    assert "Reconstructions and the training samples they match" in text
    assert "nothing to compare with" not in text
    assert "nothing to compare with" in Elements(render(pages.without_data())).text


def test_redaction_leaves_no_image() -> None:
    page = pages.audited(20, recovered_every=1)
    text = render(page, redact=True, blur=True)
    assert "base64," not in text
    assert "<img" not in text
    assert text.count("images withheld") == 20
    assert "data:image" in render(page)  # the page itself is as it was


def test_redaction_leaves_no_vector_either() -> None:
    page = pages.audited(3, (2,))
    assert page.evidence is not None
    best, reconstruction = int(page.evidence.index[0]), page.reconstructions[0]
    x, sample = reconstruction.x.clone(), page.evidence.x.clone()
    x[best], sample[0] = torch.tensor([1234.5, 0.0]), torch.tensor([2345.25, 0.0])
    page = page.replace(
        reconstructions=(reconstruction.replace(x=x),), evidence=page.evidence.replace(x=sample)
    )
    plain, redacted = render(page), render(page, redact=True)
    for number in ("1234.5", "2345.25", "-1110.75"):
        assert number in plain
        assert number not in redacted


def test_blurring_is_off_unless_asked_for() -> None:
    page = pages.audited(4, recovered_every=1)
    plain, blurred = render(page), render(page, blur=True)
    assert '<body class="blur">' in blurred
    assert blurred.count('class="reveal button"') == 4 + 3  # the cards, and the best on top
    assert '<body class="blur">' not in plain
    assert "reveal button" not in plain


def test_hostile_names_stay_text() -> None:
    text = render(pages.audited(14, names=pages.HOSTILE, recovered_every=1))
    text.encode()  # no half of a surrogate pair
    assert not DIRECTION_MARKS.search(text)
    elements = Elements(text)
    assert len(elements.named("script")) == 2
    assert all(str(image["src"]).startswith("data:") for image in elements.named("img"))
    for name in pages.HOSTILE:
        assert escape_invisible(name) in elements.text
    assert "‹U+202E›" in elements.text
    data = data_of(text)
    assert {card["label"] for card in data["cards"]} == set(pages.HOSTILE)
    assert "49" not in elements.text.split("7*7")[1][:12]


def test_visible_and_isolated() -> None:
    assert escape_invisible("plain, größe 漢字") == "plain, größe 漢字"
    assert escape_invisible("a\u202eb\n") == "a‹U+202E›b‹U+000A›"
    assert isolate("<b>") == "<bdi>&lt;b&gt;</bdi>"
    assert "(5000 characters)" in isolate("x" * 5000)
    assert len(isolate("x" * 5000)) < 700


@pytest.mark.parametrize("count", [0, 1])
def test_few_items(count: int) -> None:
    text = render(pages.audited(count))
    assert text.count('data-card="') == count
    assert ("no candidate" in text) == (count == 0)
    nothing = "No training sample is matched more closely than chance allows"
    assert nothing in render(pages.audited(4, outcome=INCONCLUSIVE))
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
    assert html.make_sort_values(Item(0, None, radius_most=np.inf))["radius_most"] > 1e100


def test_residuals_that_are_zero_or_diverged() -> None:
    page = pages.audited(2)
    reconstruction = page.reconstructions[0]
    layers = reconstruction.layers.clone()
    layers[:, 3:, 0], layers[0, :, 1], layers[:, :, 2] = 0.0, torch.inf, torch.nan
    text = render(page.replace(reconstructions=(reconstruction.replace(layers=layers),)))
    assert text.count('class="line k') >= 2
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', text))
    diverged = reconstruction.replace(layers=torch.full_like(layers, torch.nan))
    assert "Relative residual" not in render(page.replace(reconstructions=(diverged,)))


def test_every_test_has_a_row_with_what_it_means() -> None:
    result = pages.audited()
    row_deciding = next(row for row in result.attacks if row.decides and row.ran)
    counts = {"recovered": 3, "expected_by_chance": 0.5, "rule": "ncc > 0.8"}
    rows = (
        row_deciding.replace(
            name="first", surface="weights", p_value=0.0005, adjusted=0.001, **counts
        ),
        row_deciding.replace(
            name="second", surface="moment", p_value=0.008, adjusted=0.02, **counts
        ),
        row_deciding.replace(name="third", p_value=0.4, adjusted=0.5, **counts),
        row_deciding.replace(name="fourth", ran=False, recovered=None),
    )
    text = render(result.replace(attacks=rows))
    table = text[text.index('id="tests"') : text.index('id="metrics"')]
    assert table.count('<th scope="row">') == 3
    assert "fourth" not in table
    for phrase in (
        "recovers more than expected by chance over all tests",
        "(ncc &gt; 0.8)",
        "recovers more than chance by itself, but not over all tests",
        "recovers no more than chance",
        "moment",
    ):
        assert phrase in table


def section(text: str, name: str) -> str:
    """The section of a page with this anchor, "" if there is none."""
    match = re.search(rf'<section id="{name}".*?</section>', text, re.S)
    return match[0] if match else ""


def is_open(text: str) -> bool:
    return re.search(r"<details open><summary><h2", text) is not None


def test_the_sentence_below_the_headline_repeats_no_answer() -> None:
    page = pages.members(60, named=40)
    partly_judged = page.replace(verdict=page.verdict.replace(not_judged=2))
    sentences = re.findall(r'<p class="sentence">(.*?)</p>', render(partly_judged))
    assert [Elements(text).text for text in sentences] == [
        "Training samples that were not judged also occur in the held-out set."
    ]
    assert '<p class="sentence">' not in render(pages.example("no-leak-found"))
    open_page = pages.example("inconclusive")
    assert open_page.verdict.sentence in Elements(render(open_page)).text


@pytest.mark.parametrize("outcome", pages.OUTCOMES)
def test_every_answer_is_a_word_with_an_icon_of_its_own(outcome: str) -> None:
    """The icon is hidden from screen readers, which read the word; without color the shape differs."""
    page = pages.example(outcome)
    rows = re.findall(r'<li class="question ([\w-]+)">(.*?)</li>', render(page), re.S)
    assert [html.SYMBOLS[answer.answer] for answer in page.verdict.answers] == [r[0] for r in rows]
    for answer, (_, row) in zip(page.verdict.answers, rows, strict=True):
        assert f"<strong>{answer.answer.capitalize()}</strong>" in row
        assert f"<h2>{answer.question}</h2>" in row
        text = Elements(row).text
        assert answer.evidence in text
        assert answer.power in text
        assert 'aria-hidden="true"' in row
    shapes = {answer: re.findall(r"<(?:path|circle)[^>]*>", row) for answer, row in rows}
    assert len({str(shape) for shape in shapes.values()}) == len(shapes)


def test_membership_is_open_and_first_if_it_is_the_finding() -> None:
    page = pages.members(60, named=40)
    text = render(page)
    members = section(text, "membership")
    assert page.verdict.grade == "membership"
    assert is_open(members)
    assert text.index('id="membership"') < text.index('id="control"') < text.index('id="gallery"')
    assert (
        "An attacker who has a sample can tell from the weights that the network was trained on it."
        in members
    )
    assert page.membership is not None
    assert page.membership.loss is not None
    assert page.membership.loss.line in members
    assert "beyond chance" not in re.sub(r"<script.*?</script>", "", text, flags=re.S).replace(
        "<span>beyond chance</span>", ""
    )
    quiet = render(pages.audited(60, outcome="no-leak-found"))
    assert not is_open(section(quiet, "membership"))
    assert "No training sample is named." in section(quiet, "membership")
    assert quiet.index('id="gallery"') < quiet.index('id="membership"')
    assert section(render(pages.without_data()), "membership") == ""


def test_reconstructions_are_open_if_they_are_the_finding() -> None:
    assert is_open(section(render(pages.example("leak")), "control"))
    assert not is_open(section(render(pages.example("no-leak-found")), "control"))


@pytest.mark.parametrize(("named", "rows"), [(0, 0), (1, 1), (50, 50), (51, 50), (200, 50)])
def test_the_table_of_named_samples_is_bounded_and_says_how_many_more(
    named: int, rows: int
) -> None:
    page = pages.members(400, named)
    table = section(render(page), "membership")
    assert page.membership is not None
    assert table.count('<th scope="row">') == rows
    assert (f"{named - rows} more are not shown" in table) == (named > rows)
    assert ("named samples, the most certain first" in table) == (named > 0)
    for i in range(rows):
        q, boundaries = float(page.membership.q[i]), int(page.membership.boundaries[i])
        cells = f"</th><td>{html.format_p_value(q)}</td><td>{boundaries}</td>"
        assert re.search(rf">{i}{re.escape(cells)}", table), i


def test_named_samples_have_pictures_if_the_record_holds_them() -> None:
    page = pages.members(60, named=12)
    members = section(render(page), "membership")
    assert members.count("<img") == 12
    assert 'alt="Training sample in row 0"' in members
    assert page.evidence is not None
    first = page.evidence.index.tolist().index(0)
    picture = re.search(r'src="([^"]+)" alt="Training sample in row 0"', members)
    assert picture is not None
    assert picture[1] == encode_data_uri(to_pixels(page.evidence.x[first]))
    assert "<img" not in section(render(page, redact=True), "membership")
    assert section(render(page, redact=True), "membership").count('<th scope="row">') == 12
    assert "<img" not in section(render(pages.members(60, named=12, shape=(6,))), "membership")
    # The record holds a part of the samples only.
    few = page.evidence.replace(index=page.evidence.index[:5], x=page.evidence.x[:5])
    held = set(few.index.tolist()) & set(range(12))
    members = section(render(page.replace(evidence=few)), "membership")
    assert members.count("<img") == len(held)


def test_the_membership_chart_counts_as_the_verdict() -> None:
    test = pages.member_test(60, 40)
    chart = membership_chart(test)
    assert chart is not None
    threshold = tail_threshold(test.holdout_statistic.numpy())
    assert int((test.statistic > threshold).sum()) == test.above_tail
    assert int((test.holdout_statistic > threshold).sum()) == 10  # 1% of 1000
    assert f"{test.above_tail} of 60 training samples lie above" in chart.summary
    line = float(re.findall(r'class="rule" d="M([\d.]+) ', chart.drawing)[0])
    ticks = re.findall(r'text-anchor="middle" x="([\d.]+)"[^>]*>([^<]+)', chart.drawing)
    (x0, v0), (x1, v1) = [(float(x), float(text)) for x, text in (ticks[0], ticks[-1])]
    assert line == pytest.approx(x0 + (threshold - v0) * (x1 - x0) / (v1 - v0), abs=0.5)
    alone = test.replace(holdout_statistic=torch.zeros(0, dtype=torch.float64))
    assert membership_chart(alone) is None


def test_all_views_show_the_same_counts() -> None:
    """Terminal, first screen, chart, gallery, SARIF and model card."""
    reconstruction, membership = pages.audited(60), pages.members(60, named=40)
    count, chance = reconstruction.verdict.recovered, reconstruction.verdict.expected_by_chance
    text = render(reconstruction)
    table = data_of(text)["threshold"]
    assert (table["train"][table["start"]], table["null"][table["start"]]) == (count, chance)
    assert sum(bool(card["recovered"]) for card in data_of(text)["cards"]) == count
    phrase = f"{count} of 60 training samples were reconstructed"
    for view in (Elements(text).text, reconstruction.summary(), html.model_card(reconstruction)):
        assert phrase in " ".join(view.split())
    named = f"{40} of 60 training samples are named"
    text = render(membership)
    for view in (Elements(text).text, membership.summary(), html.model_card(membership)):
        assert named in " ".join(view.split())
    panel = section(text, "membership")
    assert '<span class="figure">40</span><span>of 60 training samples are named' in panel
    assert "All 40 named samples" in panel


def test_the_chance_level_at_the_threshold_is_that_of_the_test() -> None:
    """The chart draws fewer held-out sets than the test, so its own count would differ a little."""
    page = pages.audited(60)
    assert page.scores is not None
    metric = page.scores.metrics["ncc"].replace(expected_by_chance=0.731)
    page = page.replace(scores=page.scores.replace(metrics={**page.scores.metrics, "ncc": metric}))
    table = data_of(render(page))["threshold"]
    assert table["null"][table["start"]] == 0.731
    assert table["null"].count(0.731) == 1


def test_a_match_by_chance_is_no_finding_next_to_named_members() -> None:
    page = pages.members(60, named=40)
    assert page.scores is not None
    rows = list(page.scores.per_sample)
    rows[0] = rows[0].replace(recovered=True)
    metric = page.scores.metrics["ncc"].replace(recovered=1)
    scores = page.scores.replace(
        per_sample=tuple(rows), metrics={**page.scores.metrics, "ncc": metric}
    )
    text = render(page.replace(scores=scores))
    assert data_of(text)["cards"] == []
    assert "The verdict counts none of these matches" in section(text, "control")
    assert ": beyond chance" not in re.sub(r"<[^>]+>", " ", text)
    assert "The verdict counts none" not in render(pages.audited(60))


def test_a_sample_that_only_another_attack_recovers_has_a_card() -> None:
    page = pages.audited(30)
    assert page.findings is not None
    assert page.scores is not None
    assert page.evidence is not None
    displayed = {row.index for row in page.scores.per_sample if row.recovered}
    other = next(i for i in range(30) if i not in displayed)
    place = page.evidence.index.tolist().index(other)
    sample = page.evidence.x[place]
    x = torch.cat([torch.rand(4, *sample.shape).double(), sample[None]])
    second = page.reconstructions[0].replace(attack="weight-decay", x=x, selection=None)
    findings_of_both = page.findings.replace(
        survivors=("binary-kkt", "weight-decay"),
        samples=(*page.findings.samples, other),
        recovered=page.findings.recovered + 1,
    )
    page = page.replace(findings=findings_of_both, reconstructions=(*page.reconstructions, second))
    cards = {item.number: item for item in items_of(page) if item.recovered}
    assert len(cards) == findings_of_both.recovered
    assert cards[other].attack == "weight-decay"
    assert cards[other].scores["ncc"] == pytest.approx(1.0)
    assert cards[other].reconstruction == pytest.approx(sample.numpy())
    text = Elements(render(page)).text
    assert f"All attacks together recover {findings_of_both.recovered} training samples." in text
    assert f"{findings_of_both.recovered} in all" in text


def test_positive_controls_are_a_table() -> None:
    page = pages.example("no-leak-found")
    power = section(render(page), "power")
    assert is_open(power)
    rows = re.findall(r"<tr><th.*?</tr>", power, re.S)[1:]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    assert cells == [
        ["60", "10", ", ".join(["31"] * 9 + ["24"]), "10", "74%"],
        ["60", "1", "0", "0", "–"],
        ["30", "3", "9, 14, 11", "3", "37%"],
    ]
    for control in page.checks.positive_controls:
        assert control.sentence in Elements(power).text
    untried = PositiveControls("membership", reason="there are too few held-out samples")
    checks = page.checks.replace(positive_controls=(untried,))
    power = section(render(page.replace(checks=checks)), "power")
    assert "there are too few held-out samples" in power
    assert section(render(pages.example("leak")), "power") == ""


@pytest.mark.parametrize("outcome", pages.OUTCOMES)
def test_removed_words_are_gone(outcome: str) -> None:
    text = Elements(render(pages.example(outcome))).text.lower()
    for word in ("vouch", "twin", "permuted", "explained", "class-like"):
        assert word not in text


def test_rendering_twice_gives_the_same_file() -> None:
    assert render(pages.audited(8)) == render(pages.audited(8))


def test_notebook_summary_holds_no_image_and_no_script() -> None:
    page = pages.audited(10, names=pages.HOSTILE)
    short = inline(page)
    assert page.verdict.headline in short
    words = [answer.answer.capitalize() for answer in page.verdict.answers]
    assert re.findall(r"<th[^>]*>(\w+)</th>", short) == words
    assert all(answer.evidence in Elements(short).text for answer in page.verdict.answers)
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
    assert len(charts) == 4
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
    chart = draw_histogram(result.evidence, result.control)
    assert chart is not None
    line = re.findall(r'class="rule" d="M([\d.]+) ', chart.drawing)
    ticks = re.findall(r'text-anchor="middle" x="([\d.]+)"[^>]*>([^<]+)', chart.drawing)
    (x, value), *_ = [(float(x), float(text)) for x, text in ticks]
    assert chart.threshold["axis"] == "x"
    moved = (chart.threshold["value"] - value) * chart.threshold["scale"]
    assert float(line[0]) == pytest.approx(x + moved, abs=0.3)
