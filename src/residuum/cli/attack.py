"""``residuum attack``: training samples out of weights.

Examples:

residuum attack model.safetensors --out runs/a

residuum attack runs/m --preset haim2022-cifar-b9dfyspx --steps 10000 --out runs/b

residuum attack runs/m --shape 1,28,28 --value-range 0,1 --mean 0.13 --restarts 8 --out runs/c

residuum attack runs/m --candidates 2000 --dry-run

residuum attack runs/m --objective ntk --init own --prior high-frequency:1e-8 --set momentum=0.8 --out runs/n
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from residuum.cli import options
from residuum.cli.options import option
from residuum.cli.output import attack_progress, number, print_line, print_notes, print_table
from residuum.settings import AttackConfig
from residuum.settings.presets import GROWTH_PRESETS

if TYPE_CHECKING:
    from residuum.attacks.cost import Estimate
    from residuum.records import Reconstruction

ROWS = 20  # restarts shown; the rest stands in attack.json


@dataclass(frozen=True)
class Preset:
    """What is laid over what; read by ``options.configure``."""

    preset: str = options.PRESET
    split: str | None = option(
        "Grow the candidate set: paper is Shen et al. 2026. More: --set split_every=1000 and others.",
        choices=GROWTH_PRESETS,
    )
    prior: list[str] | None = options.PRIOR
    settings: list[str] | None = options.SET


def command(
    checkpoint: options.CheckpointPath,
    *,
    out: Path | None = option(
        "Folder to write; an unfinished attack there is continued. Required unless --dry-run."
    ),
    chosen: Preset,
    settings: Annotated[dict[str, Any], options.Generated(AttackConfig)],
    arch: str | None = options.ARCH,
    model: str | None = options.MODEL,
    trust_code: bool = options.TRUST_CODE,
    granted: options.Granted,
    tuning: options.Tuned,
    surface: str | None = option(
        "Attack this: weights, change (from the start) or moment (optimiser state); default: what "
        "--objective is about.",
        choices=("weights", "change", "moment"),
    ),
    dry_run: bool = option(
        "Print what the attack will cost, measured in two seconds; no attack.", False, "--dry-run"
    ),
    no_plugins: bool = options.NO_PLUGINS,  # seen by ``main`` before anything is read
    voice: options.Voice,
) -> None:
    """Reconstruct training samples from weights and what the attacker knows; the data is never opened."""
    from residuum.attacks import estimate
    from residuum.attacks.run import on_surface
    from residuum.errors import InconclusiveError, InputError
    from residuum.io.attacker_knowledge import attacker_knowledge, parse_shape
    from residuum.io.loading import load_network, trained_and_base
    from residuum.io.release import open_release
    from residuum.records.rundir import read_json
    from residuum.verbs.attacking import SUMMARY, AttackRun, request_of

    config = options.configure(**vars(chosen), **settings)
    options.check_device(config.device)
    shape = None if granted.shape is None else parse_shape(granted.shape)
    checkpoint, base = trained_and_base(checkpoint, tuning.base, tuning.adapter)
    release = open_release(checkpoint)
    released = load_network(
        release, arch=arch, model=model, trust_code=trust_code, shape=shape, base=base
    )
    knowledge = attacker_knowledge(release, released, base=base, **vars(granted))
    config = on_surface(surface or "", knowledge, config)
    if dry_run:
        cost = estimate(released, knowledge, config)
        voice.answer(cost.to_json(), lambda: _show_cost(cost))
        return
    if out is None:
        raise InputError("An attack needs a folder to write.", "Say --out runs/a, or --dry-run.")
    request = request_of(release, released, config)
    with AttackRun.open(out) as run:
        found = run.finished(request, knowledge)
        reused = found is not None
        if found is None:
            with attack_progress(voice.spoken) as watch:
                found = run.attack(released, knowledge, config, request, chosen.preset, watch)
    if all(status == "diverged" for status in found.status):
        what = "The attack" if found.restarts == 1 else f"All {found.restarts} restarts"
        said = f"{what} diverged; what there is stands in {str(out)!r}."
        raise InconclusiveError(said, "Lower --lr-x or --lr-lam.")
    if reused and voice.spoken:
        print_line(f"{out} holds this attack, finished; it is shown again.")
    voice.answer(read_json(out / SUMMARY), lambda: show(found, out))


def show(found: Reconstruction, out: Path) -> None:
    """The attack as a person reads it; residuals are norms, relative to the target's."""
    summary = found.to_json()
    rows = []
    for run, part in enumerate(summary["runs"][:ROWS]):
        losses = number(part["final_loss"]), number(part["loss"])
        residuals = (number(value, 3) for value in part["residuals"].values())
        rows.append((str(run), part["status"], *losses, *residuals))
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
    print_notes(found.notes)


def _show_growth(found: Reconstruction) -> None:
    """Print how many events of each kind there were, and where the restarts ended."""
    kinds = [event["kind"] for event in found.events]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print_line(f"growth: {counts or 'no round'}")
    for run, part in enumerate(found.second_order[:ROWS]):
        said = "is" if part["stationary"] else "is not"
        print_line(
            f"restart {run} {said} second-order stationary at eps {part['eps']:g}: gradient "
            f"{part['gradient']:.3g}, least curvature {part['lowest_curvature']:.3g}"
        )


def _show_cost(found: Estimate) -> None:
    """What the attack will cost; the time is measured on this device."""
    memory = ", ".join(f"{name} {size / 2**20:.4g}" for name, size in found.memory.items())
    layers = ", ".join(f"{name} {flops / 1e9:.4g}" for name, flops in found.flops_by_layer.items())
    rows = [
        ("network", found.arch),
        ("parameters", str(found.parameters)),
        ("candidates", f"{found.restarts} x {found.candidates}, {found.dimensions} numbers each"),
        ("unknowns", str(found.unknowns)),
        ("steps", str(found.steps)),
        ("GFLOP per step", f"{found.flops_per_step / 1e9:.4g}{layers and f' ({layers})'}"),
        ("memory (MiB)", f"{sum(found.memory.values()) / 2**20:.4g} ({memory})"),
        ("time per step", f"{1e3 * found.step_seconds:.4g} ms on {found.device} ({found.dtype})"),
        ("rate", f"{found.flops_per_second / 1e9:.4g} GFLOP/s"),
        ("whole attack", f"about {found.seconds:.3g} seconds"),
    ]
    print_table("dry run: nothing was attacked", ("figure", "value"), rows)
    print_notes(found.notes)
