"""Compare defenses in one table as text, Markdown or HTML, with notes and pictures.

Each count of recovered samples comes with the count expected by chance. The table shows the attack of an
attacker who is unaware of the defense and the strongest attack of an attacker who knows the defense. The
notes list all attacks. If a defense shifts the inputs of the network, the notes say how. The shift was either
present during training, or it was added to the biases after training.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from residuum.defenses import Attacked, Outcome
from residuum.notebook import escape_invisible
from residuum.report import drawing, html
from residuum.theory.uniqueness import SHARE

HEADER = ["defense", "unaware", "adaptive", "strongest", "chance unaware / adaptive"]
HEADER += ["p unaware / adaptive", "KKT", "others keep", "test accuracy", "test loss", "seconds"]
COLUMNS = 6  # pictures per attacker in a row, as many as fit into the width of a page
LIMIT = (
    "If these attacks fail, the defense is not thereby private. Counts are evidence only about the attacks "
    "that ran."
)


def make_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return the rows of the table that compares defenses, with cells in the order of ``HEADER``."""
    return [_row(outcome) for outcome in outcomes]


def make_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return notes for the table: the counts of all attacks, and details of each defense such as epsilon."""
    return [f"{outcome.label}: {text}" for outcome in outcomes for text in _notes(outcome)]


def render_markdown(outcomes: Sequence[Outcome], title: str = "Defenses") -> str:
    """Return the comparison as Markdown.

    Args:
        outcomes: The outcomes of the defenses.
        title: The title of the comparison.

    Returns:
        The text in Markdown.
    """
    markdown_lines = [
        f"## {title}",
        "",
        _explain_columns(outcomes),
        "",
        _format_line(HEADER),
        _format_line(["---"] * len(HEADER)),
    ]
    markdown_lines += [_format_line(row) for row in make_rows(outcomes)]
    markdown_lines += ["", *(f"- {text}" for text in make_notes(outcomes)), "", LIMIT, ""]
    return "\n".join(map(escape_invisible, markdown_lines))


def render_page(outcomes: Sequence[Outcome], picture: bytes | None = None) -> str:
    """Return the comparison as one HTML file without a script.

    Args:
        outcomes: The outcomes of the defenses.
        picture: The picture of :func:`draw_comparison`.

    Returns:
        The page.
    """
    picture_uri = "" if picture is None else drawing.PNG + base64.b64encode(picture).decode()
    return html.render_page(
        "defenses.html",
        subject="defenses",
        lead=_explain_columns(outcomes),
        head=HEADER,
        rows=make_rows(outcomes),
        notes=make_notes(outcomes),
        picture=picture_uri,
        limit=LIMIT,
    )


def draw_comparison(outcomes: Sequence[Outcome]) -> bytes | None:
    """Draw the best matches of two attackers under each defense.

    One attacker is unaware of the defense, the other knows it and has the strongest attack. Each
    reconstruction is above the training sample that it matches. A framed match is closer than 99% of the
    matches of held-out samples.

    Args:
        outcomes: The outcomes of the defenses.

    Returns:
        A PNG, None if samples are not images.
    """
    outcomes_with_attacks = [(outcome, (outcome.unaware, outcome.adaptive)) for outcome in outcomes]
    image_shape = outcomes[0].unaware.images.shape[2:] if outcomes else ()
    if not outcomes_with_attacks or not drawing.is_image(image_shape):
        return None
    size, gap, label, top = 0.52, 0.05, 1.75, 0.5
    block_width = COLUMNS * (size + gap)
    width, height = (
        label + 2 * block_width + 0.45,
        top + len(outcomes_with_attacks) * (2 * size + 0.22) + 0.1,
    )
    figure = drawing.new_figure(width, height, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1))
    for k, title in enumerate(
        ("attacker unaware of the defense", "strongest attack that knows the defense")
    ):
        axes.text(
            label + k * (block_width + 0.25), top - 0.12, title, fontsize=8, color=drawing.INK
        )
    title = (
        "Best matches by NCC, reconstruction above training sample; framed: beyond 99% of chance"
    )
    axes.text(0.1, 0.18, title, fontsize=8.5, color=drawing.INK)
    for i, (outcome, attacks) in enumerate(outcomes_with_attacks):
        top_edge = top + i * (2 * size + 0.22)
        axes.text(
            0.1,
            top_edge + size,
            escape_invisible(outcome.label),
            fontsize=8,
            va="center",
            color=drawing.INK,
        )
        for k, attacked in enumerate(attacks):
            if attacked is not None:
                _draw_band(axes, attacked, label + k * (block_width + 0.25), top_edge, size, gap)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return drawing.encode_png(figure)


def _draw_band(axes: Any, attacked: Attacked, x: float, y: float, size: float, gap: float) -> None:
    for j in range(min(COLUMNS, len(attacked.images))):
        left_edge = x + j * (size + gap)
        for row in (0, 1):
            image_box = (left_edge, y + row * (size + 0.02), size, size)
            drawing.draw_image(axes, attacked.images[j, row], image_box)
        if attacked.beyond_chance[j]:
            image_box = (left_edge, y, size, 2 * size + 0.02)
            drawing.draw_frame(axes, image_box, ec=drawing.BLUE, lw=1.6)
    caption = f"{attacked.attacker}: refused"
    if not attacked.refused:
        expected_count = _format(attacked.expected_by_chance, 2)
        caption = f"{attacked.attacker}: {attacked.recovered} ({attacked.rule}), {expected_count} by chance"
    axes.text(x, y + 2 * size + 0.11, caption, fontsize=6, color=drawing.INK)


def _row(outcome: Outcome) -> tuple[str, ...]:
    attacked_pair = (outcome.unaware, adaptive := outcome.adaptive)
    expected_counts = " / ".join(
        _format(attacked.expected_by_chance if attacked else None, 2) for attacked in attacked_pair
    )
    p_values = " / ".join(
        _format(attacked.p_value if attacked else None, 2) for attacked in attacked_pair
    )
    determined_text = "-"
    if (proved := outcome.determined_at_least) is not None:
        determined_text = f"≥ {_format(proved)} ({_format(outcome.determined_energy)})"
    count_texts = [_count(attacked, outcome.n) for attacked in attacked_pair]
    attack_cells = [
        outcome.label,
        *count_texts,
        adaptive.attacker if adaptive else "-",
        expected_counts,
        p_values,
    ]
    cost_cells = [
        *map(_format, (outcome.accuracy, outcome.loss)),
        f"{sum(outcome.seconds.values()):.1f}",
    ]
    return (*attack_cells, _format(outcome.kkt_plain), determined_text, *cost_cells)


def _notes(outcome: Outcome) -> list[str]:
    notes = []
    if outcome.name != "none":
        notes.append(f"changes {outcome.changes}. The owner keeps secret: {outcome.secret}.")
    if shift := outcome.shift:
        notes.append(
            f"{shift['kind']}; {shift['form']} shift of {shift['per_pixel']:.4g} per pixel, norm "
            f"{shift['norm']:.4g}."
        )
    if rewrite := outcome.rewrite:
        notes.append(
            f"KKT residual of rewriting over the norm before rewriting: "
            f"{rewrite['original_multipliers']:.3g} at the original multipliers (closed form "
            f"{rewrite['closed_form']:.3g}, exact at a KKT point; "
            f"the network before: {rewrite['before']:.3g}), {rewrite['refitted']:.3g} refitted."
        )
    notes += _attack_notes(outcome)
    if "epsilon" in (privacy := outcome.training_facts):
        notes.append(
            f"epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.2g} by the "
            f"{privacy['accountant']} accountant; noise multiplier {privacy['noise_multiplier']:.3g}."
        )
    return notes


def _attack_notes(outcome: Outcome) -> list[str]:
    """Return notes on the counts of all attacks, the strongest attack, and attacks that could not run.

    For attackers who adapt to the defense, a note says what they inferred about the defense.
    """
    completed_attacks = [attempt for attempt in outcome.attacks if not attempt.refused]
    counts_text = ", ".join(
        f"{attempt.attacker} {attempt.recovered} ({_format(attempt.expected_by_chance, 2)} by chance, p "
        f"{_format(attempt.p_value, 2)})"
        for attempt in completed_attacks
    )
    notes = [f"recovered of {outcome.n}: {counts_text}."]
    strongest, strongest_with_shift = outcome.adaptive, outcome.informed
    if strongest_with_shift and strongest and strongest_with_shift.attacker == strongest.attacker:
        # The strongest attack is the same whether or not the attacker knows the shift (the offset that the
        # defense adds to the inputs). So the attack is listed once.
        strongest_with_shift = None
    for who, best in (
        ("knows the defense", strongest),
        ("also knows the shift", strongest_with_shift),
    ):
        if best is not None:
            notes.append(
                f"strongest attack that {who}: {best.attacker}, {_count(best, outcome.n)}, "
                f"{_format(best.expected_by_chance, 2)} by chance; p {_format(best.p_value, 2)} "
                f"after multiplying by the {best.tried} attacks tried."
            )
    notes += [
        f"{attempt.attacker} refused: {attempt.refused}"
        for attempt in outcome.attacks
        if attempt.refused
    ]
    if outcome.strategy:
        adapted_attacks = [attempt for attempt in outcome.attacks if attempt.attacker == "adapted"]
        notes += [
            _describe_inference(outcome.strategy, attempt)
            for attempt in adapted_attacks
            if not attempt.refused
        ]
        if not adapted_attacks:
            notes.append(
                f"adapted attack {outcome.strategy}: short tries chose the unaware attack."
            )
    return notes


def _describe_inference(strategy: str, adapted: Attacked) -> str:
    """Describe what an attacker who adapts to the defense inferred about it before the attack."""
    findings, texts = adapted.findings, [f"adapted attack {strategy}"]
    if balance := findings.get("balance"):
        texts.append(f"shift inferred from balance {balance['shift_per_pixel']:.4g} per pixel")
        texts.append(balance["reason"])
    if mean := findings.get("mean"):
        texts.append(f"mean inferred from the first layer {mean['shift_per_pixel']:.4g} per pixel")
    if "releases" in findings:
        texts.append(f"mean of {findings['releases']} releases")
    if "chosen" in findings:
        texts.append(f"short tries chose: {findings['chosen']}")
    return "; ".join(texts) + "."


def _explain_columns(outcomes: Sequence[Outcome]) -> str:
    sample_count = outcomes[0].n if outcomes else 0
    return (
        f"The table counts how many of {sample_count} training samples are recovered. A sample is recovered "
        "if its match is closer than 99% of the matches of held-out samples. The unaware attacker does not "
        "know the defense. The strongest attack is the best of two kinds: attacks that know the defense and"
        " the initial weights but not the secret of the defense, and the unaware attack. The p-value of the"
        " strongest attack is multiplied by the number of attacks tried. KKT: relative residual at the "
        "training samples. Others keep: the share of a sample's energy that an image with at least "
        f"{SHARE:.0%} of its weight keeps in all other training sets with the same activation patterns and "
        "labels. The first number is proved, and the second number was found in an example. Both are "
        "averaged over a few samples. Accuracy and loss: on held-out samples."
    )


def _count(attacked: Attacked | None, n: int) -> str:
    """Describe how many of n samples an attacker recovered, and when a sample counts as recovered."""
    if attacked is None or attacked.recovered is None:
        return "refused" if attacked and attacked.refused else "-"
    return f"{attacked.recovered}/{n}" + (f" ({attacked.rule})" if attacked.rule else "")


def _format(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _format_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
