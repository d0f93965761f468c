"""Tables of ``benchmarks.verdict``: how audits end, and what their grades are worth."""

from __future__ import annotations

from collections import Counter

from benchmarks.markdown import Figures, grid, once, read, table

CASES = {
    ("level", ()): "never saw the claimed digits, 1 to 12 tests, mean granted to half",
    ("wrong_set", ()): "trained on another set of the same population",
    ("stranger", ("random",)): "never trained",
    ("stranger", ("frozen", "zeros")): "first layer frozen, or trained on zeros",
    ("misread", ("labels",)): "labels shifted (the images are there)",
    ("misread", ("last layer", "pooling")): "last layer trained alone, or pooling read as stride 2",
    ("sound", ("leaks",)): "holds its 30 digits",
    ("sound", ("large n",)): "1000 digits to their margin, asked about 40",
    ("sound", ("one pass",)): "one pass over 1000 digits, start known",
    ("sound", ("private",)): "private, 1000 digits, epsilon 1, start known",
}
GRADES = ("near-copy", "resembles", "class-like")


@table
def verdicts() -> str:
    """Exit codes by kind of network, with the auditor's word and without."""
    found, rows = read("verdict")["rows"], []
    for (name, kinds), title in CASES.items():
        own = [row for row in found[name] if not kinds or row["kind"] in kinds]
        sound = name == "sound"
        for key in ("exit unvouched", "exit") if sound else ("exit",):
            codes = Counter(row[key] for row in own)
            vouched = ("yes" if key == "exit" else "no") if sound else ""
            rows.append([title, vouched, *(codes[code] for code in (0, 1, 3))])
    return grid("network | `--vouch` | exit 0 | exit 1 | exit 3", once(rows), left=2)


@table
def grades() -> str:
    """Candidates of known kind, and what an attack brings back; three kinds of data together."""
    kinds = {
        "near-copy": "the sample with noise (NCC about 0.9)",
        "resembles": "of 500 other images the nearest",
        "class-like": "mean of the class, of other images",
    }
    found = read("verdict")["rows"]
    every = [row for file in ("digits", "mnist", "cifar") for row in found[f"grades_{file}"]]
    rows = [[title, *_sums(every, "confusion", kind)] for kind, title in kinds.items()]
    chance = sum(row["expected"] for row in every)
    rows.append([f"brought back by the attack (chance {chance:.1f})", *_sums(every)])
    return grid("candidates | " + " | ".join(GRADES), rows)


def _sums(rows: list[Figures], *where: str) -> list[int]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row[where[0]][where[1]] if where else row["grades"])
    return [counts[grade] for grade in GRADES]
