"""Tables of ``python -m papers``: measured beside published values and chance, one number per victim.

A cell is *measured [published] (chance)*; the victims of a figure are the files of its seeds, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from benchmarks.markdown import Figures, grid, of_seeds, read, short, table

RECOVERED = "recovered (NCC beyond 99% of chance)"
RESIDUAL = "relative residual of the first layer"
ABOVE, TOP, NCC = "ssim3 above 0.4", "top-10 mean ssim3", "median NCC of the top 30"
Line = tuple[str, str, str]  # what a row is called, the figure, how its quantities begin


def victims(figure: str) -> list[Figures]:
    """What was measured on every victim of a figure; before it may stand "small/" or "images/" (the small
    scale, on digits or on images of MNIST and CIFAR) and "earlier/" (attacks without prior and margins).
    """
    scale, _, name = figure.rpartition("/")
    folder = {"": "papers", "images": "papers-small-images"}.get(scale, f"papers-{scale}")
    return of_seeds(f"{folder}/{name}")


def number(value: Any) -> str:
    """A count as it is, a figure to three digits, two of them from the first to the second."""
    if isinstance(value, list):
        return " to ".join(map(number, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def cell(figure: str, what: str) -> str:
    """One quantity of every victim; "" where none has it."""
    found = [row for one in victims(figure) for row in one["rows"] if row["what"] == what]
    if not found:
        return ""
    text = ", ".join(number(row["measured"]) for row in found)
    if (published := found[0]["published"]) is not None:
        text += f" [{number(published)}]"
    chances = [row["chance"] for row in found if row["chance"] is not None]
    if chances and all(isinstance(one, int | float) for one in chances):
        return f"{text} ({short(mean(chances))})"
    return f"{text} ({', '.join(map(number, chances))})" if chances else text


def lines(head: str, rows: Iterable[Line], *whats: str) -> str:
    """A row for every line, a column for every quantity; rows without any are left out."""
    made = [[name, *(cell(figure, start + what) for what in whats)] for name, figure, start in rows]
    return filled(head, made)


def filled(head: str, rows: Iterable[list[str]]) -> str:
    """The rows that have any figure beside their name."""
    return grid(head, [row for row in rows if any(row[1:])])


@table
def paper_images() -> str:
    """The binary attack on images."""
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
    """The attack, model inversion and first-layer weights on the same victims."""
    names = {"residuum": "attack", "model-inversion": "model inversion", "weights": "weights"}
    rows = [(name, "haim2022-fig5", f"CIFAR, {arm}: ") for arm, name in names.items()]
    return lines(f"CIFAR n = 500 | recovered | {ABOVE}", rows, RECOVERED, ABOVE)


def accuracies(figure: str, name: str, table: str) -> str:
    """On held-out samples, of every victim, beside what the paper's table has; "" where there is none."""
    runs = [one["details"]["runs"][name] for one in victims(figure)]
    if not runs:
        return ""
    published = read(f"papers/{table}")["published"][f"{name}: test accuracy"]
    return ", ".join(f"{run['test_accuracy']:.0%}" for run in runs) + f" [{published:.0%}]"


@table
def paper_who() -> str:
    """Samples on the margin and off it, eight victims."""
    figure, where = "haim2022-fig4", ("nearest the margin", "farthest from it")
    whats = [RECOVERED, *(f"median ssim3, quarter {one}" for one in where)]
    rows = [
        [
            name,
            *(cell(figure, f"{name}: {what}") for what in whats),
            accuracies(figure, name, "haim2022-table1"),
        ]
        for name in dict.fromkeys(
            name for one in victims(figure) for name in one["details"]["runs"]
        )
    ]
    return filled(f"victim | recovered | quarter {' | '.join(where)} | test accuracy", rows)


@table
def paper_training() -> str:
    """Other ways of training, Fig. 16; a figure of its own shows each."""
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
    """Shifted images, Fig. 2b of Refael et al."""
    whats = ("samples above NCC 0.8", "KKT residual at the data")
    names = ("no shift", "rewrite 0.5", "retrain 0.5", "rewrite 5", "retrain 5")
    rows = [(name, "refael2025-fig2b", f"{name}: ") for name in names]
    return lines(f"CIFAR n = 100 | {' | '.join(whats)}", rows, *whats)


@table
def paper_circle() -> str:
    """Twenty points on a circle."""
    whats = ("recovered", "model inversion", "largest distance of a true point to a candidate")
    rows = [[what, cell("haim2022-fig2", what)] for what in whats]
    seeds = ", ".join(str(one["seed"]) for one in victims("haim2022-fig2"))
    return grid(f"of 20 | seeds {seeds}", rows)


@table
def paper_theorems() -> str:
    """Statements that are wrong as printed: printed, corrected and exact."""
    rows = [
        r for r in read("papers/refael2025-theorems")["rows"] if r["published"] != r["corrected"]
    ]
    keys = ("published", "corrected", "measured")
    made = [[row["what"].replace("|", r"\|"), *(number(row[key]) for key in keys)] for row in rows]
    return grid("statement | published | corrected | measured", made)


RULE, WITH, WITHOUT = (
    "best 25, improved by splitting",
    "samples within the threshold, with splitting",
    "samples within the threshold, without",
)


def split(*figures: str) -> str:
    """Cases of splitting, each beside the same without it."""
    first: dict[str, str] = {}  # some figures share a case
    for figure in figures:
        for one in victims(figure):
            first |= {case: first.get(case, figure) for case in one["details"]["cases"]}
    rows = [(case, figure, f"{case}: ") for case, figure in first.items()]
    head = (
        "attack, data, n, candidates per class | best 25 improved | within the threshold, without"
    )
    what = "candidates at the start and at the end"
    return lines(f"{head} | with splitting | candidates", rows, RULE, WITHOUT, WITH, what)


@table
def paper_splitting() -> str:
    """All three objectives."""
    return split(
        "shen2026-fig5", "shen2026-fig3", "shen2026-fig8", "shen2026-fig2", "shen2026-fig11"
    )


@table
def paper_ntk() -> str:
    """Weights and initial weights."""
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
    """As published, and as the stationary point has them."""
    rows = [(name, f"buzaglo2023-{figure}", f"{arm}: ") for figure, name, arm in ARMS]
    head = f"CIFAR n = 500 | recovered | {ABOVE} | first-layer residual"
    return lines(head, rows, RECOVERED, ABOVE, RESIDUAL)


@table
def small_multipliers() -> str:
    """The same on smaller networks: digits, and under weight decay CIFAR."""
    head = "n = 60, three victims | recovered | first-layer residual"
    rows = [
        (f"{data}, {name}", f"{scale}/buzaglo2023-{figure}", f"{arm}: ")
        for data, scale in (("digits", "small"), ("CIFAR", "images"))
        for figure, name, arm in ARMS
    ]
    return lines(head, rows, RECOVERED, RESIDUAL)
