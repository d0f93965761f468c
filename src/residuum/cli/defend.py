"""``residuum defend``: the same network with and without each defense, attacked twice."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli import options
from residuum.cli.output import print_json, print_line, print_table, trial_progress

if TYPE_CHECKING:
    from residuum.defenses import Outcome

EXAMPLES = """Examples:

residuum defend --list

residuum defend --data digits --n 100 --defenses shift-rewrite:5,noise:0.5 --out runs/d

residuum defend --data mine.npz --arch mlp:784-100-100-1 --value-range 0,1 --defenses dp:8 --out runs/m
"""


def command(
    data: Annotated[
        str | None, typer.Option(help="digits, mnist, cifar10, an .npz or a folder.")
    ] = None,
    defenses: Annotated[
        str | None, typer.Option(help="NAME:STRENGTH between commas; see --list.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; defenses finished there are kept.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Architecture (default: two hidden layers of 100).")
    ] = None,
    n: options.Count = None,
    data_root: options.DataRoot = None,
    data_seed: options.DataSeed = None,
    holdout: Annotated[int | None, typer.Option(help="Held-out samples.")] = None,
    task: options.Task = "auto",
    steps: Annotated[int, typer.Option(help="Training steps of margin maximisation.")] = 800,
    gd_steps: Annotated[
        int, typer.Option(help="Steps of gradient descent, where a defense needs it.")
    ] = 3000,
    lr: Annotated[float, typer.Option(help="Rate of that gradient descent, momentum 0.9.")] = 0.5,
    attack_steps: Annotated[int, typer.Option(help="Steps of every attack.")] = 800,
    restarts: Annotated[int, typer.Option(help="Restarts of every attack.")] = 2,
    releases: Annotated[
        int, typer.Option(help="Noisy releases that the adaptive attacker averages.")
    ] = 16,
    value_range: Annotated[
        str | None, typer.Option(help="Pixel range granted to attackers, such as 0,1.")
    ] = None,
    subsets: Annotated[int, typer.Option(help="Held-out sets of the permutation test.")] = 500,
    uniqueness: Annotated[
        bool, typer.Option(help="Certify what equal pairs keep of a sample.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, attacks and secrets.")] = 0,
    device: options.Device = "cpu",
    listing: Annotated[bool, typer.Option("--list", help="List the defenses and stop.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Try defenses on a network of your data: what comes back before, after, and at which price."""
    if listing:
        _list(json)
        return
    data, defenses, out = _require(data, defenses, out)
    options.check_device(device)
    from residuum.verbs.defending import defend

    with trial_progress(not (json or quiet)) as watch:
        outcomes = defend(
            data, [part.strip() for part in defenses.split(",") if part.strip()], out=out,
            arch=arch, n=n, data_root=data_root, data_seed=data_seed, holdout=holdout, task=task,
            steps=steps, gd_steps=gd_steps, lr=lr, attack_steps=attack_steps, restarts=restarts,
            releases=releases, value_range=_range(value_range), subsets=subsets,
            uniqueness=uniqueness, seed=seed, device=device, watch=watch,
        )  # fmt: skip
    if json:
        print_json(json_module.loads((out / "result.json").read_text()))
    elif not quiet:
        _show(outcomes, out)


def _require(data: str | None, defenses: str | None, out: Path | None) -> tuple[str, str, Path]:
    from residuum.errors import InputError

    if data is None or defenses is None or out is None:
        missing = [option for option, value in (("--data", data), ("--defenses", defenses),
                                                ("--out", out)) if value is None]  # fmt: skip
        raise InputError(
            f"residuum defend needs {', '.join(missing)}.",
            "Example: residuum defend --data digits --n 100 --defenses noise:0.5 --out runs/d.",
        )
    return data, defenses, out


def _range(text: str | None) -> tuple[float, float] | None:
    from residuum.errors import InputError

    if text is None:
        return None
    found = options.numbers(text, "--value-range", "0,1")
    if len(found) != 2:
        raise InputError(f"A value range has two ends; got {text!r}.", "Say --value-range 0,1.")
    return found[0], found[1]


def _show(outcomes: list[Outcome], out: Path) -> None:
    from residuum.report import defenses as report

    rows = report.rows(outcomes)
    for title, columns in (
        (f"recovered of {outcomes[0].n} samples, before and after", (0, 1, 2, 3, 4)),
        ("what is left, and the price", (0, 5, 6, 7, 8, 9)),
    ):
        head = [report.HEAD[k] for k in columns]
        print_table(title, head, [[row[k] for k in columns] for row in rows])
    for text in report.notes(outcomes):
        print_line(text)
    print_line(report.LIMIT)
    print_line(f"report: {out / 'report.html'}")


def _list(json: bool) -> None:
    from residuum.defenses import DEFENSES

    rows = [
        {
            "name": name, "strength": defense.unit, "identity": f"{defense.off:g}",
            "changes": defense.changes, "secret": defense.secret, "adaptive": defense.adaptive,
            "available": defense.available, "install": defense.install,
        }
        for name, defense in DEFENSES.items()
    ]  # fmt: skip
    if json:
        print_json({"defenses": rows})
        return
    table = [
        (str(row["name"]), str(row["strength"]), str(row["changes"]), str(row["secret"]),
         "yes" if row["available"] else "no")
        for row in rows
    ]  # fmt: skip
    print_table("defenses", ("name", "strength", "changes", "stays with the owner", "here"), table)
    for row in rows:
        if not row["available"]:
            print_line(f"{row['name']} is unavailable here; install it with: {row['install']}")
