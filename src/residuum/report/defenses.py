"""Defenses side by side: one table as text, markdown or HTML, its notes, and the pictures.

A count never stands without what chance brings back; the strongest attack of one who knows of the
defense stands beside that of one who does not, and every attack that was tried is in the notes. The
two kinds of shift, rewritten into biases or there during training, are named in every form.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from residuum.defenses import Attacked, Outcome
from residuum.report import drawing, html
from residuum.report.html import visible
from residuum.theory.uniqueness import SHARE

HEAD = ["defense", "unaware", "adaptive", "strongest", "chance unaware / adaptive"]
HEAD += ["p unaware / adaptive", "KKT", "others keep", "test accuracy", "test loss", "seconds"]
COLUMNS = 6  # pictures of each attacker: a page is no wider
LIMIT = (
    "A defense that these attacks do not get past is not thereby private: counts are evidence about the "
    "attacks that were run."
)


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The table's cells, one row per defense, in the order of ``HEAD``."""
    return [_row(outcome) for outcome in outcomes]


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What the table has no room for: every attack, shifts, residuals of rewriting, inferences, epsilon."""
    return [f"{outcome.label}: {text}" for outcome in outcomes for text in _notes(outcome)]


def markdown(outcomes: Sequence[Outcome], title: str = "Defenses") -> str:
    """The section as markdown."""
    lines = [f"## {title}", "", _knows(outcomes), "", _line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(row) for row in rows(outcomes)]
    lines += ["", *(f"- {text}" for text in notes(outcomes)), "", LIMIT, ""]
    return "\n".join(map(visible, lines))


def page(outcomes: Sequence[Outcome], picture: bytes | None = None) -> str:
    """The section as a page of its own: one file, no script, nothing loaded."""
    uri = "" if picture is None else drawing.PNG + base64.b64encode(picture).decode()
    said: dict[str, Any] = {"subject": "defenses", "lead": _knows(outcomes), "head": HEAD}
    said |= {"rows": rows(outcomes), "notes": notes(outcomes), "picture": uri, "limit": LIMIT}
    return html.page("defenses.html", **said)


def compared(outcomes: Sequence[Outcome]) -> bytes | None:
    """Per defense a band: best matches of the unaware attacker, and of the strongest who knows.

    Each found image stands above the training sample it matches; a frame says beyond 99% of chance.
    None where samples are no images.
    """
    bands = [(outcome, (outcome.unaware, outcome.adaptive)) for outcome in outcomes]
    shape = outcomes[0].unaware.images.shape[2:] if outcomes else ()
    if not bands or not drawing.is_image(shape):
        return None
    size, gap, label, top = 0.52, 0.05, 1.75, 0.5
    block = COLUMNS * (size + gap)
    width, height = label + 2 * block + 0.45, top + len(bands) * (2 * size + 0.22) + 0.1
    figure = drawing.new_figure(width, height, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1))
    for k, title in enumerate(
        ("attacker unaware of the defense", "strongest attack of one who knows")
    ):
        axes.text(label + k * (block + 0.25), top - 0.12, title, fontsize=8, color=drawing.INK)
    title = "Best matches by NCC, found above training sample; framed: beyond 99% of chance"
    axes.text(0.1, 0.18, title, fontsize=8.5, color=drawing.INK)
    for i, (outcome, attacks) in enumerate(bands):
        y = top + i * (2 * size + 0.22)
        axes.text(0.1, y + size, visible(outcome.label), fontsize=8, va="center", color=drawing.INK)
        for k, attacked in enumerate(attacks):
            if attacked is not None:
                _band(axes, attacked, label + k * (block + 0.25), y, size, gap)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return drawing.png(figure)


def _band(axes: Any, attacked: Attacked, x: float, y: float, size: float, gap: float) -> None:
    for j in range(min(COLUMNS, len(attacked.images))):
        left = x + j * (size + gap)
        for row in (0, 1):
            at = (left, y + row * (size + 0.02), size, size)
            drawing.place(axes, attacked.images[j, row], at)
        if attacked.beyond_chance[j]:
            drawing.frame(axes, (left, y, size, 2 * size + 0.02), ec=drawing.BLUE, lw=1.6)
    text = f"{attacked.attacker}: refused"
    if not attacked.refused:
        chance = _figure(attacked.expected_by_chance, 2)
        text = f"{attacked.attacker}: {attacked.recovered} ({attacked.rule}), {chance} by chance"
    axes.text(x, y + 2 * size + 0.11, text, fontsize=6, color=drawing.INK)


def _row(outcome: Outcome) -> tuple[str, ...]:
    both = (outcome.unaware, known := outcome.adaptive)
    chance = " / ".join(_figure(part.expected_by_chance if part else None, 2) for part in both)
    p = " / ".join(_figure(part.p_value if part else None, 2) for part in both)
    kept = "-"
    if (least := outcome.determined_at_least) is not None:
        kept = f"≥ {_figure(least)} ({_figure(outcome.determined_energy)})"
    counts = [_count(part, outcome.n) for part in both]
    found = [outcome.label, *counts, known.attacker if known else "-", chance, p]
    price = [
        *map(_figure, (outcome.accuracy, outcome.loss)),
        f"{sum(outcome.seconds.values()):.1f}",
    ]
    return (*found, _figure(outcome.kkt_plain), kept, *price)


def _notes(outcome: Outcome) -> list[str]:
    found = []
    if outcome.name != "none":
        found.append(f"changes {outcome.changes}. Stays with the owner: {outcome.secret}.")
    if shift := outcome.shift:
        found.append(
            f"{shift['kind']}; {shift['form']} shift of {shift['per_pixel']:.4g} per pixel, norm "
            f"{shift['norm']:.4g}."
        )
    if part := outcome.rewrite:
        found.append(
            f"KKT residual of rewriting over the norm before it: {part['original_multipliers']:.3g} at "
            f"the original multipliers (closed form {part['closed_form']:.3g}, exact at a KKT point; "
            f"the network before: {part['before']:.3g}), {part['refitted']:.3g} refitted."
        )
    found += _attacks(outcome)
    if "epsilon" in (facts := outcome.facts):
        found.append(
            f"epsilon {facts['epsilon']:.4g} at delta {facts['delta']:.2g} by the {facts['accountant']} "
            f"accountant; noise multiplier {facts['noise_multiplier']:.3g}."
        )
    return found


def _attacks(outcome: Outcome) -> list[str]:
    """Every attack with its count beside chance, the strongest ones, what was refused and inferred."""
    ran = [one for one in outcome.attacks if not one.refused]
    counts = ", ".join(
        f"{one.attacker} {one.recovered} ({_figure(one.expected_by_chance, 2)} by chance, p "
        f"{_figure(one.p_value, 2)})"
        for one in ran
    )
    found = [f"recovered of {outcome.n}: {counts}."]
    known, told = outcome.adaptive, outcome.told
    if told and known and told.attacker == known.attacker:
        told = None  # the shift was of no use
    for who, best in (("who knows", known), ("told the shift itself", told)):
        if best is not None:
            found.append(
                f"strongest attack of one {who}: {best.attacker}, {_count(best, outcome.n)}, "
                f"{_figure(best.expected_by_chance, 2)} by chance; p {_figure(best.p_value, 2)} "
                f"after multiplying by the {best.tried} tried."
            )
    found += [f"{one.attacker} refused: {one.refused}" for one in outcome.attacks if one.refused]
    if outcome.strategy:
        adapted = [one for one in outcome.attacks if one.attacker == "adapted"]
        found += [_inferred(outcome.strategy, one) for one in adapted if not one.refused]
        if not adapted:
            found.append(f"adapted attack {outcome.strategy}: short tries chose the unaware one.")
    return found


def _inferred(strategy: str, adapted: Attacked) -> str:
    """What the adapted attacker found out before attacking."""
    findings, said = adapted.findings, [f"adapted attack {strategy}"]
    if balance := findings.get("balance"):
        said.append(f"shift inferred from balance {balance['shift_per_pixel']:.4g} per pixel")
        said.append(balance["reason"])
    if mean := findings.get("mean"):
        said.append(f"mean inferred from the first layer {mean['shift_per_pixel']:.4g} per pixel")
    if "releases" in findings:
        said.append(f"mean of {findings['releases']} releases")
    if "chosen" in findings:
        said.append(f"short tries chose: {findings['chosen']}")
    return "; ".join(said) + "."


def _knows(outcomes: Sequence[Outcome]) -> str:
    n = outcomes[0].n if outcomes else 0
    return (
        f"Recovered of {n} training samples, beyond 99% of chance, by an attacker who is unaware of "
        "the defense and by the strongest attack of one who knows of it and of the start but not its secret "
        "(the unaware one is among them), its p-value multiplied by the number of attacks tried. KKT: "
        "relative residual at the training samples; others keep: mean over a few samples of the share of its "
        "energy that every other training set with these patterns and labels keeps in an image that takes "
        "over at least "
        f"{SHARE:.0%} of its weight, proved, and the least found; accuracy and loss on held-out samples."
    )


def _count(attacked: Attacked | None, n: int) -> str:
    """Recovered of n, with what they had to beat."""
    if attacked is None or attacked.recovered is None:
        return "refused" if attacked and attacked.refused else "-"
    return f"{attacked.recovered}/{n}" + (f" ({attacked.rule})" if attacked.rule else "")


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
