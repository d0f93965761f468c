"""Tables of the field: every attack on the same victims, what each was granted, where residuum finds less."""

from __future__ import annotations

from benchmarks.field_rows import ROWS, arm_of
from benchmarks.markdown import Figures, grid, means, once, short, with_chance

COUNTS = ("0.7", "0.8", "0.9")


def entries_of(done: Figures, name: str) -> dict[str, list[Figures]]:
    """What every attack on a row found, victim by victim; attacks that were refused have none."""
    arms = [entry["arms"] for key, entry in done["victims"].items() if key.split("/")[0] == name]
    names = dict.fromkeys(arm for one in arms for arm in one)
    return {arm: [one[arm] for one in arms if "0.8" in one.get(arm, {})] for arm in names}


def rows_of(done: Figures) -> str:
    """Means of victims, attack by attack, each count with that of held-out samples."""
    rows = []
    for name in ROWS:
        for arm, found in entries_of(done, name).items():
            if not found:
                continue
            one, own = means(found), arm_of(arm)
            title = own.title if own.whose != "residuum" else f"**{own.title}**"
            rows.append(
                [
                    f"{ROWS[name].title}{victims(len(found))}",
                    title + (f" ({own.grants})" if own.grants else ""),
                    with_chance(one, *COUNTS),
                    with_chance(one, "ssim3") if "ssim3" in one else "",
                    right(found),
                    f"{one['seconds']:.0f}",
                ]
            )
    head = "victims | attack (granted more) | NCC > 0.7 / 0.8 / 0.9 (held out)"
    return grid(f"{head} | ssim3 > 0.4 (held out) | own choice right | seconds", once(rows), left=2)


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

    Of samples above 0.8, less those held out; chance: the larger count of held-out samples, at least one.
    """
    found = {}
    for name in ROWS:
        arms = {arm: means(one) for arm, one in entries_of(done, name).items() if one}
        theirs = [one for arm, one in arms.items() if arm_of(arm).whose == "published"]
        if "together" not in arms or not theirs:
            continue
        mine = arms["together"]
        best = max(theirs, key=beyond)
        chance = max(1.0, mine["0.8 held out"], best["0.8 held out"])
        if beyond(best) - beyond(mine) > chance:
            found[name] = beyond(mine), beyond(best)
    return found


def beyond(one: dict[str, float]) -> float:
    """Samples above 0.8, less as many as are held out."""
    return one["0.8"] - one["0.8 held out"]
