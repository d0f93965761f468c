"""Tables of ``docs/defenses.md``: results of ``experiments.defenses`` on digits, MNIST and CIFAR-10.

A cell lists the counts of all seeds in their order. An attacker who knows the defense has several attacks,
and the table has the count of the strongest of them. A star marks p <= 0.01 after the p-value is multiplied
by the number of attacks. An attacker who also knows the secret has further attacks. Its counts are listed if
one of the further attacks is the strongest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean

from scipy.stats import binomtest

from experiments.defenses import CASES, STATE, groups
from experiments.pages.tables import Figures, find_file, grid, read, short, table
from residuum.defenses.attackers import INFORMED, find_strongest

FILES = [name for data in CASES if find_file(name := f"defenses-{data}")]
SIGNIFICANT = 0.01


def rows(file: str, defense: str) -> list[Figures]:
    """Return the networks of a defense, by seed. The strength of weight decay differs between data sets."""
    entries = read(file)["rows"].values() if find_file(file) else ()
    networks = [row for row in entries if "attacks" in row]
    return sorted((row for row in networks if general(row) == defense), key=lambda row: row["seed"])


def general(row: Figures) -> str:
    """Return the name of a defense that all data sets share."""
    return "weight-decay" if row["defense"].startswith("weight-decay") else row["defense"]


def ordered() -> list[str]:
    """Return the names of all defenses, the undefended network first."""
    defenses = [text for group in groups("digits") for text in group]
    after = defenses.index("plain-gd:1") + 1
    defenses = [*defenses[:after], f"plain-gd:1, {STATE}", *defenses[after:]]
    return ["weight-decay" if text.startswith("weight-decay") else text for text in defenses]


def best_of(row: Figures, knows_secret: bool = False) -> Figures | None:
    """Return the scores of the strongest attack with its name, None if no attack ran."""
    ran = {
        name: scores
        for name, scores in row["attacks"].items()
        if "recovered" in scores and (knows_secret or name not in INFORMED)
    }
    results = {name: (scores["recovered"], scores["p_value"]) for name, scores in ran.items()}
    strongest = find_strongest(results)
    if strongest is None:
        return None
    name, p, tried = strongest
    return ran[name] | {"name": name, "p_value": p, "tried": tried}


def leaks(scores: Figures) -> bool:
    """Return True if an attack recovered more than expected by chance, at 1%."""
    return bool(scores["p_value"] <= SIGNIFICANT)


def count(scores: Figures | None) -> str:
    """Return the count of recovered samples, with a star if beyond chance, or a dash if no attack ran."""
    if scores is None or "recovered" not in scores:
        return "-"
    star = r"\*" if leaks(scores) else ""  # two bare stars would be emphasis
    return f"{scores['recovered']}{star}"


def counts(attacks: Iterable[Figures | None]) -> str:
    """Return the counts of all seeds in a line that is not broken."""
    return ",&nbsp;".join(map(count, attacks))


@table
def defenses() -> str:
    """List every defense on every data set, the attacks that break it, and its cost in accuracy."""
    table = []
    for defense in ordered():
        cells, points, names, stars = [], [], Counter[str](), [0, 0]
        for file in FILES:
            networks, plain = rows(file, defense), rows(file, "none")
            if not networks:
                cells.append("")
                continue
            knows = [best_of(row) for row in networks]
            secret = [best_of(row, knows_secret=True) for row in networks]
            ran = [scores for scores in knows if scores is not None]
            names.update(scores["name"] for scores in ran)
            stars = [stars[0] + sum(map(leaks, ran)), stars[1] + len(ran)]
            unaware = (row["attacks"].get("unaware") for row in networks)
            lines = [counts(unaware), f"→&nbsp;{counts(knows)}"]
            names_secret = {scores["name"] for scores in secret if scores is not None}
            if names_secret & {*INFORMED} and counts(secret) != counts(knows):
                lines.append(f"told&nbsp;{counts(secret)}")
            cells.append("<br>".join(lines))
            before = {row["seed"]: row["held_out_accuracy"] for row in plain}
            gains = [row["held_out_accuracy"] - before[row["seed"]] for row in networks]
            points.append(f"{100 * mean(gains):+.1f}")
        by = ", ".join(f"{name} {times}" for name, times in names.most_common())
        table.append([f"`{defense}`", *cells, " / ".join(points), by, f"{stars[0]} of {stars[1]}"])
    head = " | ".join(f"{read(file)['data']}, of {read(file)['n']}" for file in FILES)
    return grid(f"defense | {head} | accuracy, points | strongest attack | leaks", table)


@table
def intervals() -> str:
    """Compare differential privacy with cheap defenses: all seeds together, with a 95% interval."""
    names = (
        "none",
        f"plain-gd:1, {STATE}",
        "plain-gd:1",
        "early-stop:0.1",
        "dp:50",
        "dp:8",
        "dp:1",
    )
    table = []
    for name in names:
        cells, losses, right = [], [], []
        for file in FILES:
            networks = rows(file, name)
            if not networks:
                cells.append("")
                continue
            best = [scores for row in networks if (scores := best_of(row)) is not None]
            if not best:
                cells.append("-")
                continue
            total, hits = read(file)["n"] * len(best), sum(scores["recovered"] for scores in best)
            low, high = binomtest(hits, total).proportion_ci(method="exact")
            chance = sum(scores["expected"] for scores in best)
            cells.append(f"{hits} of {total} ({short(chance)}), {low:.0%} to {high:.0%}")
            losses.append(f"{mean(row['train_loss'] for row in networks):.2g}")
            right.append(f"{mean(row['held_out_accuracy'] for row in networks):.0%}")
        table.append([f"`{name}`", *cells, " / ".join(losses), " / ".join(right)])
    head = " | ".join(read(file)["data"] for file in FILES)
    return grid(f"release | {head} | training loss | held-out accuracy", table)
