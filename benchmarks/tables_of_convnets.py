"""Tables of ``benchmarks.convnets`` and ``benchmarks.tables``: what comes back, beside chance and a floor."""

from __future__ import annotations

from itertools import product
from statistics import mean

from benchmarks.markdown import Figures, each, grid, once, read, short, table

NETWORKS = {
    "cnn": "conv - pool - conv - pool - dense",
    "resnet": "ResNet of three blocks",
    "resnet-folded": "its norms folded",
    "vit": "small ViT",
}
GRANTED = {
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
    found = read("convnets-cpu")["victims"].items()
    wanted = f"{network}-{data}-{n}", attack
    return [v for key, v in found if (key.split("/")[0], key.split("/")[2]) == wanted]


def _rows(network: str, attack: str) -> list[list[Figures]]:
    return [_victims(network, data, n, attack) for data, n in COLUMNS]


def _beyond(victims: list[Figures]) -> int:
    return sum(v["p"] <= LEVEL for v in victims)


@table
def convnets() -> str:
    """Recovered samples with those by chance; a plus for each victim with more than chance at 1%."""
    rows = []
    for (network, title), (attack, granted) in product(NETWORKS.items(), GRANTED.items()):
        cells = _rows(network, attack)
        if any(cells):
            rows.append(
                [
                    title,
                    f"`{attack}`",
                    granted,
                    *(
                        f"{short(mean(v['recovered'] for v in own))} "
                        f"({short(mean(v['expected'] for v in own))}){_beyond(own) * '+'}"
                        for own in cells
                    ),
                ]
            )
    return grid(f"network | attack | granted | {HEAD}", once(rows), left=3)


@table
def trunks() -> str:
    """How alike the images of the pooling network are, with as many held-out ones."""
    rows = [
        [
            f"`{attack}`",
            level,
            *(
                f"{short(mean(v[level] for v in own))} ({short(mean(v[f'{level} held out'] for v in own))})"
                for own in _rows("cnn", attack)
            ),
        ]
        for attack in ("trunk-moment", "trunk", "invert-moment", "invert")
        for level in ("0.7", "0.9")
    ]
    return grid(f"attack | NCC above | {HEAD}", once(rows), left=2)


@table
def floor() -> str:
    """``invert`` beside the published floor: sums over all rows of a network, and where it is behind."""
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
                GRANTED[f"invert{ending}"],
                *(f"{found} ({some})" for found, some in zip(sums, sure, strict=True)),
                short(chance),
                f"{sum(lead > 0 for lead in behind)} of {len(behind)}",
                short(max(0.0, *behind)),
            ]
        )
    head = "network | granted | `invert` | `geiping2020` | chance | rows behind | by at most"
    return grid(head, once(rows), left=2)


@table
def rows_of_tables() -> str:
    """Rows of tables within the tolerance in every column: the last claim, earlier ones that found any."""
    groups: dict[str, dict[str, dict[str, list[Figures]]]] = {}
    for claim in ("first", "second", "third", "later"):
        file = "tables-cpu" if claim == "third" else f"tables-cpu-{claim}"
        for key, found in read(file)["victims"].items():
            name, _, attack = key.split("/")
            if name.startswith("heads"):
                continue
            claims = groups.setdefault(name, {}).setdefault(attack, {})
            claims.setdefault(claim, []).append(found)
    rows = []
    for name, attacks in groups.items():
        data, columns, n = name.rsplit("-", 2)
        for attack, claims in attacks.items():
            for claim, found in claims.items():
                ran = [one for one in found if "recovered" in one]
                counts = ["refused", "", ""]
                if ran:
                    hits, others = (
                        mean(one[key] for one in ran) for key in ("recovered", "others")
                    )
                    few = short(mean(one["candidates"] for one in ran), 0)
                    counts = [f"{short(hits)} ({short(others, 2)})", each(ran, "recovered"), few]
                if claim == [*claims][-1] or any(one["recovered"] for one in ran):
                    title = f"{data}, {columns} columns, {n} rows"
                    rows.append([title, f"`{attack}`", claim, *counts])
    head = "data | attack | claim | mean (others) | each | candidates"
    return grid(head, once(rows), left=3)


@table
def heads() -> str:
    """Embeddings behind a frozen encoder: how alike they are, and which records of a pool they name."""
    rows = []
    for attack in ("unmix", "binary-kkt"):
        own = [
            found
            for key, found in read("tables-cpu-later")["victims"].items()
            if key.startswith("heads") and key.endswith(f"/{attack}")
        ]
        alike = [
            f"{short(mean(v[level] for v in own))} ({short(mean(v[f'{level} held out'] for v in own))})"
            for level in ("0.7", "0.8", "0.9")
        ]
        wrongly = " ".join(str(v["named"] - v["named rightly"]) for v in own)
        recovered = f"{short(mean(v['recovered'] for v in own))} ({short(mean(v['expected'] for v in own))})"
        cells = [f"{recovered}{_beyond(own) * '+'}", each(own, "recovered"), *alike]
        rows.append([f"`{attack}`", *cells, each(own, "named rightly"), wrongly])
    head = "attack | recovered (chance) | each | NCC 0.7 (held out) | 0.8 | 0.9 | named rightly | wrongly"
    return grid(head, rows, left=1)
