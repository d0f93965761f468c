"""``residuum defend``: the same network with and without each defense, attacked in every way.

Examples:

residuum defend --list

residuum defend --data digits --n 100 --defenses shift-rewrite:5,noise:0.5 --out runs/d

residuum defend --data mine.npz --arch mlp:784-100-100-1 --value-range 0,1 --defenses dp:8 --out runs/m
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residuum.cli import options
from residuum.cli.options import option
from residuum.cli.output import print_json, print_line, print_table, trial_progress
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.defenses import Outcome


@dataclass(frozen=True)
class Settings:
    """Of training, attacks and scoring, as :func:`residuum.defend` takes them."""

    holdout: int | None = option("Held-out samples.")
    task: str = options.TASK
    steps: int = option("Training steps of margin maximisation.", 800, place="expert")
    gd_steps: int = option(
        "Steps of gradient descent, where a defense needs it.", 3000, place="expert"
    )
    lr: float = option("Rate of that gradient descent, momentum 0.9.", 0.5, place="expert")
    attack_steps: int = option("Steps of every attack.", 800)
    restarts: int = option("Restarts of every attack.", 2)
    releases: int = option(
        "Noisy releases that the adaptive attacker averages.", 16, place="expert"
    )


@dataclass(frozen=True)
class Judged:
    """How what comes back is judged, likewise."""

    subsets: int = option("Held-out sets of the permutation test.", 500, place="expert")
    uniqueness: bool = option("Certify what other sets keep of a sample.", True)
    seed: int = option("Seed of weights, attacks and secrets.", 0)
    device: str = options.DEVICE


def command(
    *,
    data: str | None = option(
        "A dataset by name, an .npz or a folder.", metavar="DATA", suggested=options.DATASETS
    ),
    defenses: str | None = option(
        "Defenses between commas; see --list.", metavar="NAME:STRENGTH,..."
    ),
    out: Path | None = option("Directory to write; defenses finished there are kept."),
    arch: str | None = option("Architecture (default: two hidden layers of 100).", metavar="ARCH"),
    chosen: options.Chosen,
    settings: Settings,
    value_range: str | None = option(
        "Pixel range granted to attackers, such as 0,1.", metavar="LOW,HIGH", place="granted"
    ),
    judged: Judged,
    listing: bool = option("List the defenses and stop.", False, "--list"),
    voice: options.Voice,
) -> None:
    """Try defenses on a network of your data: what comes back before, after, and at which price."""
    if listing:
        _list(voice.json)
        return
    if data is None or defenses is None or out is None:
        needed = {"--data": data, "--defenses": defenses, "--out": out}
        missing = ", ".join(name for name, value in needed.items() if value is None)
        raise InputError(
            f"residuum defend needs {missing}.",
            "Example: residuum defend --data digits --n 100 --defenses noise:0.5 --out runs/d.",
        )
    options.check_device(judged.device)
    from residuum.io.attacker_knowledge import parse_value_range
    from residuum.verbs.defending import defend

    with trial_progress(voice.spoken) as watch:
        outcomes = defend(
            data,
            [part.strip() for part in defenses.split(",") if part.strip()],
            out=out,
            arch=arch,
            **vars(chosen),
            **vars(settings),
            value_range=None if value_range is None else parse_value_range(value_range),
            **vars(judged),
            watch=watch,
        )
    voice.answer(json.loads((out / "result.json").read_text()), lambda: _show(outcomes, out))


def _show(outcomes: list[Outcome], out: Path) -> None:
    from residuum.report import defenses as report

    rows = report.rows(outcomes)
    for title, columns in (
        (f"recovered of {outcomes[0].n} samples, before and after", (0, 1, 2, 3, 4, 5)),
        ("what is left, and the price", (0, 6, 7, 8, 9, 10)),
    ):
        head = [report.HEAD[k] for k in columns]
        print_table(title, head, [[row[k] for k in columns] for row in rows])
    for text in report.notes(outcomes):
        print_line(text)
    print_line(report.LIMIT)
    print_line(f"report: {out / 'report.html'}")


def _list(as_json: bool) -> None:
    from residuum.defenses import DEFENSES

    rows = [
        {
            "name": name,
            "strength": defense.unit,
            "identity": f"{defense.off:g}",
            "changes": defense.changes,
            "secret": defense.secret,
            "adaptive": defense.adaptive,
            "available": defense.available,
            "install": defense.install,
        }
        for name, defense in DEFENSES.items()
    ]
    if as_json:
        print_json({"defenses": rows})
        return
    shown = ("name", "strength", "changes", "secret")
    table = [(*(str(row[k]) for k in shown), "yes" if row["available"] else "no") for row in rows]
    print_table("defenses", ("name", "strength", "changes", "stays with the owner", "here"), table)
    for row in rows:
        if not row["available"]:
            print_line(f"{row['name']} is unavailable here; install it with: {row['install']}")
