"""Tables of results of ``benchmarks.defenses`` in Markdown: ``python -m benchmarks.defenses_tables FILE...``.

Counts are of all seeds, in their order; * marks p <= 0.01 and · a trial that was not run. The other
figures are means over seeds where every row has all of them, and each seed's where one lacks some.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]
MISSING = "·"
# Rows of the summary, by how the defense begins, and what to think of each.
VERDICTS = {
    "none": "",
    "shift-rewrite:5": "no protection: undone from the weights alone",
    "shift-rewrite-vector:0.5": "hides a part; nothing once the secret is out",
    "shift-retrain:0.5": "few samples left, not all by chance; no guarantee",
    "shift-retrain-vector:0.5": "few samples left, not all by chance; no guarantee",
    "noise:1": "weak; averaged releases bring the samples back",
    "early-stop": "little protection",
    "default-init": "no protection",
    "plain-gd": "little protection",
    "label-smoothing": "little protection",
    "sgd": "little protection",
    "weight-decay": "little protection",
    "dp": "no count significant by itself; the only one with a guarantee",
}


def summary_table(contents: list[Row]) -> str:
    """Datasets side by side: unaware -> adaptive counts, and points of accuracy gained or lost."""
    head = [
        "defense",
        *(f"{c['data']}, of {c['n']}" for c in contents),
        "accuracy, points",
        "verdict",
    ]
    lines = _head(head, left=(0, len(head) - 1))
    for prefix, verdict in VERDICTS.items():
        names, cells, prices = set(), [], []
        for content in contents:
            seeds = _seeds(content["table"])
            group = [row for row in content["table"] if row["defense"].startswith(prefix)]
            found = [_counts(group, who, seeds) for who in ("unaware", "adaptive")]
            cells.append(found[0] if found[1] in ("-", found[0]) else " → ".join(found))
            plain = {r["seed"]: r["accuracy"] for r in content["table"] if r["name"] == "none"}
            points = 100 * mean(row["accuracy"] - plain[row["seed"]] for row in group)
            prices.append(f"{points:+.1f}" if points else "0")
            names.add(group[0]["defense"])
        name = names.pop() if len(names) == 1 else prefix
        lines.append(_line([f"`{name}`", *cells, " / ".join(prices), verdict]))
    return "\n".join(lines)


def defenses_table(rows: list[Row], seconds: bool = True) -> str:
    """Every defense: counts of three attackers, and the price."""
    seeds = _seeds(rows)
    groups = _grouped(rows, "defense")
    whole = all(len(group) == len(seeds) for group in groups.values())
    figures = {
        "KKT": ("kkt_plain", 2),
        "pairs keep": ("determined_energy", 2),
        "test accuracy": ("accuracy", 3),
        "test loss": ("loss", 2),
    }
    figures = {name: key for name, key in figures.items() if rows[0][key[0]] is not None}
    head = ["defense", "unaware", "adaptive", "told the shift", "by chance", *figures]
    lines = _head([*head, *(["train s"] if seconds else [])])
    for name, group in groups.items():
        cells = [_counts(group, who, seeds) for who in ("unaware", "adaptive", "told")]
        cells.append(_chance(group))
        cells += [_figure(group, *key, () if whole else seeds) for key in figures.values()]
        if seconds:
            cells.append(f"{mean(row['seconds']['train'] for row in group):.1f}")
        lines.append(_line([f"`{name}`", *cells]))
    return "\n".join(lines)


def shift_table(rows: list[Row]) -> str:
    """Rewritten shifts of every network: the inferred one's error, counts before and after it is undone."""
    head = (
        "network",
        "c",
        "inferred, less c",
        "imbalance left",
        "consensus",
        "none",
        "unaware",
        "inferred undone",
        "true undone",
        "by chance",
    )
    lines = _head(head)
    for arch, network in _grouped(rows, "arch").items():
        plain = [row for row in network if row["name"] == "none"]
        rewritten = [row for row in network if row["name"].startswith("shift-rewrite")]
        for group in _grouped(rewritten, "defense").values():
            seeds, vector = _seeds(plain), group[0]["name"].endswith("vector")
            found = {row["seed"]: row["adaptive"]["findings"]["balance"] for row in group}
            errors = {k: b["shift_per_pixel"] - group[0]["strength"] for k, b in found.items()}
            lines.append(
                _line(
                    [
                        f"`{arch.removeprefix('mlp:')}`",
                        f"{'random, ' if vector else ''}{group[0]['strength']:g}",
                        "-" if vector else _each(errors, lambda error: f"{error:.2g}", seeds),
                        _each(found, lambda b: f"{b['imbalance']:.2g}", seeds),
                        _each(found, lambda b: "yes" if b["consensus"] else "no", seeds),
                        _counts(plain, "unaware", seeds),
                        *(_counts(group, who, seeds) for who in ("unaware", "adaptive", "told")),
                        _chance(group),
                    ]
                )
            )
    return "\n".join(lines)


def length_table(rows: list[Row]) -> str:
    """Training steps: loss, KKT residual and count."""
    head = ("steps", "train loss", "KKT residual", "recovered", "by chance", "test accuracy")
    lines, seeds = _head(head, left=()), _seeds(rows)
    for steps, group in sorted(_grouped(rows, "steps").items()):
        by_seed = {row["seed"]: row for row in group}
        lines.append(
            _line(
                [
                    str(steps),
                    _each(by_seed, lambda r: f"{r['train_loss']:.0e}", seeds),
                    _figure(group, "kkt_plain", 2, seeds),
                    _counts(group, "unaware", seeds),
                    _chance(group),
                    _figure(group, "accuracy", 3),
                ]
            )
        )
    return "\n".join(lines)


def _grouped(rows: list[Row], key: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _seeds(rows: list[Row]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def _counts(group: list[Row], who: str, seeds: Sequence[int]) -> str:
    """Recovered samples of every seed; - where there is no such attacker."""
    attacks = {row["seed"]: row[who] for row in group}
    return _each(attacks, _count, seeds) if any(attacks.values()) else "-"


def _count(attacked: Row) -> str:
    if attacked["recovered"] is None:
        return "-"
    star = r"\*" if attacked["p_value"] <= 0.01 else ""  # two bare ones would be emphasis
    beyond = f" ({attacked['rule']})" if "rule" in attacked else ""  # older files do not say
    return f"{attacked['recovered']}{star}{beyond}"


def _each(by_seed: dict[int, Any], text: Callable[[Any], str], seeds: Sequence[int]) -> str:
    return ", ".join(text(by_seed[seed]) if seed in by_seed else MISSING for seed in seeds)


def _figure(group: list[Row], key: str, digits: int, seeds: Sequence[int] = ()) -> str:
    """The mean, or each of ``seeds``."""
    values = {row["seed"]: row[key] for row in group}
    if not seeds:
        return f"{mean(values.values()):.{digits}f}"
    return _each(values, lambda value: f"{value:.{digits}f}", seeds)


def _chance(group: list[Row]) -> str:
    return f"{mean(row['unaware']['expected_by_chance'] for row in group):.2f}"


def _head(cells: Sequence[str], left: Sequence[int] = (0,)) -> list[str]:
    return [_line(cells), _line(["---" if i in left else "---:" for i in range(len(cells))])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """The tables of every file, and a summary of all where they are several."""
    contents = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    if len(contents) > 1:
        print(f"# summary\n\n{summary_table(contents)}\n")
    for content in contents:
        # Processes that share a device wait for each other: their seconds say nothing of cost.
        alone = "shared_by" not in content
        print(f"# {content['data']}\n\n{defenses_table(content['table'], seconds=alone)}\n")
        print(f"## shift\n\n{shift_table(content['shift'] + content['table'])}\n")
        print(f"## length\n\n{length_table(content['length'])}\n")
        print("\n".join(f"not run: {skipped}" for skipped in content["skipped"]))


if __name__ == "__main__":
    main()
