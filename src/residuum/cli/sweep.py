"""``residuum sweep``: run an attack with many settings, and combine the best reconstructions.

Examples:
residuum sweep runs/m --trials 32 --out runs/s

residuum sweep runs/m --trials 200 --engine processes --sampler sobol --rungs 2 --out runs/s

residuum sweep runs/m --trials 200 --engine ray --address auto --gpus-per-trial 0.25 --out runs/s

residuum sweep runs/m --search lr_x=1e-3:1:log --search lr_decay=0:1 --trials 64 --out runs/t

residuum sweep runs/m --trials 32 --data runs/m --holdout runs/m --out runs/s

residuum sweep runs/m --attack unmix --trials 16 --shape 1,28,28 --out runs/u
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import format_number, print_line, print_table, sweep_progress
from residuum.errors import InconclusiveError, InputError
from residuum.settings import (
    MODELS,
    TRIAL_RESTARTS,
    StationaritySettings,
    SweepSettings,
    UnmixSettings,
)

if TYPE_CHECKING:
    from residuum.attacks import Attack
    from residuum.sweeping import Range, Sweep

MAX_ROWS = 8  # maximal number of trials in the printed table. The file sweep.json has all trials


app = options.command_app("sweep", __doc__)


@app.default
@with_options(
    settings=options_from(
        SweepSettings,
        changes={
            "objectives": Annotated[str, Parameter(metavar="WORDS")],
            "address": Annotated[str, Parameter(metavar="ADDRESS")],
            "storage": Annotated[str, Parameter(metavar="URL")],
        },
    ),
    attack_settings=options_from(
        StationaritySettings,
        UnmixSettings,
        skip=("seed",),
        group=options.SETTINGS,
        changes={"restarts": Annotated[int, Parameter(show_default=str(TRIAL_RESTARTS))]},
    ),
)
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for the results. If the folder holds an interrupted sweep, this sweep is "
            "continued. Required unless you pass --dry-run."
        ),
    ] = None,
    settings: dict[str, Any] | None = None,
    search: Annotated[
        list[str] | None,
        Parameter(
            help="Setting of the attack to vary, with its range, such as lr_x=1e-3:1:log. The sweep then "
            "varies only the settings that you name. Repeat the option for several settings.",
            metavar="NAME=LOW:HIGH[:log]",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        Parameter(
            help="Training samples, to measure how well the sweep ranked its trials. The samples are read "
            "after the ranking, so they do not change the ranking."
        ),
    ] = None,
    holdout: Annotated[
        Path | None,
        Parameter(
            help="Held-out samples, which the network was not trained on. They show how many samples are "
            "matched by chance. Needs --data."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Parameter(
            help="Print how much time and memory the sweep will need, and do not run the sweep."
        ),
    ] = False,
    output: options.Output = options.OUTPUT,
    attack: Annotated[
        str,
        Parameter(
            help="Attack whose settings the sweep varies: 'unmix', or an attack on a stationarity equation, "
            "such as 'kkt'. 'auto' chooses the attack that suits the network.",
            metavar="NAME",
            group=options.SETTINGS,
            show_default=True,
            completer=lambda _: tuple(MODELS),
        ),
    ] = "auto",
    preset: options.PresetName = "residuum",
    attack_settings: dict[str, Any] | None = None,
    knowledge_options: options.KnowledgeOptions = options.KNOWLEDGE_OPTIONS,
    arch: options.Arch = None,
) -> None:
    """Try many settings of an attack, rank them without training data, and combine the results."""
    from residuum.attacks import estimate
    from residuum.io.attacker_knowledge import build_knowledge
    from residuum.io.checkpoints import load_checkpoint
    from residuum.io.release import open_release
    from residuum.sweeping import SweepRequest, sweep
    from residuum.sweeping.space import estimate_cost

    passed_settings = dict(settings or {})
    if "objectives" in passed_settings:
        passed_settings["objectives"] = tuple(
            name.strip() for name in passed_settings["objectives"].split(",")
        )
    trial_settings = {"seed": passed_settings.get("seed", 0), **(attack_settings or {})}
    trial_attack = make_trial_attack(attack, preset, trial_settings)
    passed_settings["attack"] = trial_attack
    if search:
        passed_settings["space"] = dict(_read_range(text, trial_attack) for text in search)
    request = options.make_from_options(SweepRequest, passed_settings)
    if request.engine != "ray":
        options.check_device(trial_attack.device)
    release = open_release(checkpoint)
    network = load_checkpoint(release, arch)
    knowledge = build_knowledge(release, network, **vars(knowledge_options))
    if dry_run:  # estimate the cost of the sweep from the measured cost of one trial
        sweep_cost = estimate_cost(request, estimate(network, knowledge, trial_attack))
        cost_rows = [
            (name.replace("_", " "), format_number(value)) for name, value in sweep_cost.items()
        ]
        title = "dry run: no trial was run"
        output.print_result(sweep_cost, lambda: print_table(title, ("figure", "value"), cost_rows))
        return
    if out is None:
        raise InputError(
            "A sweep needs a folder for its results.",
            "Pass --out runs/s, or --dry-run to print only the cost.",
        )
    with sweep_progress(output.visible) as watch:
        finished_sweep = sweep(
            checkpoint,
            knowledge,
            out=out,
            data=data,
            holdout=holdout,
            arch=arch,
            watch=watch,
            **passed_settings,
        )
    if not finished_sweep.order:
        failure_reason = next((t.reason for t in finished_sweep.trials if t.reason), "")
        raise InconclusiveError(
            f"A sweep needs at least one completed trial (one run of the attack); all trials failed "
            f"({failure_reason}). The unfinished result is in {str(out)!r}.",
            "Fix the cause, or search other ranges with --search.",
        )
    rankings_entry = {"rankings": finished_sweep.scored.to_json()} if finished_sweep.scored else {}
    output.print_result(
        {**finished_sweep.summary, **rankings_entry}, lambda: show(finished_sweep, out)
    )


def make_trial_attack(name: str, preset: str, settings: dict[str, Any]) -> Attack:
    """Create the attack that a sweep runs with many settings. Each trial changes some of its settings.

    Args:
        name: Name of the attack.
        preset: Name of the preset.
        settings: Settings that the user passed.

    Returns:
        The attack.

    Raises:
        InputError: If the attack does not have one of the settings, or if a value is not valid.
    """
    from residuum.attacks import make_attack
    from residuum.attacks.registry import attack_class

    attack_settings = attack_class(name).model_fields
    for setting in settings:
        if setting not in attack_settings:
            raise InputError(
                f"The option {options.option_name(setting)} is not a setting of the attack {name}.",
                f"Leave {options.option_name(setting)} out.",
            )
    if "restarts" in attack_settings:
        settings = {"restarts": TRIAL_RESTARTS, **settings}
    return options.make_from_options(lambda **values: make_attack(name, preset, **values), settings)


def show(done: Sweep, out: Path) -> None:
    """Print the result of a sweep.

    Args:
        done: The finished sweep.
        out: Folder of the sweep.
    """
    summary, scored = done.summary, done.scored
    names, objective = tuple(done.request.space), done.request.objectives[0]
    trial_rows = []
    for position, trial in enumerate(done.order[:MAX_ROWS]):
        statistic_cells = (
            format_number(getattr(trial, objective), 3),
            format_number(trial.agreement, 3),
        )
        setting_cells = (format_number(trial.params[name], 2) for name in names)
        trial_rows.append((str(position + 1), str(trial.number), *statistic_cells, *setting_cells))
    columns = ("rank", "trial", objective, "agreement", *names)
    print_table("best trials, ranked by the weights alone", columns, trial_rows)
    state_counts = summary["counts"]
    print_line(
        f"{state_counts['complete']} complete, {state_counts['pruned']} stopped early, "
        f"{state_counts['failed']} failed; "
        f"{done.fresh} trials ran in this session, {summary['session']['seconds']:.1f} seconds"
    )
    for reason, count in summary["failures"].items():
        print_line(f"{count} failed because: {reason}")
    pooled_counts = summary["pooled"]
    print_line(
        f"{pooled_counts['candidates']} candidates of {pooled_counts['runs']} runs were pooled; "
        f"{pooled_counts['consensus']} reconstructions were found by several runs"
    )
    if scored is not None:
        from residuum.sweeping.scoring import choice_lines, score_lines

        for line in (*choice_lines(scored), *score_lines(scored)):
            print_line(line)
    print_line(f"known to the attacker: {done.task.knowledge.line}")
    print_line(f"written to {out}")


def _read_range(text: str, attack: Attack) -> tuple[str, Range]:
    from residuum.sweeping import Range
    from residuum.sweeping.space import list_numeric_settings

    name, _, span = text.partition("=")
    name, fields = name.strip().replace("-", "_"), span.split(":")
    try:
        low, high = float(fields[0]), float(fields[1])
    except (ValueError, IndexError):
        low, high = 0.0, float("nan")
    if len(fields) > 3 or fields[2:] not in ([], ["log"]) or not low < high < float("inf"):
        raise InputError(
            f"The option --search must have the form NAME=LOW:HIGH or NAME=LOW:HIGH:log; got "
            f"{text[:60]!r}.",
            "Example: --search lr_x=1e-3:1:log.",
        )
    is_integer = isinstance(list_numeric_settings(type(attack)).get(name), int)
    return name, Range(low, high, log=fields[2:] == ["log"], integer=is_integer)
