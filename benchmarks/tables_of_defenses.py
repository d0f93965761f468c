"""Tables of ``benchmarks.defenses``: digits, MNIST and CIFAR-10 side by side.

Counts are of all seeds, in their order. An attacker who knows of a defense has several attacks: shown is the
one that recovers most, and * marks p <= 0.01 after the p-value is multiplied by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from scipy.stats import binomtest

from benchmarks.defenses import CASES, STATE, groups
from benchmarks.harness import RESULTS
from benchmarks.markdown import Figures, grid, read, short, table
from residuum.defenses.attackers import TOLD

FILES = [f"defended-{data}" for data in CASES if (RESULTS / f"defended-{data}.json").exists()]
SIGNIFICANT = 0.01


def rows(file: str, defense: str) -> list[Figures]:
    """Networks of one defense that were made, by seed; weight decay has another strength on every data."""
    there = (RESULTS / f"{file}.json").exists()
    found = [row for row in read(file)["rows"].values() if "attacks" in row] if there else []
    return sorted((row for row in found if general(row) == defense), key=lambda row: row["seed"])


def general(row: Figures) -> str:
    """A defense by the name that all datasets share."""
    return "weight-decay" if row["defense"].startswith("weight-decay") else row["defense"]


def ordered() -> list[str]:
    """Defenses as the benchmark names them, the undefended network first."""
    named = [text for group in groups("digits") for text in group]
    after = named.index("plain-gd:1") + 1
    named = [*named[:after], f"plain-gd:1, {STATE}", *named[after:]]
    return ["weight-decay" if text.startswith("weight-decay") else text for text in named]


def strongest(row: Figures, told: bool = False) -> tuple[str, Figures]:
    """Of the attacks of one who knows (or was told), that which recovers most."""
    own = {
        name: one
        for name, one in row["attacks"].items()
        if "recovered" in one and (name in TOLD) == told
    }
    best = max(own, key=lambda name: (own[name]["recovered"], -own[name]["p_value"]))
    return best, own[best] | {"p_value": own[best]["p_value"] * len(own), "tried": len(own)}


def count(one: Figures) -> str:
    """Recovered, with a star where chance does not explain it."""
    star = r"\*" if one["p_value"] <= SIGNIFICANT else ""  # two bare ones would be emphasis
    return f"{one['recovered']}{star}"


def counts(found: Iterable[Figures]) -> str:
    """One for every seed, in a line that is not broken."""
    return ",&nbsp;".join(map(count, found))


@table
def defenses() -> str:
    """Every defense on every dataset, who breaks it, and what it costs."""
    made = []
    for defense in ordered():
        cells, points, names, stars = [], [], Counter[str](), [0, 0]
        for file in FILES:
            own, plain = rows(file, defense), rows(file, "none")
            if not own:
                cells.append("")
                continue
            best = [strongest(row) for row in own]
            names.update(name for name, _ in best)
            stars = [
                stars[0] + sum(one["p_value"] <= SIGNIFICANT for _, one in best),
                stars[1] + len(best),
            ]
            knows = [one for _, one in best]
            lines = [counts(row["attacks"]["unaware"] for row in own), f"→&nbsp;{counts(knows)}"]
            if any(name in TOLD for row in own for name in row["attacks"]):
                told = [strongest(row, told=True)[1] for row in own]
                if counts(told) != counts(knows):
                    lines.append(f"told&nbsp;{counts(told)}")
            cells.append("<br>".join(lines))
            before = {row["seed"]: row["held_out_accuracy"] for row in plain}
            gains = [row["held_out_accuracy"] - before[row["seed"]] for row in own]
            points.append(f"{100 * mean(gains):+.1f}")
        by = ", ".join(f"{name} {times}" for name, times in names.most_common())
        made.append([f"`{defense}`", *cells, " / ".join(points), by, f"{stars[0]} of {stars[1]}"])
    head = " | ".join(f"{read(file)['data']}, of {read(file)['n']}" for file in FILES)
    return grid(f"defense | {head} | accuracy, points | strongest attack | leaks", made)


@table
def intervals() -> str:
    """Differential privacy beside what costs nothing: all seeds together, with a 95% interval."""
    names = (
        "none",
        f"plain-gd:1, {STATE}",
        "plain-gd:1",
        "early-stop:0.1",
        "dp:50",
        "dp:8",
        "dp:1",
    )
    made = []
    for name in names:
        cells, losses, right = [], [], []
        for file in FILES:
            own = rows(file, name)
            if not own:
                cells.append("")
                continue
            best = [strongest(row)[1] for row in own]
            total, hits = read(file)["n"] * len(own), sum(one["recovered"] for one in best)
            low, high = binomtest(hits, total).proportion_ci(method="exact")
            chance = sum(one["expected"] for one in best)
            cells.append(f"{hits} of {total} ({short(chance)}), {low:.0%} to {high:.0%}")
            losses.append(f"{mean(row['train_loss'] for row in own):.2g}")
            right.append(f"{mean(row['held_out_accuracy'] for row in own):.0%}")
        made.append([f"`{name}`", *cells, " / ".join(losses), " / ".join(right)])
    head = " | ".join(read(file)["data"] for file in FILES)
    return grid(f"release | {head} | training loss | held-out accuracy", made)
