"""``residuum sweep``: many attacks with varied settings, ranked and pooled without the data.

Examples:

residuum sweep runs/m --trials 32 --out runs/s

residuum sweep runs/m --trials 200 --engine processes --sampler sobol --rungs 2 --out runs/s

residuum sweep runs/m --trials 200 --engine ray --address auto --gpus-per-trial 0.25 --out runs/s

residuum sweep runs/m --search lr_x=1e-3:1:log --search lr_decay=0:1 --trials 64 --out runs/t

residuum sweep runs/m --trials 32 --data runs/m --holdout runs/m --out runs/s

residuum sweep runs/m --objective unmix --trials 16 --shape 1,28,28 --out runs/u
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from residuum.cli import options
from residuum.cli.options import option
from residuum.cli.output import number, print_line, print_table, sweep_progress
from residuum.errors import InconclusiveError, InputError

if TYPE_CHECKING:
    from residuum.sweeping import Range, Sweep

ROWS = 8  # trials shown; the report has all


@dataclass(frozen=True)
class Settings:
    """Of every attack, where they are not varied; read by ``options.configure``."""

    preset: str = options.PRESET
    objective: str | None = options.OBJECTIVE
    candidates: int | None = option("Candidates per restart.", min=1)
    restarts: int = option("Restarts of each trial.", 2, min=1)
    steps: int | None = options.STEPS
    prior: list[str] | None = options.PRIOR
    dtype: str | None = options.DTYPE
    device: str | None = option("Of the workers.", choices=("cpu", "cuda"))
    seed: int = option("Seed of the trials and of every attack.", 0, min=0, max=2**31 - 1)
    settings: list[str] | None = options.SET


def command(
    checkpoint: options.CheckpointPath,
    *,
    out: Path | None = option(
        "Folder to write; a sweep there that was stopped goes on. Required unless --dry-run."
    ),
    trials: int = option("Settings to try.", 32, min=1),
    sampler: str = option("How settings are chosen.", "random", choices=("random", "sobol", "tpe")),
    engine: str = option("Where trials run.", "local", choices=("local", "processes", "ray")),
    address: str = option(
        "Ray cluster to join, such as auto; left out, one is started here.",
        "",
        metavar="ADDRESS",
        place="expert",
    ),
    workers: int = option("Processes on this machine (0: as many as cores allow).", 0, min=0),
    cpus_per_trial: int = option("Cores, and threads, of a trial.", 1, min=1, place="expert"),
    gpus_per_trial: float = option(
        "Share of a GPU that a Ray trial reserves.", 0.0, min=0.0, place="expert"
    ),
    retries: int = option(
        "How often a trial whose worker died is tried again.", 2, min=0, place="expert"
    ),
    storage: str | None = option(
        "Database URL, as Optuna takes it (default: a journal in the folder).",
        metavar="URL",
        place="expert",
    ),
    search: list[str] | None = option(
        "Vary this setting instead of the default ones; repeatable.", metavar="NAME=LOW:HIGH[:log]"
    ),
    batch: int = option("Trials that share one program: fills a GPU.", 1, min=1, place="expert"),
    rungs: int = option(
        "Successive halving: pauses at which two thirds end.", 0, min=0, place="expert"
    ),
    rank_by: str | None = option(
        "residual (the default), or residual,agreement for a front of both; unmix: expected.",
        metavar="WORDS",
        suggested=("residual", "residual,agreement", "expected"),
        place="expert",
    ),
    settings: Settings,
    arch: str | None = options.ARCH,
    granted: options.Granted,
    data: Path | None = option(
        "Training samples, read once the ranking is fixed: scores it, changes nothing."
    ),
    holdout: Path | None = option("Samples the network never saw, for --data."),
    dry_run: bool = option("Print what the sweep will cost; no trial is run.", False, "--dry-run"),
    voice: options.Voice,
) -> None:
    """Try many settings of an attack; rank them and pool what they find by the weights alone."""
    from residuum.attacks import estimate
    from residuum.io.attacker_knowledge import attacker_knowledge
    from residuum.io.checkpoints import load_checkpoint
    from residuum.io.release import open_release
    from residuum.sweeping import SweepOptions, SweepRequest, sweep
    from residuum.sweeping.space import cost

    config = options.configure(**vars(settings))
    if engine != "ray":
        options.check_device(config.device)
    asked = SweepOptions(
        trials=trials,
        sampler=sampler,
        seed=settings.seed,
        config=config,
        batch=batch,
        rungs=rungs,
        engine=engine,
        workers=workers,
        cpus=cpus_per_trial,
        gpus=gpus_per_trial,
        address=address,
        retries=retries,
        storage=storage,
    )
    if search:
        asked["space"] = dict(map(_setting, search))
    if rank_by:
        asked["objectives"] = tuple(name.strip() for name in rank_by.split(","))
    request = SweepRequest(**asked)
    release = open_release(checkpoint)
    released = load_checkpoint(release, arch)
    knowledge = attacker_knowledge(release, released, **vars(granted))
    if dry_run:  # one trial, measured, times the number of trials that run to their end
        figures = cost(request, estimate(released, knowledge, config))
        rows = [(name.replace("_", " "), number(value)) for name, value in figures.items()]
        title = "dry run: no trial was run"
        voice.answer(figures, lambda: print_table(title, ("figure", "value"), rows))
        return
    if out is None:
        raise InputError("A sweep needs a folder to write.", "Say --out runs/s, or --dry-run.")
    with sweep_progress(voice.spoken) as watch:
        done = sweep(
            checkpoint,
            knowledge,
            out=out,
            data=data,
            holdout=holdout,
            arch=arch,
            watch=watch,
            **asked,
        )
    if not done.order:
        reason = next((t.reason for t in done.trials if t.reason), "")
        raise InconclusiveError(
            f"No trial was complete ({reason}); what there is stands in {str(out)!r}.",
            "Correct what the reason names, or choose another --search.",
        )
    scored = {"rankings": done.scored.to_json()} if done.scored else {}
    voice.answer({**done.said, **scored}, lambda: show(done, out))


def show(done: Sweep, out: Path) -> None:
    """The sweep as a person reads it."""
    said, scored = done.said, done.scored
    names, figure = tuple(done.request.space), done.request.objectives[0]
    rows = []
    for place, t in enumerate(done.order[:ROWS]):
        figures = number(getattr(t, figure), 3), number(t.agreement, 3)
        varied = (number(t.params[name], 2) for name in names)
        rows.append((str(place + 1), str(t.number), *figures, *varied))
    columns = ("rank", "trial", figure, "agreement", *names)
    print_table("best trials, ranked by the weights alone", columns, rows)
    counts = said["counts"]
    print_line(
        f"{counts['complete']} complete, {counts['pruned']} stopped early, {counts['failed']} failed; "
        f"{done.fresh} of them in this session, {said['session']['seconds']:.1f} seconds"
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


def _setting(text: str) -> tuple[str, Range]:
    from residuum.sweeping import Range
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
    return name, Range(low, high, log=parts[2:] == ["log"], whole=whole)
