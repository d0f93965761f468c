"""Tables of ``docs/convnets.md``: counts of ``experiments.convnets`` and ``experiments.tabular``."""

from __future__ import annotations

from itertools import product
from statistics import mean

from experiments.pages.tables import Figures, grid, join_figures, once, read, short, table

NETWORKS = {
    "cnn": "conv - pool - conv - pool - dense",
    "resnet": "ResNet of three blocks",
    "resnet-folded": "its norms folded",
    "vit": "small ViT",
}
KNOWN = {
    "trunk-moment": "optimizer state",
    "trunk": "known start",
    "invert-moment": "optimizer state",
    "geiping2020-moment": "optimizer state",
    "invert": "known start",
    "geiping2020": "known start",
    "unmix-moment": "optimizer state, patches",
    "unmix": "known start, patches",
    "multiclass-kkt": "weights alone",
}
COLUMNS = tuple(product(("cifar10", "mnist"), (10, 20, 50)))
HEAD = "CIFAR 10 | 20 | 50 | MNIST 10 | 20 | 50"
LEVEL = 0.01


def _victims(network: str, data: str, n: int, attack: str) -> list[Figures]:
    victims = read("convnets-cpu")["victims"].items()
    row = f"{network}-{data}-{n}", attack
    return [v for key, v in victims if (key.split("/")[0], key.split("/")[2]) == row]


def _rows(network: str, attack: str) -> list[list[Figures]]:
    return [_victims(network, data, n, attack) for data, n in COLUMNS]


def _beyond(victims: list[Figures]) -> int:
    return sum(v["p"] <= LEVEL for v in victims)


def _means(victims: list[Figures], key: str, chance: str) -> str:
    """Return the mean of a count, and in brackets the mean of its count by chance."""
    return f"{short(mean(v[key] for v in victims))} ({short(mean(v[chance] for v in victims))})"


@table
def convnets() -> str:
    """Count recovered samples and those by chance. A plus marks a network beyond chance at 1%."""
    rows = []
    for (network, title), (attack, knowledge) in product(NETWORKS.items(), KNOWN.items()):
        cells = _rows(network, attack)
        if any(cells):
            rows.append(
                [
                    title,
                    f"`{attack}`",
                    knowledge,
                    *(
                        _means(victims, "recovered", "expected") + _beyond(victims) * "+"
                        for victims in cells
                    ),
                ]
            )
    return grid(f"network | attack | granted | {HEAD}", once(rows), text_columns=3)


@table
def trunks() -> str:
    """Count images of the pooling network above two levels of NCC, and as many held-out images."""
    rows = [
        [
            f"`{attack}`",
            level,
            *(_means(victims, level, f"{level} held out") for victims in _rows("cnn", attack)),
        ]
        for attack in ("trunk-moment", "trunk", "invert-moment", "invert")
        for level in ("0.7", "0.9")
    ]
    return grid(f"attack | NCC above | {HEAD}", once(rows), text_columns=2)


@table
def floor() -> str:
    """Compare ``invert`` with the published baseline: sums over all rows of a network, and rows behind."""
    rows = []
    for network, ending in product(("cnn", "resnet", "vit"), ("", "-moment")):
        pairs = [
            (ours, theirs)
            for ours, theirs in zip(
                _rows(network, f"invert{ending}"),
                _rows(network, f"geiping2020{ending}"),
                strict=True,
            )
            if ours and theirs
        ]
        sums = [
            sum(v["recovered"] for row in side for v in row) for side in zip(*pairs, strict=True)
        ]
        sure = [sum(map(_beyond, side)) for side in zip(*pairs, strict=True)]
        chance = sum(v["expected"] for ours, _ in pairs for v in ours)
        behind = [
            mean(v["recovered"] for v in theirs) - mean(v["recovered"] for v in ours)
            for ours, theirs in pairs
        ]
        rows.append(
            [
                NETWORKS[network],
                KNOWN[f"invert{ending}"],
                *(
                    f"{total} ({significant})"
                    for total, significant in zip(sums, sure, strict=True)
                ),
                short(chance),
                f"{sum(lead > 0 for lead in behind)} of {len(behind)}",
                short(max(0.0, *behind)),
            ]
        )
    head = "network | granted | `invert` | `geiping2020` | chance | rows behind | by at most"
    return grid(head, once(rows), text_columns=2)


@table
def rows_of_tables() -> str:
    """Count rows of tables within the tolerance in every column, for the last claim and those with counts."""
    groups: dict[str, dict[str, dict[str, list[Figures]]]] = {}
    for claim in ("first", "second", "third", "later"):
        file = "tabular-cpu" if claim == "third" else f"tabular-cpu-{claim}"
        for key, victims in read(file)["victims"].items():
            name, _, attack = key.split("/")
            if name.startswith("heads"):
                continue
            claims = groups.setdefault(name, {}).setdefault(attack, {})
            claims.setdefault(claim, []).append(victims)
    rows = []
    for name, attacks in groups.items():
        data, columns, n = name.rsplit("-", 2)
        for attack, claims in attacks.items():
            for claim, victims in claims.items():
                ran = [victim for victim in victims if "recovered" in victim]
                counts = ["refused", "", ""]
                if ran:
                    hits, by_chance = (
                        mean(victim[key] for victim in ran) for key in ("recovered", "others")
                    )
                    few = short(mean(victim["candidates"] for victim in ran), 0)
                    counts = [
                        f"{short(hits)} ({short(by_chance, 2)})",
                        join_figures(ran, "recovered"),
                        few,
                    ]
                if claim == [*claims][-1] or any(victim["recovered"] for victim in ran):
                    title = f"{data}, {columns} columns, {n} rows"
                    rows.append([title, f"`{attack}`", claim, *counts])
    head = "data | attack | claim | mean (others) | each | candidates"
    return grid(head, once(rows), text_columns=3)


@table
def heads() -> str:
    """Count embeddings behind a frozen encoder above levels of NCC, and records that they name."""
    rows = []
    for attack in ("unmix", "binary-kkt"):
        victims = [
            victim
            for key, victim in read("tabular-cpu-later")["victims"].items()
            if key.startswith("heads") and key.endswith(f"/{attack}")
        ]
        similar = [_means(victims, level, f"{level} held out") for level in ("0.7", "0.8", "0.9")]
        wrongly = " ".join(str(v["named"] - v["named rightly"]) for v in victims)
        cells = [
            _means(victims, "recovered", "expected") + _beyond(victims) * "+",
            join_figures(victims, "recovered"),
            *similar,
        ]
        rows.append([f"`{attack}`", *cells, join_figures(victims, "named rightly"), wrongly])
    head = "attack | recovered (chance) | each | NCC 0.7 (held out) | 0.8 | 0.9 | named rightly | wrongly"
    return grid(head, rows, text_columns=1)
