"""``residuum attack``: training samples out of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli import options
from residuum.cli.granted import grant
from residuum.cli.output import attack_progress, number, print_json, print_line, print_table
from residuum.cli.settings import configure

if TYPE_CHECKING:
    from residuum.attacks import AttackConfig
    from residuum.records import Checkpoint, Knowledge, Reconstruction

EXAMPLES = """Examples:

residuum attack model.safetensors --out runs/a

residuum attack runs/m --preset haim2022-cifar-b9dfyspx --steps 10000 --out runs/b

residuum attack runs/m --shape 1,28,28 --value-range 0,1 --mean 0.13 --restarts 8 --out runs/c

residuum attack runs/m --candidates 2000 --rank-tolerance 0.05 --dry-run

residuum attack runs/m --objective ntk --init own --prior high-frequency:1e-8 --set momentum=0.8 --out runs/n
"""
ROWS = 20  # restarts shown; the rest stands in attack.json


def command(
    checkpoint: options.CheckpointPath,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write; an unfinished attack there is continued. Required unless "
            "--dry-run.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="residuum, haim2022-cifar-b9dfyspx, haim2022-cifar-k60fvjdy, "
            "haim2022-mnist-kcf9bhbi, haim2022-mnist-rbijxft7, buzaglo2023-multiclass, "
            "buzaglo2023-regression, loo2024, ntk, model-inversion, first-layer-weights. Options "
            "below override it."
        ),
    ] = "residuum",
    objective: Annotated[
        str | None,
        typer.Option(
            help="auto, binary-kkt, multiclass-kkt, weight-decay, ntk, polynomial, model-inversion "
            "or first-layer-weights, or that of a plug-in."
        ),
    ] = None,
    rivals: Annotated[
        str | None, typer.Option(help="Multiclass: a multiplier per tied rival, or for the best.")
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="NTK: gradients at theta, theta0 or both.")
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Candidates per restart (default: twice the known samples, or half the neurons).",
        ),
    ] = None,
    restarts: Annotated[int | None, typer.Option(help="Independent runs, side by side.")] = None,
    steps: options.Steps = None,
    optimiser: Annotated[str | None, typer.Option(help="adam or sgd.")] = None,
    lr_x: Annotated[float | None, typer.Option(help="Learning rate of the candidates.")] = None,
    lr_lam: Annotated[float | None, typer.Option(help="Learning rate of the multipliers.")] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the initial candidates.")
    ] = None,
    lam_min: Annotated[float | None, typer.Option(help="Least stored multiplier.")] = None,
    lam_every: Annotated[
        int | None, typer.Option(min=0, help="Best multipliers in closed form every so many steps.")
    ] = None,
    surrogate: Annotated[
        str | None, typer.Option(help="What stands for the ReLU: sigmoid, softplus or none.")
    ] = None,
    sharpness: Annotated[float | None, typer.Option(help="Alpha or beta of the surrogate.")] = None,
    anneal: Annotated[
        str | None, typer.Option(help="Sharpening on the way: none, geometric or loo2024.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Which layers' residuals are minimised: all or first.")
    ] = None,
    prior: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:WEIGHT",
            help="Prior in place of the preset's; repeatable: value-box, haim2022-box, "
            "haim2022-text-box, loo2024-box, multiplier-floor, total-variation, high-frequency, none.",
        ),
    ] = None,
    constraint: Annotated[
        str | None, typer.Option(help="project into the known box, or leave it to a penalty.")
    ] = None,
    rank_tolerance: Annotated[
        float | None,
        typer.Option(
            help="Row-space mode: search in the singular vectors of the first layer above this "
            "share of the largest (0: all directions)."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Grow the candidate set: paper (Shen et al. 2026), auto, random, frank-wolfe or "
            "none. Its settings: --set split_every=1000 and others."
        ),
    ] = None,
    dtype: options.Precision = None,
    device: options.DeviceOrNone = None,
    seed: options.SeedOrNone = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this much wall-clock time.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE",
            help="Any other setting, such as momentum=0.8; repeatable. An unknown key lists them.",
        ),
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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what the attack will cost, measured in two seconds; no attack."
        ),
    ] = False,
    no_plugins: options.NoPlugins = False,  # seen by ``main`` before anything is read
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Reconstruct training samples from weights alone; the data is never opened."""
    from residuum.checkpoints import load_checkpoint
    from residuum.errors import InputError
    from residuum.verbs.attacking import AttackRun, read_summary, request_of

    given = {
        "objective": objective, "rivals": rivals, "gradients": gradients, "candidates": candidates,
        "restarts": restarts, "steps": steps, "optimiser": optimiser, "lr_x": lr_x,
        "lr_lam": lr_lam, "sigma": sigma, "lam_min": lam_min, "lam_every": lam_every,
        "surrogate": surrogate, "sharpness": sharpness, "anneal": anneal, "layers": layers,
        "constraint": constraint, "dtype": dtype, "device": device, "seed": seed,
        "seconds": seconds, "rank_tolerance": rank_tolerance,
    }  # fmt: skip
    config = configure(preset, given, prior, settings, split)
    options.check_device(config.device)
    released = load_checkpoint(checkpoint, arch)
    knowledge = grant(
        checkpoint, released, shape=shape, value_range=value_range, mean=mean,
        mean_provenance=mean_provenance, sample_count=sample_count, label_balance=label_balance,
        init=init, loss=loss, weight_decay=weight_decay,
    )  # fmt: skip
    if dry_run:
        _dry_run(released, knowledge, config, json, quiet)
        return
    if out is None:
        raise InputError("An attack needs a folder to write.", "Say --out runs/a, or --dry-run.")
    request = request_of(checkpoint, released, config)
    with AttackRun.open(out) as run:
        found = run.finished(request, knowledge)
        reused = found is not None
        if found is None:
            with attack_progress(not (json or quiet)) as watch:
                found = run.attack(released, knowledge, config, request, preset, watch)
    _refuse_divergence(found, out)
    if json:
        print_json(read_summary(out))
    elif not quiet:
        if reused:
            print_line(f"{out} holds this attack, finished; it is shown again.")
        show(found, out)


def show(found: Reconstruction, out: Path) -> None:
    """The attack as a person reads it; residuals are norms, relative to the target's."""
    summary = found.to_json()
    rows = [
        (str(run), part["status"], number(part["final_loss"]), number(part["loss"]),
         *(number(value, 3) for value in part["residuals"].values()))
        for run, part in enumerate(summary["runs"][:ROWS])
    ]  # fmt: skip
    columns = ("restart", "status", "final loss", "kept loss", *found.layer_names)
    print_table(f"{found.attack}: loss, and relative residual of every layer", columns, rows)
    if found.restarts > ROWS:
        print_line(f"and {found.restarts - ROWS} more restarts in attack.json")
    print_line(
        f"{summary['candidates']} candidates, {summary['selected']} selected, "
        f"{summary['consensus']} of them held by several restarts"
    )
    if found.second_order:
        _show_growth(found)
    print_line(f"granted: {found.knowledge.line}")
    print_line(f"{found.seconds:.1f} seconds; written to {out}")
    for note in found.notes:
        print_line(f"note: {note}")


def _show_growth(found: Reconstruction) -> None:
    """How many candidates each way added or removed, and where the restarts ended."""
    kinds = [event["kind"] for event in found.events]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print_line(f"growth: {counts or 'no round'}")
    for run, part in enumerate(found.second_order[:ROWS]):
        said = "is" if part["stationary"] else "is not"
        print_line(
            f"restart {run} {said} second-order stationary at eps {part['eps']:g}: gradient "
            f"{part['gradient']:.3g}, least curvature {part['lowest_curvature']:.3g}"
        )


def _dry_run(
    released: Checkpoint, knowledge: Knowledge, config: AttackConfig, json: bool, quiet: bool
) -> None:
    """What the attack will cost; the time is measured on this device."""
    from residuum.attacks import estimate

    found = estimate(released, knowledge, config)
    if json:
        print_json(found.to_json())
        return
    if quiet:
        return
    memory = ", ".join(f"{name} {size / 2**20:.4g}" for name, size in found.memory.items())
    layers = ", ".join(f"{name} {flops / 1e9:.4g}" for name, flops in found.flops_by_layer.items())
    rows = [
        ("network", found.arch),
        ("parameters", str(found.parameters)),
        ("candidates", f"{found.restarts} x {found.candidates}, {found.dimensions} numbers each"),
        ("unknowns", str(found.unknowns)),
        ("steps", str(found.steps)),
        (
            "GFLOP per step",
            f"{found.flops_per_step / 1e9:.4g}" + (f" ({layers})" if layers else ""),
        ),
        ("memory (MiB)", f"{sum(found.memory.values()) / 2**20:.4g} ({memory})"),
        ("time per step", f"{1e3 * found.step_seconds:.4g} ms on {found.device} ({found.dtype})"),
        ("rate", f"{found.flops_per_second / 1e9:.4g} GFLOP/s"),
        ("whole attack", f"about {found.seconds:.3g} seconds"),
    ]
    print_table("dry run: nothing was attacked", ("figure", "value"), rows)
    for note in found.notes:
        print_line(f"note: {note}")


def _refuse_divergence(found: Reconstruction, out: Path) -> None:
    from residuum.errors import InconclusiveError

    if all(status == "diverged" for status in found.status):
        what = "The attack" if found.restarts == 1 else f"All {found.restarts} restarts"
        raise InconclusiveError(
            f"{what} diverged; what there is stands in {str(out)!r}.",
            "Lower --lr-x or --lr-lam.",
        )
