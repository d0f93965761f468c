"""Tables of ``docs/papers.md``: measured values of ``python -m papers`` with published values and chance.

A cell is *measured [published] (chance)*, with one measured number for each trained network (victim). The
victims of a figure are the files of its seeds, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from experiments.pages.tables import Figures, grid, read, read_seeds, short, table

RECOVERED = "recovered (NCC beyond 99% of chance)"
RESIDUAL = "relative residual of the first layer"
ABOVE, TOP, NCC = "ssim3 above 0.4", "top-10 mean ssim3", "median NCC of the top 30"
Line = tuple[str, str, str]  # what a row is called, the figure, how its quantities begin


def victims(figure: str) -> list[Figures]:
    """Return the results of a figure, victim by victim.

    Args:
        figure: Name of the figure. "small/" and "images/" before the name stand for the small scale, with
            digits or with images of MNIST and CIFAR. "earlier/" stands for attacks without prior and margins.

    Returns:
        The contents of the files.
    """
    scale, _, name = figure.rpartition("/")
    folder = {"": "papers", "images": "papers-small-images"}.get(scale, f"papers-{scale}")
    return read_seeds(f"{folder}/{name}")


def number(value: Any) -> str:
    """Return a count as it is, another number with three digits, and a pair as a range."""
    if isinstance(value, list):
        return " to ".join(map(number, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def cell(figure: str, what: str) -> str:
    """Return one quantity of every victim, "" if no victim has it."""
    rows = [row for row in victims(figure) for row in row["rows"] if row["what"] == what]
    if not rows:
        return ""
    text = ", ".join(number(row["measured"]) for row in rows)
    if (published := rows[0]["published"]) is not None:
        text += f" [{number(published)}]"
    chances = [row["chance"] for row in rows if row["chance"] is not None]
    if chances and all(isinstance(row, int | float) for row in chances):
        return f"{text} ({short(mean(chances))})"
    return f"{text} ({', '.join(map(number, chances))})" if chances else text


def lines(head: str, rows: Iterable[Line], *whats: str) -> str:
    """Return a table with a row for every line and a column for every quantity, without empty rows."""
    cells = [
        [name, *(cell(figure, start + what) for what in whats)] for name, figure, start in rows
    ]
    return filled(head, cells)


def filled(head: str, rows: Iterable[list[str]]) -> str:
    """Return a table of the rows that have a figure next to their name."""
    return grid(head, [row for row in rows if any(row[1:])])


@table
def paper_images() -> str:
    """List the binary attack on images."""
    alone, first = "without prior and margins", "earlier/haim2022-fig3"
    rows = [
        ("CIFAR n = 500", "haim2022-fig3", "CIFAR: "),
        ("CIFAR n = 500, released settings", "haim2022-released", "CIFAR, published: "),
        (f"CIFAR n = 500, {alone}", first, "CIFAR, residuum: "),
        ("MNIST n = 500", "haim2022-fig3", "MNIST: "),
        ("MNIST n = 500, released settings", first, "MNIST, published: "),
        (f"MNIST n = 500, {alone}", first, "MNIST, residuum: "),
        ("CIFAR n = 50", "haim2022-fig1", "n=50: "),
        ("CIFAR n = 100", "haim2022-fig6", "n=100: "),
    ]
    head = f"victims | recovered | {ABOVE} | {TOP} | {NCC}"
    return lines(head, rows, RECOVERED, ABOVE, TOP, NCC)


@table
def paper_baselines() -> str:
    """Compare the attack with model inversion and first-layer weights on the same victims."""
    names = {"residuum": "attack", "model-inversion": "model inversion", "weights": "weights"}
    rows = [(name, "haim2022-fig5", f"CIFAR, {arm}: ") for arm, name in names.items()]
    return lines(f"CIFAR n = 500 | recovered | {ABOVE}", rows, RECOVERED, ABOVE)


def accuracies(figure: str, name: str, table: str) -> str:
    """Return the test accuracy of every victim with that of the paper, "" if there is no victim."""
    runs = [result["details"]["runs"][name] for result in victims(figure)]
    if not runs:
        return ""
    published = read(f"papers/{table}")["published"][f"{name}: test accuracy"]
    return ", ".join(f"{run['test_accuracy']:.0%}" for run in runs) + f" [{published:.0%}]"


@table
def paper_who() -> str:
    """Compare samples on the margin with others, on eight victims."""
    figure, where = "haim2022-fig4", ("nearest the margin", "farthest from it")
    whats = [RECOVERED, *(f"median ssim3, quarter {result}" for result in where)]
    rows = [
        [
            name,
            *(cell(figure, f"{name}: {what}") for what in whats),
            accuracies(figure, name, "haim2022-table1"),
        ]
        for name in dict.fromkeys(
            name for result in victims(figure) for name in result["details"]["runs"]
        )
    ]
    return filled(f"victim | recovered | quarter {' | '.join(where)} | test accuracy", rows)


@table
def paper_training() -> str:
    """List other ways of training (Fig. 16), each of which has a figure."""
    names = {
        "haim2022-fig17": "standard init n=10",
        "haim2022-fig18": "standard init n=50",
        "haim2022-fig19": "SGD batch 50",
        "haim2022-fig20": "1e4 epochs CIFAR",
        "haim2022-fig21": "1e4 epochs MNIST",
    }
    rows = [
        [
            name,
            *(cell(figure, f"{name}: {what}") for what in (RECOVERED, TOP, NCC)),
            accuracies(figure, name, "haim2022-table2"),
        ]
        for figure, name in names.items()
    ]
    return filled(f"victim | recovered | {TOP} | {NCC} | test accuracy", rows)


@table
def paper_shift() -> str:
    """List shifted images (Fig. 2b of Refael et al.)."""
    whats = ("samples above NCC 0.8", "KKT residual at the data")
    names = ("no shift", "rewrite 0.5", "retrain 0.5", "rewrite 5", "retrain 5")
    rows = [(name, "refael2025-fig2b", f"{name}: ") for name in names]
    return lines(f"CIFAR n = 100 | {' | '.join(whats)}", rows, *whats)


@table
def paper_circle() -> str:
    """List the counts for twenty points on a circle."""
    whats = ("recovered", "model inversion", "largest distance of a true point to a candidate")
    rows = [[what, cell("haim2022-fig2", what)] for what in whats]
    seeds = ", ".join(str(result["seed"]) for result in victims("haim2022-fig2"))
    return grid(f"of 20 | seeds {seeds}", rows)


@table
def paper_theorems() -> str:
    """List statements that are wrong as printed: printed, corrected and exact."""
    rows = [
        r for r in read("papers/refael2025-theorems")["rows"] if r["published"] != r["corrected"]
    ]
    keys = ("published", "corrected", "measured")
    cells = [[row["what"].replace("|", r"\|"), *(number(row[key]) for key in keys)] for row in rows]
    return grid("statement | published | corrected | measured", cells)


RULE, WITH, WITHOUT = (
    "best 25, improved by splitting",
    "samples within the threshold, with splitting",
    "samples within the threshold, without",
)


def split(*figures: str) -> str:
    """Return a table of cases with splitting, each next to the same case without splitting."""
    first: dict[str, str] = {}  # some figures share a case
    for figure in figures:
        for result in victims(figure):
            first |= {case: first.get(case, figure) for case in result["details"]["cases"]}
    rows = [(case, figure, f"{case}: ") for case, figure in first.items()]
    head = (
        "attack, data, n, candidates per class | best 25 improved | within the threshold, without"
    )
    what = "candidates at the start and at the end"
    return lines(f"{head} | with splitting | candidates", rows, RULE, WITHOUT, WITH, what)


@table
def paper_splitting() -> str:
    """List splitting for all three objectives."""
    return split(
        "shen2026-fig5", "shen2026-fig3", "shen2026-fig8", "shen2026-fig2", "shen2026-fig11"
    )


@table
def paper_ntk() -> str:
    """List the attack on weights and initial weights."""
    whats = ("L2 below 2.5, one-to-one", "median L2", RECOVERED)
    rows = [(f"{name} n = 200", "loo2024-ntk", f"{name}: ") for name in ("MNIST", "CIFAR")]
    return lines("victim | L2 below 2.5 | median L2 | recovered", rows, *whats)


ARMS = (
    ("multiclass", "ten classes, best rival (published)", "best rival (published)"),
    ("multiclass", "ten classes, tied rivals", "tied rivals"),
    ("weight-decay", "weight decay, free (published)", "free multipliers (published)"),
    ("weight-decay", "weight decay, tied to the outputs", "tied to the outputs"),
)


@table
def paper_multipliers() -> str:
    """Compare the published multipliers with those of the stationary point."""
    rows = [(name, f"buzaglo2023-{figure}", f"{arm}: ") for figure, name, arm in ARMS]
    head = f"CIFAR n = 500 | recovered | {ABOVE} | first-layer residual"
    return lines(head, rows, RECOVERED, ABOVE, RESIDUAL)


@table
def small_multipliers() -> str:
    """Compare the multipliers on smaller networks."""
    head = "n = 60, three victims | recovered | first-layer residual"
    rows = [
        (f"{data}, {name}", f"{scale}/buzaglo2023-{figure}", f"{arm}: ")
        for data, scale in (("digits", "small"), ("CIFAR", "images"))
        for figure, name, arm in ARMS
    ]
    return lines(head, rows, RECOVERED, RESIDUAL)
