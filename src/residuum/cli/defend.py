"""``residuum defend``: the same network with and without each defense, attacked twice."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residuum.cli import options
from residuum.cli.output import print_json, print_line, print_table, trial_progress

if TYPE_CHECKING:
    from residuum.cli.defended import Trial
    from residuum.defenses import Outcome, Setting
    from residuum.records import Split

EXAMPLES = """Examples:

residuum defend --list

residuum defend --data digits --n 100 --defenses shift-rewrite:5,noise:0.5 --out runs/d

residuum defend --data mine.npz --arch mlp:784-100-100-1 --value-range 0,1 --defenses dp:8 --out runs/m
"""
IMAGES = ("digits", "mnist", "cifar10")  # pixels between 0 and 1, as anybody may know


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
    given = _require(data, defenses, out)
    trials = _parse(given[1])
    options.check_device(device)
    from residuum.cli.defended import try_all
    from residuum.defenses import Training
    from residuum.training import TrainingConfig

    config = TrainingConfig(steps=steps, seed=seed)
    descent = TrainingConfig(method="gd", steps=gd_steps, lr=lr, momentum=0.9, seed=seed)
    split, name, task = _load(given[0], arch, n, data_root, data_seed, holdout, task)
    setting = _setting(
        split, name, task, Training(config, descent, len(split.train)), value_range=_range(
            value_range, given[0]), steps=attack_steps, restarts=restarts, seed=seed, device=device,
        subsets=subsets, releases=releases, certify=uniqueness,
    )  # fmt: skip
    with trial_progress(not (json or quiet)) as watch:
        outcomes = try_all(given[2], setting, trials, watch)
    if json:
        print_json(json_module.loads((given[2] / "result.json").read_text()))
    elif not quiet:
        _show(outcomes, given[2])


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


def _parse(text: str) -> list[Trial]:
    """The undefended network first, then every defense once."""
    from residuum.defenses import find
    from residuum.errors import InputError

    trials: list[Trial] = [("none", None, None)]
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = find(part)
        if found in trials:
            raise InputError(f"{part!r} is named twice.", "Name every defense and strength once.")
        trials.append(found)
    if len(trials) == 1:
        raise InputError("--defenses names no defense.", "Example: --defenses noise:0.5,sgd:10.")
    return trials


def _load(
    data: str, arch: str | None, n: int | None, root: Path | None, data_seed: int | None,
    holdout: int | None, task: str,
) -> tuple[Split, str, str]:  # fmt: skip
    from residuum.datasets import load_dataset
    from residuum.networks import Architecture
    from residuum.theory.rows import choose_task

    outputs = Architecture.parse(arch).outputs if arch else 1
    task = choose_task(task, outputs)
    split = load_dataset(data, n, seed=data_seed, root=root, task=task, holdout=holdout)
    name = arch or f"mlp:{split.train.x[0].numel()}-100-100-1"
    return split, str(Architecture.parse(name)), task


def _range(text: str | None, data: str) -> tuple[float, float] | None:
    from residuum.errors import InputError

    if text is None:
        return (0.0, 1.0) if data in IMAGES else None
    found = options.numbers(text, "--value-range", "0,1")
    if len(found) != 2:
        raise InputError(f"A value range has two ends; got {text!r}.", "Say --value-range 0,1.")
    return found[0], found[1]


def _setting(
    split: Split, arch: str, task: str, training: Any, *, value_range: tuple[float, float] | None,
    steps: int, restarts: int, seed: int, device: str, **more: Any,
) -> Setting:  # fmt: skip
    """The strongest usual attacker: range, training mean and number of samples are granted."""
    from dataclasses import replace

    from residuum.attacks import PRESETS
    from residuum.defenses import Setting
    from residuum.errors import InputError
    from residuum.evaluation.null import MIN_SUBSETS
    from residuum.records import Knowledge

    if more["releases"] < 1 or more["subsets"] < MIN_SUBSETS:
        raise InputError(
            f"--releases starts at 1 and --subsets at {MIN_SUBSETS}; got {more['releases']} and "
            f"{more['subsets']}.",
            "Correct them.",
        )
    mean = split.train.mean if value_range is not None else None
    knowledge = Knowledge(
        shape=split.train.shape, value_range=value_range, mean=mean, sample_count=len(split.train),
        provenance={} if mean is None else {"mean": "train"},
    )  # fmt: skip
    attack = replace(PRESETS["residuum"], steps=steps, restarts=restarts, seed=seed, device=device)
    return Setting(arch, split, task, training, attack, knowledge, seed, device=device, **more)


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
