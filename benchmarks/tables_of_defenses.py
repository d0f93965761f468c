"""Tables of ``benchmarks.defenses``: digits, MNIST and CIFAR-10 side by side.

Counts are of all seeds, in their order; * marks p <= 0.01 and · a trial that was not run. "→" leads from the
unaware to the adaptive attacker where they differ; told: the attacker who was given the secret.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from benchmarks.markdown import Figures, grid, grouped, once, read, table

FILES = ("defenses-cpu", "defenses-mnist", "defenses-cifar10")
MISSING = "·"
WEAK = ("shift-rewrite:0.05", "noise:0.1")  # too weak to hide anything from anybody
# What to think of a defense, by how it begins.
VERDICTS = {
    "shift-rewrite:": "no protection: undone from the weights alone",
    "shift-rewrite-vector": "hides a part; nothing once the secret is out",
    "shift-retrain": "few samples left, not all by chance; no guarantee",
    "noise": "weak; averaged releases bring the samples back",
    "early-stop": "little protection",
    "default-init": "no protection",
    "plain-gd": "little protection",
    "label-smoothing": "little protection",
    "sgd": "little protection",
    "weight-decay": "little protection",
    "dp": "no count significant by itself; the only one with a guarantee",
}


@table
def defenses() -> str:
    """Every defense on every dataset, and what it costs."""
    contents = [read(name) for name in FILES]
    rows = []
    for defense in dict.fromkeys(_general(row["defense"]) for row in contents[0]["table"]):
        if defense in WEAK:
            continue
        cells, prices = [], []
        for content in contents:
            group = [row for row in content["table"] if _general(row["defense"]) == defense]
            seeds = _seeds(content["table"])
            found = [_counts(group, who, seeds) for who in ("unaware", "adaptive", "told")]
            knows = "" if found[1] in ("-", found[0]) else f" → {found[1]}"
            cells.append(found[0] + knows + ("" if found[2] == "-" else f"; told {found[2]}"))
            plain = {r["seed"]: r["accuracy"] for r in content["table"] if r["name"] == "none"}
            points = 100 * mean(row["accuracy"] - plain[row["seed"]] for row in group)
            prices.append(f"{points:+.1f}" if points else "0")
        verdict = next((v for start, v in VERDICTS.items() if defense.startswith(start)), "")
        rows.append([f"`{defense}`", *cells, " / ".join(prices), verdict])
    names = " | ".join(f"{c['data']}, of {c['n']}" for c in contents)
    return grid(f"defense | {names} | accuracy, points | verdict", once(rows, -1))


@table
def inferred_shifts() -> str:
    """Rewritten shifts: what is inferred from the weights, and the counts after it is undone."""
    rows = []
    for content in map(read, FILES):
        for arch, network in grouped(content["shift"] + content["table"], "arch").items():
            plain = [row for row in network if row["name"] == "none"]
            rewritten = [row for row in network if row["name"].startswith("shift-rewrite")]
            for group in grouped(rewritten, "defense").values():
                vector, strength = group[0]["name"].endswith("vector"), group[0]["strength"]
                if not vector and strength != 5:
                    continue  # the error does not depend on the shift
                seeds = _seeds(plain)
                found = {row["seed"]: row["adaptive"]["findings"]["balance"] for row in group}
                errors = {k: b["shift_per_pixel"] - strength for k, b in found.items()}
                rows.append(
                    [
                        f"`{arch.removeprefix('mlp:')}`, {content['data']}",
                        f"{'random, ' if vector else ''}{strength:g}",
                        "-" if vector else _each(errors, lambda error: f"{error:.1g}", seeds),
                        _each(found, lambda b: "yes" if b["consensus"] else "no", seeds),
                        _counts(plain, "unaware", seeds),
                        *(_counts(group, who, seeds) for who in ("unaware", "adaptive", "told")),
                    ]
                )
    head = "network | shift | inferred, less the true one | consensus | undefended | unaware"
    return grid(f"{head} | inferred undone | true undone", rows)


def _general(defense: str) -> str:
    """Weight decay has another strength on every dataset."""
    return "weight-decay" if defense.startswith("weight-decay") else defense


def _seeds(rows: list[Figures]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def _counts(group: list[Figures], who: str, seeds: Sequence[int]) -> str:
    """Recovered samples of every seed; - where there is no such attacker."""
    attacks = {row["seed"]: row[who] for row in group}
    return _each(attacks, _count, seeds) if any(attacks.values()) else "-"


def _count(attacked: Figures) -> str:
    if attacked["recovered"] is None:
        return "-"
    star = r"\*" if attacked["p_value"] <= 0.01 else ""  # two bare ones would be emphasis
    return f"{attacked['recovered']}{star}"


def _each(by_seed: dict[int, Any], text: Callable[[Any], str], seeds: Sequence[int]) -> str:
    return ", ".join(text(by_seed[seed]) if seed in by_seed else MISSING for seed in seeds)
