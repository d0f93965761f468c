"""``residuum attack``: reconstruct training samples from weights.

If you do not name an attack, the attack that suits the network runs. To see the settings of an attack,
run residuum attack NAME --help. If your weights file has the same name as an
attack, such as kkt, pass ./kkt.

The attack fill infers missing values of records that the attacker has in part. It has options of its own.

A preset gives values to settings, and other options override these values. A preset that belongs to another
attack is refused. Settings of a preset that the attack does not have are ignored.

Examples:
residuum attack model.safetensors --out runs/a

residuum attack kkt runs/m --steps 3000 --restarts 8 --out runs/k

residuum attack runs/m --preset haim2022-cifar-b9dfyspx --steps 10000 --out runs/b

residuum attack runs/m --shape 1,28,28 --value-range 0,1 --mean 0.13 --restarts 8 --out runs/c

residuum attack runs/m --candidates 2000 --dry-run

residuum attack ntk runs/m --init own --priors high-frequency 1e-8 --out runs/n
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from residuum.cli import fill, options
from residuum.cli.options import SETTINGS, options_from, with_options
from residuum.cli.output import (
    attack_progress,
    format_number,
    print_line,
    print_notes,
    print_table,
    show_progress,
)
from residuum.errors import InputError, did_you_mean
from residuum.settings import AUTO, MODELS, PRESETS, AttackSettings

if TYPE_CHECKING:
    from residuum.attacks.cost import Estimate
    from residuum.io.release import Release
    from residuum.records import Reconstruction

MAX_ROWS = 20  # maximal number of restarts in the printed table
FOREST = "forest"  # the attack on decision trees, which have no weights
# Attacks with the option --surface, which selects the weights, the weight update or the optimizer state.
ON_SURFACES = (AUTO, "unmix")
SUMMARIES = {
    "auto": "Choose the attack that suits the network. This is the default.",
    "kkt": "Solve the KKT equation of a classifier (Haim 2022, Buzaglo 2023).",
    "binary-kkt": "Run kkt on a network with one output.",
    "multiclass-kkt": "Run kkt on a network with several outputs.",
    "weight-decay": "Solve the equation of a regression with weight decay.",
    "ntk": "Solve the equation of the weight update (Loo 2024).",
    "moment": "Solve the equation of an optimizer state.",
    "unmix": "Separate the rows of the input layer into samples.",
    "unmix-moment": "Run unmix on an optimizer state.",
    "trunk": "Run unmix behind a backbone, then invert the features.",
    "trunk-moment": "Run trunk on an optimizer state.",
    "invert": "Find samples whose gradients match the weight update.",
    "invert-moment": "Find samples whose gradients match an optimizer state.",
    "geiping2020": "Match gradients as published (Geiping 2020).",
    "geiping2020-moment": "Run geiping2020 on an optimizer state.",
    "forest": "Recover the training table of a random forest from its trees.",
    "corners": "Find points where the hyperplanes of many neurons meet.",
    "polynomial": "Recover the samples of a polynomial network exactly.",
    "model-inversion": "Baseline: find inputs with a large output.",
    "first-layer-weights": "Baseline: show the rows of the first layer as images.",
}

Surface = Annotated[
    Literal["weights", "change", "moment"] | None,
    Parameter(
        help="What the attack reads: weights, change (the weight update from known initial weights) or "
        "moment (the optimizer state). By default the attack decides.",
        group=SETTINGS,
    ),
]

app = options.command_app("attack", __doc__)


def make_command(name: str, settings_model: type[AttackSettings]) -> Callable[..., None]:
    """Create the function that runs the command ``residuum attack NAME``.

    Args:
        name: Name of the attack, "auto" for the attack that suits the network.
        settings_model: The pydantic model of the attack's settings. Its fields become options of the command.

    Returns:
        The command function.
    """

    @with_options(settings=options_from(settings_model, group=SETTINGS))
    def command(
        checkpoint: options.OptionalCheckpointPath = None,
        /,
        *,
        out: Annotated[
            Path | None,
            Parameter(
                help="Folder for the results. If the folder holds an unfinished attack, this attack is "
                "continued. Required unless you pass --dry-run."
            ),
        ] = None,
        preset: options.PresetName = "residuum",
        dry_run: Annotated[
            bool,
            Parameter(
                help="Print how much time and memory the attack will need, and do not run the attack. For "
                "this, steps of the attack are run for two seconds."
            ),
        ] = False,
        output: options.Output = options.OUTPUT,
        settings: dict[str, Any] | None = None,
        surface: Surface = None,
        knowledge_options: options.KnowledgeOptions = options.KNOWLEDGE_OPTIONS,
        fine_tuning: options.FineTuning = options.FINE_TUNING,
        arch: options.Arch = None,
        model: options.ModelCode = None,
        trust_code: options.TrustCode = False,
        # The function ``main`` reads this option before it calls this function. The option is listed here
        # only for the help text.
        no_plugins: options.NoPlugins = False,
    ) -> None:
        from residuum.attacks import Attack, estimate, make_attack
        from residuum.attacks.registry import adapt_to_surface
        from residuum.attacks.trees.forest import ForestAttack, read_forest
        from residuum.errors import InconclusiveError
        from residuum.io.attacker_knowledge import build_knowledge, parse_shape
        from residuum.io.forests import read_forests
        from residuum.io.loading import load_network, resolve_trained_and_base
        from residuum.io.release import open_release
        from residuum.io.updates import read_update, resolve_update
        from residuum.records.rundir import read_json
        from residuum.verbs.attacking import SUMMARY, AttackRun, make_request

        check_preset(name, preset)
        attack = options.make_from_options(
            lambda **values: (
                ForestAttack(**values) if name == FOREST else make_attack(name, preset, **values)
            ),
            settings or {},
        )
        options.check_device(attack.device)
        shape = None if knowledge_options.shape is None else parse_shape(knowledge_options.shape)
        is_update = fine_tuning.update is not None
        if is_update:
            options_of_update = checkpoint, fine_tuning.base, fine_tuning.adapter
            attacked_file, base, _ = resolve_update(fine_tuning.update, *options_of_update)
        elif checkpoint is None:
            raise InputError(
                "An attack needs a checkpoint.", "Run residuum attack model.safetensors."
            )
        else:
            attacked_file, base = resolve_trained_and_base(
                checkpoint, fine_tuning.base, fine_tuning.adapter
            )
        release = open_release(attacked_file)
        if name in (AUTO, FOREST) and read_forests(release):
            knowledge_values = {k: v for k, v in vars(knowledge_options).items() if v is not None}
            if dry_run:
                _preview_forest(release, output)
            else:
                _attack_forest(release, knowledge_values, attack, out, output)
            return
        if name == FOREST:
            read_forest(release)  # the release holds no forest here, so this call raises an error
        load = partial(load_network, arch=arch, model=model, trust_code=trust_code, shape=shape)
        assert isinstance(attack, Attack)
        if is_update:
            update = read_update(release, None if base is None else load(base), arch=arch)
            network = update.network
            other_knowledge = build_knowledge(release, network, **vars(knowledge_options))
            knowledge = update.add_to(other_knowledge)
            surface = surface or "moment"  # the attacks on optimizer state also attack updates
        else:
            network = load(release, base=base)
            knowledge = build_knowledge(release, network, base=base, **vars(knowledge_options))
        attack = adapt_to_surface(surface or "", knowledge, attack)
        if dry_run:
            cost = estimate(network, knowledge, attack)
            output.print_result(cost.to_json(), lambda: _show_cost(cost))
            return
        if out is None:
            raise InputError(
                "An attack needs a folder for its results.",
                "Pass --out runs/a, or --dry-run to print only the cost.",
            )
        attack_identity = make_request(release, network, attack)
        with AttackRun.open(out) as run:
            reconstruction = run.finished(attack_identity, knowledge)
            is_reused = reconstruction is not None
            if reconstruction is None:
                with attack_progress(output.visible) as watch:
                    reconstruction = run.attack(
                        network, knowledge, attack, attack_identity, preset, watch
                    )
        if all(status == "diverged" for status in reconstruction.status):
            sentence_subject = (
                "The attack"
                if reconstruction.restarts == 1
                else f"All {reconstruction.restarts} restarts"
            )
            raise InconclusiveError(
                f"An attack must stay finite. {sentence_subject} diverged (reached infinite or undefined "
                f"values); the unfinished result is in {str(out)!r}.",
                "Lower --lr-x or --lr-lam.",
            )
        if is_reused and output.visible:
            print_line(f"{out} already holds the finished result of this attack:")
        output.print_result(read_json(out / SUMMARY), lambda: show(reconstruction, out))

    if name not in ON_SURFACES:
        command.__annotations__["surface"] = Annotated[Surface, Parameter(parse=False)]
    return command


def check_preset(name: str, preset: str) -> None:
    """Raise an error if a preset belongs to another attack.

    Args:
        name: Name of the attack that the user passed, "auto" if the user passed no name.
        preset: Name of the preset.

    Raises:
        InputError: If the preset belongs to another attack.
    """
    from residuum.attacks.registry import CHOICES

    preset_attack = PRESETS[preset].attack
    if name != AUTO and preset_attack not in (AUTO, name, *CHOICES.get(name, ())):
        raise InputError(
            f"The option --preset {preset} holds settings of the attack {preset_attack}, not of the "
            f"attack {name}.",
            f"Run residuum attack {preset_attack}, or leave --preset out.",
        )


def add_command_of_plugin(arguments: list[str]) -> None:
    """Add a command to the command line for an attack of a plug-in, if the user names such an attack.

    A plug-in is an installed package that defines attacks.

    Args:
        arguments: Arguments after ``residuum attack``.

    Raises:
        InputError: If there are two arguments that are not options, and the first argument is neither the
            name of an attack nor a file.
    """
    if not arguments or arguments[0].startswith("-") or arguments[0] in (*MODELS, fill.NAME):
        return
    name, following = arguments[0], arguments[1:2]
    if Path(name).exists():
        return
    from residuum import plugins
    from residuum.attacks import every_attack

    plugins.load("--no-plugins" not in arguments)
    attacks = every_attack()
    if name in app:
        del app[name]
    if name in attacks:
        app.command(attack_app(name, attacks[name]))
    elif following and not following[0].startswith("-"):
        raise InputError(
            f"No attack has the name {name!r}.", did_you_mean(name, [*MODELS, fill.NAME, *attacks])
        )


def attack_app(name: str, settings_model: type[AttackSettings]) -> App:
    """Return the command line application (of the package cyclopts) for ``residuum attack NAME``.

    Args:
        name: Name of the attack.
        settings_model: The pydantic model of the attack's settings.

    Returns:
        The cyclopts application.
    """
    attack_command = App(
        name=name,
        help=SUMMARIES.get(name, "An attack from an installed plug-in."),
        help_epilogue=f"Example:\n\nresiduum attack {name} runs/m --out runs/a",
        group_parameters=options.BASIC,
        sort_key=[*SUMMARIES, name].index(name),
    )
    attack_command.default(make_command(name, settings_model))
    return attack_command


app.default(make_command(AUTO, MODELS[AUTO]))
for attack_name, model in MODELS.items():
    app.command(attack_app(attack_name, model))
fill.app.sort_key = len(SUMMARIES)
app.command(fill.app)


def show(reconstruction: Reconstruction, out: Path) -> None:
    """Print the result of an attack, with the loss and the errors of every restart (run).

    Args:
        reconstruction: The result of the attack.
        out: Folder of the attack.
    """
    summary = reconstruction.to_json()
    restart_rows = []
    for run, restart in enumerate(summary["runs"][:MAX_ROWS]):
        losses = format_number(restart["final_loss"]), format_number(restart["loss"])
        residuals = (format_number(value, 3) for value in restart["residuals"].values())
        restart_rows.append((str(run), restart["status"], *losses, *residuals))
    columns = ("restart", "status", "final loss", "best loss", *reconstruction.layer_names)
    print_table(
        f"{reconstruction.attack}: loss of every restart, and relative residual of every layer",
        columns,
        restart_rows,
    )
    if reconstruction.restarts > MAX_ROWS:
        print_line(f"{reconstruction.restarts - MAX_ROWS} more restarts are in attack.json")
    print_line(
        f"{summary['candidates']} candidates, {summary['selected']} selected, "
        f"{summary['consensus']} of the selected found by several restarts"
    )
    if reconstruction.second_order:
        _show_added_candidates(reconstruction)
    print_line(f"known to the attacker: {reconstruction.knowledge.line}")
    print_line(f"{reconstruction.seconds:.1f} seconds; written to {out}")
    print_notes(reconstruction.notes)


def _preview_forest(release: Release, output: options.Output) -> None:
    """Print the size of a random forest, and why it cannot be attacked if so. Do not attack it."""
    from residuum.attacks.trees.forest import read_forest, why_not

    forest_model = read_forest(release)
    trees = forest_model.forest.trees
    forest_facts = {
        "model": forest_model.name,
        "trees": len(trees),
        "nodes": sum(len(tree.left) for tree in trees),
        "columns": forest_model.forest.columns,
        "records": forest_model.forest.records,
        "obstacle": why_not(forest_model.forest),
    }
    preview_rows = [
        (name, "-" if value is None else str(value)) for name, value in forest_facts.items()
    ]
    output.print_result(
        forest_facts,
        lambda: print_table("dry run: nothing was attacked", ("figure", "value"), preview_rows),
    )


def _attack_forest(
    release: Release,
    knowledge_values: dict[str, Any],
    attack: AttackSettings,
    out: Path | None,
    output: options.Output,
) -> None:
    """Recover the training table of a random forest, write it to a folder, and print a summary."""
    from residuum.attacks.trees.forest import ForestAttack
    from residuum.auditing.case import known_by_attacker
    from residuum.records import Knowledge
    from residuum.verbs.forests import SUMMARY, TABLE, attack_forest

    if out is None:
        raise InputError("An attack needs a folder for its results.", "Pass --out runs/a.")
    knowledge = known_by_attacker(knowledge_values, Knowledge(), None, None)
    forest_attack = ForestAttack.from_json(
        {k: v for k, v in attack.to_json().items() if k in ForestAttack.model_fields}
    )
    with show_progress("forest", lambda text: (0, 0, text), output.visible) as watch:
        recovered_table = attack_forest(
            release, knowledge, forest_attack, out, watch or (lambda text: None)
        )
    from residuum.records.rundir import read_json

    def show_table() -> None:
        for line in recovered_table.lines:
            print_line(line)
        print_line(f"known to the attacker: {knowledge.line.replace('weights', 'file')}")
        print_line(f"{recovered_table.seconds:.1f} seconds; the table is in {out / TABLE}")
        print_notes(recovered_table.notes)

    output.print_result(read_json(out / SUMMARY), show_table)


def _show_added_candidates(reconstruction: Reconstruction) -> None:
    """Print how often an attack split, merged or removed candidates (guesses of samples).

    Also print whether each restart ended at a minimum of the loss.
    """
    event_kinds = [event["kind"] for event in reconstruction.events]
    event_counts = ", ".join(
        f"{event_kinds.count(kind)} {kind}" for kind in dict.fromkeys(event_kinds)
    )
    print_line(f"candidates added during the search: {event_counts or 'none'}")
    for run, restart in enumerate(reconstruction.second_order[:MAX_ROWS]):
        verb = "is" if restart["stationary"] else "is not"
        print_line(
            f"restart {run} {verb} second-order stationary at eps {restart['eps']:g}: gradient "
            f"{restart['gradient']:.3g}, smallest curvature {restart['lowest_curvature']:.3g}"
        )


def _show_cost(cost: Estimate) -> None:
    """Print the expected cost of an attack, which is computed from the measured time of one step."""
    memory_by_use = ", ".join(f"{name} {size / 2**20:.4g}" for name, size in cost.memory.items())
    flops_by_layer = ", ".join(
        f"{name} {flops / 1e9:.4g}" for name, flops in cost.flops_by_layer.items()
    )
    cost_rows = [
        ("network", cost.arch),
        ("parameters", str(cost.parameters)),
        ("candidates", f"{cost.restarts} x {cost.candidates}, {cost.dimensions} numbers each"),
        ("unknowns", str(cost.unknowns)),
        ("steps", str(cost.steps)),
        (
            "GFLOP per step",
            f"{cost.flops_per_step / 1e9:.4g}{flops_by_layer and f' ({flops_by_layer})'}",
        ),
        ("memory (MiB)", f"{sum(cost.memory.values()) / 2**20:.4g} ({memory_by_use})"),
        ("time per step", f"{1e3 * cost.step_seconds:.4g} ms on {cost.device} ({cost.dtype})"),
        ("rate", f"{cost.flops_per_second / 1e9:.4g} GFLOP/s"),
        ("whole attack", f"about {cost.seconds:.3g} seconds"),
    ]
    print_table("dry run: nothing was attacked", ("figure", "value"), cost_rows)
    print_notes(cost.notes)
