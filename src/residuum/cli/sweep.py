"""``residuum sweep``: many attacks with varied settings, ranked and pooled without the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli import options
from residuum.cli.granted import grant
from residuum.cli.output import number, print_json, print_line, print_table, sweep_progress
from residuum.cli.settings import configure

if TYPE_CHECKING:
    from residuum.attacks import AttackConfig
    from residuum.records import Checkpoint, Knowledge
    from residuum.sweeping import Plan, Setting, Sweep

EXAMPLES = """Examples:

residuum sweep runs/m --trials 32 --out runs/s

residuum sweep runs/m --trials 200 --engine processes --sampler sobol --rungs 2 --out runs/s

residuum sweep runs/m --trials 200 --engine ray --address auto --gpus-per-trial 0.25 --out runs/s

residuum sweep runs/m --search lr_x=1e-3:1:log --search lr_decay=0:1 --trials 64 --out runs/t

residuum sweep runs/m --trials 32 --data runs/m --holdout runs/m --out runs/s
"""
ROWS = 8


def command(
    checkpoint: options.CheckpointPath,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; a sweep there that was stopped goes on. Required unless --dry-run.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 32,
    sampler: Annotated[str, typer.Option(help="random, sobol or tpe.")] = "random",
    engine: Annotated[str, typer.Option(help="local, processes or ray.")] = "local",
    address: Annotated[
        str,
        typer.Option(help="Ray cluster to join, such as auto; left out, one is started here."),
    ] = "",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes on this machine (0: as many as cores allow).")
    ] = 0,
    cpus_per_trial: Annotated[int, typer.Option(min=1, help="Cores, and threads, of a trial.")] = 1,
    gpus_per_trial: Annotated[
        float, typer.Option(min=0.0, help="Share of a GPU that a Ray trial reserves.")
    ] = 0.0,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a trial whose worker died is tried again.")
    ] = 2,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Optuna URL of the storage (default: SQLite in the folder).", show_default=False
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH[:log]",
            help="Vary this setting instead of the default ones; repeatable.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Trials that share one program: fills a GPU.")
    ] = 1,
    rungs: Annotated[
        int, typer.Option(min=0, help="Successive halving: pauses at which two thirds end.")
    ] = 0,
    rank_by: Annotated[
        str, typer.Option(help="residual, or residual,agreement for a front of both.")
    ] = "residual",
    preset: Annotated[str, typer.Option(help="Settings that are not varied.")] = "residuum",
    objective: Annotated[str | None, typer.Option(help="As in residuum attack.")] = None,
    candidates: Annotated[int | None, typer.Option(min=1, help="Candidates per restart.")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Restarts of each trial.")] = 2,
    steps: options.Steps = None,
    prior: Annotated[
        list[str] | None, typer.Option(metavar="NAME:WEIGHT", help="As in residuum attack.")
    ] = None,
    dtype: options.Precision = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda, of the workers.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the trials and of every attack.")
    ] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of the attack."),
    ] = None,
    arch: options.Arch = None,
    shape: options.Shape = None,
    value_range: options.ValueRange = None,
    mean: options.Mean = None,
    mean_provenance: options.MeanProvenance = "user",
    sample_count: options.SampleCount = None,
    label_balance: options.LabelBalance = None,
    init: options.InitialWeights = None,
    loss: options.TrainingLoss = None,
    weight_decay: options.WeightDecay = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Training samples, read once the ranking is fixed: scores it, changes nothing.",
            show_default=False,
        ),
    ] = None,
    holdout: Annotated[
        Path | None, typer.Option(help="Samples the network never saw, for --data.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the sweep will cost; no trial is run.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Try many settings of an attack; rank them and pool what they find by the weights alone."""
    from residuum.checkpoints import load_checkpoint
    from residuum.sweeping import sweep
    from residuum.sweeping.executors import Resources

    given = {"objective": objective, "candidates": candidates, "restarts": restarts, "steps": steps,
             "dtype": dtype, "device": device, "seed": seed}  # fmt: skip
    config = configure(preset, given, prior, settings)
    if engine != "ray":
        options.check_device(config.device)
    planned = plan_of(config, trials, sampler, seed, search, batch, rungs, rank_by)
    released = load_checkpoint(checkpoint, arch)
    knowledge = grant(
        checkpoint, released, shape=shape, value_range=value_range, mean=mean,
        mean_provenance=mean_provenance, sample_count=sample_count, label_balance=label_balance,
        init=init, loss=loss, weight_decay=weight_decay,
    )  # fmt: skip
    resources = Resources(workers, cpus_per_trial, gpus_per_trial, address, retries)
    if dry_run:
        _dry_run(released, knowledge, planned, json, quiet)
        return
    out = _named(out)
    with sweep_progress(not (json or quiet)) as watch:
        done = sweep(
            checkpoint, knowledge, planned, out=out, data=data, holdout=holdout, arch=arch,
            engine=engine, resources=resources, storage=storage, watch=watch,
        )  # fmt: skip
    _refuse_failure(done, out)
    if json:
        print_json({**done.said, **({"rankings": done.scored.to_json()} if done.scored else {})})
    elif not quiet:
        show(done, out)


def plan_of(
    config: AttackConfig, trials: int, sampler: str, seed: int, search: list[str] | None,
    batch: int, rungs: int, rank_by: str,
) -> Plan:  # fmt: skip
    """The plan that these options amount to."""
    from residuum.sweeping import SPACE, Plan

    space = dict(map(_setting, search)) if search else dict(SPACE)
    objectives = tuple(part.strip() for part in rank_by.split(","))
    return Plan(trials, sampler, seed, config, space, batch, rungs=rungs, objectives=objectives)


def show(done: Sweep, out: Path) -> None:
    """The sweep as a person reads it."""
    said, scored = done.said, done.scored
    names = tuple(done.plan.space)
    rows = [
        (str(place + 1), str(t.number), number(t.residual, 3), number(t.agreement, 3),
         *(number(t.params[name], 2) for name in names))
        for place, t in enumerate(done.order[:ROWS])
    ]  # fmt: skip
    columns = ("rank", "trial", "residual", "agreement", *names)
    print_table("best trials, ranked by the weights alone", columns, rows)
    counts = said["counts"]
    print_line(
        f"{counts['complete']} complete, {counts['pruned']} stopped early, {counts['failed']} failed; "
        f"{done.fresh} of them in this session, {done.seconds:.1f} seconds"
    )
    for reason, count in said["failures"].items():
        print_line(f"failed: {count} x {reason}")
    pooled = said["pooled"]
    print_line(
        f"{pooled['candidates']} candidates of {pooled['runs']} runs pooled, "
        f"{pooled['consensus']} held by several runs"
    )
    if scored is not None:
        from residuum.sweeping.scoring import choice_lines, score_lines

        for line in (*choice_lines(scored), *score_lines(scored)):
            print_line(line)
    print_line(f"granted: {done.task.knowledge.line}")
    print_line(f"written to {out}")


def _dry_run(
    released: Checkpoint, knowledge: Knowledge, plan: Plan, json: bool, quiet: bool
) -> None:
    """Cost of one trial, measured, times the number of trials that run to their end."""
    from residuum.attacks import estimate
    from residuum.sweeping.space import cost

    found = cost(plan, estimate(released, knowledge, plan.config))
    if json:
        print_json(found)
    elif not quiet:
        rows = [(name.replace("_", " "), number(value)) for name, value in found.items()]
        print_table("dry run: no trial was run", ("figure", "value"), rows)


def _setting(text: str) -> tuple[str, Setting]:
    from residuum.errors import InputError
    from residuum.sweeping import Setting
    from residuum.sweeping.space import numeric

    name, _, span = text.partition("=")
    name, parts = name.strip().replace("-", "_"), span.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):
        low, high = 0.0, float("nan")
    if len(parts) > 3 or parts[2:] not in ([], ["log"]) or not low < high < float("inf"):
        raise InputError(
            f"--search takes NAME=LOW:HIGH or NAME=LOW:HIGH:log; got {text[:60]!r}.",
            "Example: --search lr_x=1e-3:1:log.",
        )
    whole = isinstance(numeric().get(name), int)
    return name, Setting(low, high, log=parts[2:] == ["log"], whole=whole)


def _named(out: Path | None) -> Path:
    from residuum.errors import InputError

    if out is None:
        raise InputError("A sweep needs a folder to write.", "Say --out runs/s, or --dry-run.")
    return out


def _refuse_failure(done: Sweep, out: Path) -> None:
    from residuum.errors import InconclusiveError

    if not done.order:
        reason = next((t.reason for t in done.trials if t.reason), "")
        raise InconclusiveError(
            f"No trial was complete ({reason}); what there is stands in {str(out)!r}.",
            "Correct what the reason names, or choose another --search.",
        )
