"""Tables of the field: every attack on the same victims, what each was granted, where residuum finds less.

Each is a function of what ``python -m benchmarks field run`` wrote; the committed page has that of
field-h200.json, and ``python -m benchmarks field page OUT PAGE`` makes one of any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.field_rows import POOLED, ROWS, arm_of, frozen
from benchmarks.markdown import TABLES, Figures, grid, means, once, read, short
from residuum.records.rundir import digest

FILE = "field-h200"
COUNTS = ("0.7", "0.8", "0.9")
PAGE = Path(__file__).parents[1] / "docs" / "field.md"
OF_FIELD: dict[str, Callable[[Figures], str]] = {}


def of_field(make: Callable[[Figures], str]) -> Callable[[Figures], str]:
    """Enter a table of the field, for any run and for the committed one."""
    name = make.__name__.replace("_", "-")
    OF_FIELD[name], TABLES[name] = make, lambda: make(read(FILE))
    return make


def entries_of(done: Figures, name: str) -> dict[str, list[Figures]]:
    """What every attack on a row found, victim by victim; attacks that were refused have none."""
    arms = [entry["arms"] for key, entry in done["victims"].items() if key.split("/")[0] == name]
    names = dict.fromkeys(arm for one in arms for arm in one)
    return {arm: [one[arm] for one in arms if "0.8" in one.get(arm, {})] for arm in names}


@of_field
def field(done: Figures) -> str:
    """Means of victims, attack by attack, counts with those of held-out samples; of baselines the best."""
    rows, less = [], below(done)
    for name in ROWS:
        every = {arm: found for arm, found in entries_of(done, name).items() if found}
        for arm, found in without_the_weaker(every).items():
            one, own = means(found), arm_of(arm)
            title = own.title if own.whose != "residuum" else f"**{own.title}**"
            if all(each.get("status") == ["diverged"] for each in found):
                title += ", diverged"
            rows.append(
                [
                    f"{ROWS[name].title}{victims(len(found))}{BELOW if name in less else ''}",
                    title + (f" ({own.grants})" if own.grants else ""),
                    counts(one, *COUNTS),
                    counts(one, "ssim3") if "ssim3" in one else "",
                    right(found),
                    f"{one['seconds']:.0f}",
                ]
            )
    head = "victims | attack (granted more) | NCC > 0.7/0.8/0.9 (held out)"
    return grid(f"{head} | ssim3 > 0.4 (held out) | own choice right | seconds", once(rows), left=2)


def counts(one: dict[str, float], *keys: str) -> str:
    """Of the training set, and in brackets of as many held-out samples."""
    mine, others = (
        "/".join(short(one[f"{key}{tag}"]) for key in keys) for tag in ("", " held out")
    )
    return f"{mine} ({others})"


def without_the_weaker(found: dict[str, list[Figures]]) -> dict[str, list[Figures]]:
    """Attacks on a row, with the best baseline alone."""
    weak = [arm for arm in found if arm_of(arm).whose == "baseline"]
    best = max(weak, key=lambda arm: beyond(means(found[arm])), default="")
    return {arm: one for arm, one in found.items() if arm not in weak or arm == best}


BELOW = "; **below published settings**"


@of_field
def field_verdict(done: Figures) -> str:
    """On how many rows residuum finds fewer than published settings, and on which."""
    both = [name for name in ROWS if rivals(done, name)]
    less = below(done)
    if not both:
        return "Published settings were not run."
    said = f"Published settings were run on {len(both)} kinds of victims. On {len(both) - len(less)} of them "
    said += "residuum finds at least as many images above 0.8 (less those held out), within chance."
    for name, (mine, best) in less.items():
        title = ROWS[name].title
        said += f" **On {title} it finds fewer: {short(mine)} against {short(best)}.**"
    return said


@of_field
def field_granted(done: Figures) -> str:
    """What each attack was told beyond the weights, and how hard it searched."""
    rows = []
    for arm in dict.fromkeys(arm for entry in done["victims"].values() for arm in entry["arms"]):
        told = [one[arm] for one in done["settings"].values() if arm in one]
        if arm in POOLED or not told:
            continue
        own = arm_of(arm)
        sizes = [
            span([one[k] for one in told if k in one]) for k in ("restarts", "candidates", "steps")
        ]
        sizes = ["", "", ""] if own.attack in NO_STEPS else sizes
        rows.append([own.title, own.whose, GRANTED[own.grants], f"`{arm}`", *sizes])
    head = "attack | whose | granted beside the weights | name"
    return grid(f"{head} | restarts | candidates each | steps", rows, left=4)


NO_STEPS = ("unmix", "unmix-moment", "first-layer-weights", "corners", "trunk-moment")
GRANTED = {"": "", "start": "first weights", "moment": "optimizer state"}


def span(values: list[int]) -> str:
    """From the least to the largest; nothing of an attack that says nothing of it."""
    return "-".join(map(str, sorted({min(values), max(values)}))) if values else ""


@of_field
def field_provenance(done: Figures) -> str:
    """Where and with what the table was made, and what was not run as it would be today."""
    sums, rows = done["sha256"], []
    for where in done["environments"]:
        told = ", ".join(f"{name} {where['packages'][name]}" for name in ("torch", "scikit-learn"))
        rows.append(["machine", f"{where['device']}, {where['cpus']} cores; {told}"])
    rows += [["sha256 of the package", f"`{one}`"] for one in sums["package"]]
    rows += [["plug-in", f"`{one}`"] for one in done["plugins"]]
    rows.append(["sha256 of all settings", f"`{digest(sums['settings'])}`"])
    others = [
        f"{arm} on {name}"
        for name, arms in sums["settings"].items()
        for arm, ran in arms.items()
        if ran != [frozen(ROWS[name], arm)]
    ]
    if others:
        rows.append(["run with other settings than today's", ", ".join(others)])
    every = [entry["victim"]["sha256"] for entry in done["victims"].values()]
    rows.append([f"sha256 of the {len(every)} victims", f"`{digest(every)}`"])
    return grid("what | value", rows, left=2)


def page(done: Figures, text: str) -> str:
    """The text of the field's page with its tables from another run."""
    title, _, rest = text.partition("\n")
    text = f"{title}\n\n*Tables are of another run; the text is about that of residuum's own page.*\n{rest}"
    for name, make in OF_FIELD.items():
        head, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        if mark:
            text = f"{head}{mark}\n{make(done)}\n\n{rest[rest.index('<!-- /table -->') :]}"
    return text


def victims(count: int) -> str:
    """How many there were, where it is not three."""
    return {1: "; **one victim**", 3: ""}.get(count, f"; {count} victims")


def right(found: list[Figures]) -> str:
    """What share of the candidates that an attack chose without the data is true, of how many."""
    chosen = sum(one["chosen"] for one in found)
    if not chosen:
        return ""
    share = sum(one.get("right", 0) for one in found) / chosen
    return f"{share:.0%} of {short(chosen / len(found))}"


def below(done: Figures) -> dict[str, tuple[float, float]]:
    """Rows on which all attacks of residuum find fewer than published settings, by more than chance.

    Of samples above 0.8, less those held out; chance: the root of both counts of held-out samples, about two
    standard errors of the mean of three victims, and at least one.
    """
    found = {}
    for name in ROWS:
        if not (pair := rivals(done, name)):
            continue
        mine, best = pair
        chance = max(1.0, (mine["0.8 held out"] + best["0.8 held out"]) ** 0.5)
        if beyond(best) - beyond(mine) > chance:
            found[name] = beyond(mine), beyond(best)
    return found


def rivals(done: Figures, name: str) -> tuple[dict[str, float], dict[str, float]] | None:
    """Means of all of residuum's attacks together and of the best published settings, where both ran."""
    arms = {arm: means(one) for arm, one in entries_of(done, name).items() if one}
    theirs = [one for arm, one in arms.items() if arm_of(arm).whose == "published"]
    return (arms["together"], max(theirs, key=beyond)) if "together" in arms and theirs else None


def beyond(one: dict[str, float]) -> float:
    """Samples above 0.8, less as many as are held out."""
    return one["0.8"] - one["0.8 held out"]
