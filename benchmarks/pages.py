"""Tables of docs/ from the files that benchmarks wrote: ``python -m benchmarks.pages`` writes them anew.

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- /table -->``; NAME is a function of this
file that is marked with ``@table``. What a file does not hold (yet) leaves no row. A test says that the
committed pages are what this program writes, so no number of such a table can be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import stationarity as stationary
from benchmarks import unmix as unmixing
from benchmarks.harness import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}
Figures = dict[str, Any]


def main() -> None:
    """Write every page that holds a table."""
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.name}: written anew")


def filled(text: str) -> str:
    """The text of a page with every table in it made anew."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n{mark[3]}", text)


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Enter a table under its function's name."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


def grid(head: str, rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Markdown; ``head`` names columns between bars, of which ``left`` hold words."""
    names = head.split(" | ")
    dashes = ["---" if k < left else "---:" for k in range(len(names))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (names, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(dashes)}|", *lines[1:]])


@cache
def read(name: str) -> Figures:
    """A file of results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def short(value: float, digits: int = 1) -> str:
    """A number without zeros behind its point."""
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def means(entries: Sequence[Figures]) -> dict[str, float]:
    """Of every number that all entries have."""
    keys = [k for k, v in entries[0].items() if isinstance(v, int | float)]
    return {k: mean(e[k] for e in entries) for k in keys if all(k in e for e in entries)}


def with_chance(one: dict[str, float], *keys: str) -> str:
    """Counts, each with the same for held-out images in brackets."""
    return " / ".join(f"{short(one[k])} ({short(one[f'{k} held out'])})" for k in keys)


def victims_of(file: str, name: str) -> list[Figures]:
    """Entries of one row of a file, victim by victim."""
    return [v for key, v in read(file)["victims"].items() if key.split("/")[0] == name]


# Unmix, stationarity and surfaces: means of victims on different images.

SURFACES = {
    "cifar-50": "CIFAR n=50, margin",
    "cifar-100": "CIFAR n=100, margin",
    "cifar-200": "CIFAR n=200, margin",
    "cifar-500": "CIFAR n=500, margin",
    "cifar-100-gd": "CIFAR n=100, gradient descent, 1e4 epochs",
    "mnist-100": "MNIST n=100, margin",
    "cifar-100-momentum": "CIFAR n=100, momentum buffer, batches of 50",
    "sklearn-100": "MLPClassifier, CIFAR n=100, centred, Adam moment",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
}


@table
def unmix() -> str:
    """Both claims, the second one below the first."""
    rows = []
    for file, claim in (("unmix-h200", ""), ("unmix-again-h200", ", second claim")):
        for name, title in SURFACES.items():
            entries = victims_of(file, name)
            if not entries:
                continue
            one, rival = (means([e[arm] for e in entries]) for arm in ("unmix", "stationarity"))
            counts = ", ".join(str(e["unmix"]["recovered"]) for e in entries)
            wanted = unmixing.ROWS[name].wanted.items()
            aims = [f"{v}" + (f" above {k}" if k[0] == "0" else "") for k, v in wanted]
            rows.append(
                [
                    title + claim,
                    f"{counts} ({short(one['expected'])}; {one['threshold']:.2f})",
                    " / ".join(short(one[str(level)]) for level in unmixing.LEVELS),
                    short(one["0.8 held out"]),
                    short(means(entries)["seconds"]),
                    f"{short(rival['0.8'])} / {short(rival['0.9'])}",
                    ", ".join(aims),
                ]
            )
    head = "surface | recovered, per victim (chance; threshold) | NCC > 0.7 / 0.8 / 0.9 / 0.95"
    rest = "held out > 0.8 | seconds | stationarity > 0.8 / 0.9 | aimed at"
    return grid(f"{head} | {rest}", rows)


@table
def unmix_backed() -> str:
    """Sources that half of the runs find again, and how many of them are images."""
    rows = []
    for name, title in SURFACES.items():
        sources = [s for e in victims_of("unmix-h200", name) for s in e["sources"]]
        backed = [similar for share, _, similar, _ in sources if share >= 0.5]
        shares = [mean(similar > level for similar in backed) for level in (0.8, 0.7)]
        rows.append([title, len(backed), *(f"{share:.0%}" for share in shares)])
    return grid("surface | sources | above NCC 0.8 | above 0.7", rows)


STATIONARY = {
    "cifar-500": "CIFAR n=500",
    "cifar-1000": "CIFAR n=1000",
    "mnist-500": "MNIST n=500",
    "cifar-200": "CIFAR n=200",
    "cifar-100-default": "CIFAR n=100, default start",
    "cifar-100-ten": "CIFAR n=100, ten classes",
    "cifar-100-gd": "CIFAR n=100, gradient descent, 1e4 epochs",
    "cifar-100-gd-long": "CIFAR n=100, gradient descent, 1e5 epochs",
    "cifar-100-batches": "CIFAR n=100, batches of 50",
    "cifar-100-decay": "CIFAR n=100, weight decay 1e-3",
}
ARMS = {
    "published": "published settings",
    "plain": "without the terms",
    "margins": "equal margins alone",
    "prior": "sparse prior alone",
    "all": "residuum",
    "both": "both: residuum",
    "kinks": "both, then kinks",
    "patches": "patch prior alone",
    "unmix": "unmix",
    "with unmix": "residuum and unmix",
}


def arms_of(name: str) -> dict[str, list[Figures]]:
    """Figures of every arm of a row that was scored, victim by victim."""
    entries = [v["arms"] for v in victims_of("stationarity-h200", name)]
    scored = {arm: [e[arm] for e in entries if "candidates" in e.get(arm, {})] for arm in ARMS}
    return {arm: found for arm, found in scored.items() if found}


@table
def stationarity() -> str:
    """What the attack chooses by itself, beside the published settings and beside none of the terms."""
    rows = []
    for name, title in STATIONARY.items():
        row = stationary.ROWS[name]
        sizes = f"{row.attack['restarts']} x {row.attack.get('candidates', 2 * row.n)}"
        for arm, entries in arms_of(name).items():
            one = means(entries)
            ssim = f"{with_chance(one, 'ssim3')}; {one['top10']:.2f}" if "ssim3" in one else ""
            rows.append(
                [
                    f"{title}; {sizes}; {len(entries)} victims",
                    ARMS[arm],
                    ssim,
                    with_chance(one, "0.7", "0.8", "0.9"),
                    f"{short(one['recovered'])} ({short(one['expected'])})",
                    f"{one['seconds']:.0f}",
                    ", ".join(f"{k}: {v}" for k, v in row.wanted.items()) if arm == "all" else "",
                ]
            )
    head = "victims | attack | ssim3 > 0.4; top ten | NCC > 0.7 / 0.8 / 0.9"
    return grid(f"{head} | recovered (chance) | seconds | aimed at", rows, left=2)


@table
def ablation() -> str:
    """Each term by itself and together, one restart, at n = 500 and n = 100."""
    cells: dict[str, list[str]] = {arm: [] for arm in ARMS}
    for name in ("cifar-500-ablation", "cifar-100-ablation"):
        found = {arm: means(entries) for arm, entries in arms_of(name).items()}
        for arm in ARMS:
            if arm in found:
                one = found[arm]
                cells[arm] += [with_chance(one, "ssim3", "0.8", "0.9"), f"{one['seconds']:.0f}"]
    head = "attack | n=500: ssim3 > 0.4 / NCC > 0.8 / 0.9 | seconds | n=100: the same | seconds"
    return grid(head, [[ARMS[arm], *row] for arm, row in cells.items() if row])


@table
def quick() -> str:
    """Time to published quality: one short restart."""
    found = read("stationarity-h200")["quick"]
    return grid(
        "steps | seconds, capture included | ssim3 > 0.4 (held out) | top ten",
        [
            [steps, f"{one['seconds']:.2f}", with_chance(one, "ssim3"), f"{one['top10']:.2f}"]
            for steps, one in sorted(found.items(), key=lambda pair: int(pair[0]))
            if steps != "1"
        ],
    )


FILES = {
    "momentum-500": "torch.save after SGD with momentum, 3072-1000-1000-1, n=500",
    "sklearn-100": "joblib.dump of `MLPClassifier((200,))`, n=100, centred",
    "sklearn-100-raw": "the same, pixels in [0, 1]",
    "adam-100": "torch.save after Adam, 3072-1000-10, n=100, centred",
    "adam-100-raw": "the same, pixels in [0, 1]",
}


@table
def surfaces() -> str:
    """Files as saved, and stripped of everything but the weights."""
    rows = []
    for name, title in FILES.items():
        file = "surfaces-h200" if name == "momentum-500" else "surfaces-cpu"
        for arm in ("as saved", "weights alone"):
            own = [e[arm]["all"] for e in victims_of(file, name) if "all" in e.get(arm, {})]
            if own:
                one = means(own)
                above = ", ".join(str(e["0.9"]) for e in own)
                rows.append(
                    [
                        f"{title}, {len(own)} files",
                        "stripped" if arm == "weights alone" else arm,
                        with_chance(one, "0.8"),
                        f"{with_chance(one, '0.9')}: {above}",
                        f"{short(one['recovered'])} ({short(one['expected'])})",
                        f"{one['seconds']:.0f}",
                    ]
                )
    head = "file | attacked | NCC > 0.8 (held out) | NCC > 0.9 (held out): per file"
    return grid(f"{head} | recovered (chance) | seconds", rows, left=2)


if __name__ == "__main__":
    main()
