"""Tables of ``benchmarks.defenses``: digits, MNIST and CIFAR-10 side by side.

Counts are of all seeds, in their order. An attacker who knows of a defense has several attacks: shown is the
one that recovers most, and * marks p <= 0.01 after the p-value is multiplied by their number. One who was
told the secret has these and more, and is shown where one of those recovers most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from scipy.stats import binomtest

from benchmarks.defenses import CASES, STATE, groups
from benchmarks.harness import RESULTS
from benchmarks.markdown import Figures, grid, read, short, table
from residuum.defenses.attackers import INFORMED, find_strongest

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


def best_of(row: Figures, told: bool = False) -> Figures | None:
    """The strongest attack of one who knows (or was told, too) with its name; None where none ran."""
    ran = {
        name: one
        for name, one in row["attacks"].items()
        if "recovered" in one and (told or name not in INFORMED)
    }
    found = find_strongest({name: (one["recovered"], one["p_value"]) for name, one in ran.items()})
    if found is None:
        return None
    name, p, tried = found
    return ran[name] | {"name": name, "p_value": p, "tried": tried}


def leaks(one: Figures) -> bool:
    """Whether chance does not explain what an attack recovered."""
    return bool(one["p_value"] <= SIGNIFICANT)


def count(one: Figures | None) -> str:
    """Recovered, with a star where chance does not explain it; a dash where no attack ran."""
    if one is None or "recovered" not in one:
        return "-"
    star = r"\*" if leaks(one) else ""  # two bare ones would be emphasis
    return f"{one['recovered']}{star}"


def counts(found: Iterable[Figures | None]) -> str:
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
            knows, told = ([best_of(row, told=one) for row in own] for one in (False, True))
            ran = [one for one in knows if one is not None]
            names.update(one["name"] for one in ran)
            stars = [stars[0] + sum(map(leaks, ran)), stars[1] + len(ran)]
            unaware = (row["attacks"].get("unaware") for row in own)
            lines = [counts(unaware), f"→&nbsp;{counts(knows)}"]
            helped = any(one is not None and one["name"] in INFORMED for one in told)
            if helped and counts(told) != counts(knows):
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
            best = [one for row in own if (one := best_of(row)) is not None]
            if not best:
                cells.append("-")
                continue
            total, hits = read(file)["n"] * len(best), sum(one["recovered"] for one in best)
            low, high = binomtest(hits, total).proportion_ci(method="exact")
            chance = sum(one["expected"] for one in best)
            cells.append(f"{hits} of {total} ({short(chance)}), {low:.0%} to {high:.0%}")
            losses.append(f"{mean(row['train_loss'] for row in own):.2g}")
            right.append(f"{mean(row['held_out_accuracy'] for row in own):.0%}")
        made.append([f"`{name}`", *cells, " / ".join(losses), " / ".join(right)])
    head = " | ".join(read(file)["data"] for file in FILES)
    return grid(f"release | {head} | training loss | held-out accuracy", made)
