"""Tables of ``docs/field.md``: every attack on the same networks, and what each attacker knew.

A table is a function of what ``python -m experiments.field run`` wrote. The committed page has the tables of
field-h200.json. ``python -m experiments.field page OUT PAGE`` writes a page for another run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from experiments.field_rows import POOLED, ROWS, arm_of, frozen
from experiments.pages.tables import TABLES, Figures, grid, means, once, read, short
from residuum.records.rundir import digest

FILE = "field-h200"
COUNTS = ("0.7", "0.8", "0.9")
PAGE = Path(__file__).parents[2] / "docs" / "field.md"
FIELD_TABLES: dict[str, Callable[[Figures], str]] = {}


def field_table(make: Callable[[Figures], str]) -> Callable[[Figures], str]:
    """Register a table of any run, and for the committed page that of the committed run."""
    name = make.__name__.replace("_", "-")
    FIELD_TABLES[name], TABLES[name] = make, lambda: make(read(FILE))
    return make


def entries_of(done: Figures, name: str) -> dict[str, list[Figures]]:
    """Return the results of every attack on a row, victim by victim. A refused attack has none."""
    victims = [entry["arms"] for key, entry in done["victims"].items() if key.split("/")[0] == name]
    names = dict.fromkeys(arm for arms in victims for arm in arms)
    return {arm: [arms[arm] for arms in victims if "0.8" in arms.get(arm, {})] for arm in names}


@field_table
def field(done: Figures) -> str:
    """List the means of victims for every attack, with counts of held-out samples, and the best baseline."""
    rows, weaker = [], below(done)
    for name in ROWS:
        attacks = {arm: entries for arm, entries in entries_of(done, name).items() if entries}
        for arm, entries in without_weak_baselines(attacks).items():
            figures, attack = means(entries), arm_of(arm)
            title = attack.title if attack.whose != "residuum" else f"**{attack.title}**"
            if all(entry.get("status") == ["diverged"] for entry in entries):
                title += ", diverged"
            rows.append(
                [
                    f"{ROWS[name].title}{victims(len(entries))}{BELOW if name in weaker else ''}",
                    title + (f" ({attack.grants})" if attack.grants else ""),
                    counts(figures, *COUNTS),
                    counts(figures, "ssim3") if "ssim3" in figures else "",
                    right(entries),
                    f"{figures['seconds']:.0f}",
                ]
            )
    head = "victims | attack (granted more) | NCC > 0.7/0.8/0.9 (held out)"
    return grid(
        f"{head} | ssim3 > 0.4 (held out) | own choice right | seconds", once(rows), text_columns=2
    )


def counts(figures: dict[str, float], *keys: str) -> str:
    """Return the counts of the training set, with those of as many held-out samples in brackets."""
    trained, held_out = (
        "/".join(short(figures[f"{key}{tag}"]) for key in keys) for tag in ("", " held out")
    )
    return f"{trained} ({held_out})"


def without_weak_baselines(attacks: dict[str, list[Figures]]) -> dict[str, list[Figures]]:
    """Return the attacks on a row, with the best baseline only."""
    baselines = [arm for arm in attacks if arm_of(arm).whose == "baseline"]
    best = max(baselines, key=lambda arm: beyond(means(attacks[arm])), default="")
    return {arm: entries for arm, entries in attacks.items() if arm not in baselines or arm == best}


BELOW = "; **below published settings**"


@field_table
def field_verdict(done: Figures) -> str:
    """Say on how many rows residuum recovers fewer samples than published settings, and on which."""
    compared = [name for name in ROWS if rivals(done, name)]
    weaker = below(done)
    if not compared:
        return "Published settings were not run."
    text = f"Published settings were run on {len(compared)} kinds of victims."
    text += f" On {len(compared) - len(weaker)} of them "
    text += "residuum finds at least as many images above 0.8 (less those held out), within chance."
    for name, (ours, best) in weaker.items():
        title = ROWS[name].title
        text += f" **On {title} it finds fewer: {short(ours)} against {short(best)}.**"
    return text


@field_table
def field_granted(done: Figures) -> str:
    """List what each attacker knew besides the weights, and how long the attack searched."""
    rows = []
    for arm in dict.fromkeys(arm for entry in done["victims"].values() for arm in entry["arms"]):
        settings = [arms[arm] for arms in done["settings"].values() if arm in arms]
        if arm in POOLED or not settings:
            continue
        attack = arm_of(arm)
        sizes = [
            span([values[key] for values in settings if key in values])
            for key in ("restarts", "candidates", "steps")
        ]
        sizes = ["", "", ""] if attack.attack in NO_STEPS else sizes
        rows.append([attack.title, attack.whose, KNOWLEDGE[attack.grants], f"`{arm}`", *sizes])
    head = "attack | whose | granted beside the weights | name"
    return grid(f"{head} | restarts | candidates each | steps", rows, text_columns=4)


NO_STEPS = ("unmix", "unmix-moment", "first-layer-weights", "corners", "trunk-moment")
KNOWLEDGE = {"": "", "start": "first weights", "moment": "optimizer state"}


def span(values: list[int]) -> str:
    """Return the range of values, "" if there are none."""
    return "-".join(map(str, sorted({min(values), max(values)}))) if values else ""


@field_table
def field_provenance(done: Figures) -> str:
    """List the machines and versions of the table, and what ran with other settings than the current ones."""
    sums, rows = done["sha256"], []
    for environment in done["environments"]:
        packages = environment["packages"]
        versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "scikit-learn"))
        machine = f"{environment['device']}, {environment['cpus']} cores"
        rows.append(["machine", f"{machine}; {versions}"])
    rows += [["sha256 of the package", f"`{sha256}`"] for sha256 in sums["package"]]
    rows += [["plug-in", f"`{plugin}`"] for plugin in done["plugins"]]
    rows.append(["sha256 of all settings", f"`{digest(sums['settings'])}`"])
    changed = [
        f"{arm} on {name}"
        for name, arms in sums["settings"].items()
        for arm, ran in arms.items()
        if ran != [frozen(ROWS[name], arm)]
    ]
    if changed:
        rows.append(["run with other settings than today's", ", ".join(changed)])
    digests = [entry["victim"]["sha256"] for entry in done["victims"].values()]
    rows.append([f"sha256 of the {len(digests)} victims", f"`{digest(digests)}`"])
    return grid("what | value", rows, text_columns=2)


def page(done: Figures, text: str) -> str:
    """Return the text of the page with the tables of another run."""
    title, _, body = text.partition("\n")
    text = f"{title}\n\n*Tables are of another run; the text is about that of residuum's own page.*\n{body}"
    for name, make in FIELD_TABLES.items():
        before, mark, after = text.partition(f"<!-- table: {name} -->\n")
        if mark:
            text = f"{before}{mark}\n{make(done)}\n\n{after[after.index('<!-- /table -->') :]}"
    return text


def victims(count: int) -> str:
    """Return the number of victims as text, "" for three."""
    return {1: "; **one victim**", 3: ""}.get(count, f"; {count} victims")


def right(entries: list[Figures]) -> str:
    """Return the share of right candidates among those selected without the data, and their number."""
    selected = sum(entry["chosen"] for entry in entries)
    if not selected:
        return ""
    share = sum(entry.get("right", 0) for entry in entries) / selected
    return f"{share:.0%} of {short(selected / len(entries))}"


def below(done: Figures) -> dict[str, tuple[float, float]]:
    """Return the rows on which published settings recover more than all attacks of residuum, beyond chance.

    Samples above NCC 0.8 are counted, less the held-out ones. The chance level is the square root of the sum
    of both counts of held-out samples, about two standard errors of the mean of three victims, and at least
    one.

    Args:
        done: Results of a run.

    Returns:
        Our count and the published count by row.
    """
    weaker = {}
    for name in ROWS:
        if not (pair := rivals(done, name)):
            continue
        ours, best = pair
        chance = max(1.0, (ours["0.8 held out"] + best["0.8 held out"]) ** 0.5)
        if beyond(best) - beyond(ours) > chance:
            weaker[name] = beyond(ours), beyond(best)
    return weaker


def rivals(done: Figures, name: str) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the means of all attacks of residuum and of the best published settings, if both ran."""
    arms = {arm: means(entries) for arm, entries in entries_of(done, name).items() if entries}
    published = [figures for arm, figures in arms.items() if arm_of(arm).whose == "published"]
    if "together" not in arms or not published:
        return None
    return arms["together"], max(published, key=beyond)


def beyond(figures: dict[str, float]) -> float:
    """Return the number of samples above 0.8, less that of held-out samples."""
    return figures["0.8"] - figures["0.8 held out"]
