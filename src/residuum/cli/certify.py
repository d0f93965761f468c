"""``residuum certify``: how close to a KKT point, and what equal pairs keep of a reconstruction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from residuum.cli import options
from residuum.cli.output import certificate_progress, number, print_json, print_line, print_table
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.records import Certificate
    from residuum.verbs.certifying import Certified

EXAMPLES = """Examples:

residuum certify runs/m

residuum certify model.safetensors --data train.npz --json

residuum certify weights.pt --arch mlp:784-100-10 --data train.npz --rivals best

residuum certify runs/m --reconstruction runs/a --out runs/a/certificate
"""
ROWS = 30  # of a table


def command(
    checkpoint: options.CheckpointPath,
    data: options.OwnData = None,
    arch: options.Arch = None,
    task: options.Task = "auto",
    rivals: Annotated[
        str, typer.Option(help="Multiclass: a multiplier per tied rival, or for the best one.")
    ] = "tied",
    kink_tolerance: Annotated[
        float, typer.Option(help="Relative pre-activation below which a pair is a kink.")
    ] = 1e-3,
    reconstruction: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Folder of an attack: what equal pairs keep of its reconstructions instead.",
            show_default=False,
        ),
    ] = None,
    candidates: Annotated[
        str,
        typer.Option(
            help="With RUN: selected (what several restarts hold) or best (all of the best restart)."
        ),
    ] = "selected",
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="With RUN: certify the first so many.", show_default=False),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="With RUN: change of the residual, over the layers' norms, that still counts as none."
        ),
    ] = 1e-6,
    device: options.Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for certificate.json; with RUN for uniqueness.json, .safetensors and "
            "ambiguity.png.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure KKT residuals and margins on samples, or what equal pairs keep of a reconstruction."""
    from residuum.checkpoints import build_model, load_checkpoint
    from residuum.records import Dataset, write_json
    from residuum.records.data import own_data
    from residuum.theory import certify
    from residuum.verbs.certifying import certified

    if reconstruction is not None:
        if data is not None:
            raise InputError(
                "--data and --reconstruction are two different certificates.", "Give one of them."
            )
        options.check_device(device)
        spoken = not (json or quiet)
        with certificate_progress(spoken) as watch:
            answer = certified(
                checkpoint, reconstruction, candidates, samples, tolerance, task, arch, device, out,
                watch, print_line if spoken else None,
            )  # fmt: skip
        if json:
            print_json(answer.to_json())
        elif spoken:
            show_uniqueness(
                answer, f"{answer.arch}, {len(answer.unique)} of {candidates}: {reconstruction}"
            )
            if out is not None:
                print_line(f"written to {out}")
        return
    released = load_checkpoint(checkpoint, arch)
    given = Dataset.from_npz(own_data(checkpoint, data))
    wanted = released.task if task == "auto" and released.task else task
    found = certify(
        build_model(released), given.x, given.y,
        task=wanted, rivals=rivals, kink_tolerance=kink_tolerance,
    )  # fmt: skip
    if out is not None:
        write_json(out / "certificate.json", found.to_json())
    if json:
        print_json(found.to_json())
    elif not quiet:
        show(found, f"{released.arch} on {found.samples} samples")


def show(found: Certificate, title: str) -> None:
    """The certificate as a person reads it."""
    lam = found.to_json()["multipliers"]
    rows = [
        ("KKT residual, plain", number(found.residual_plain), "||theta - sum lam y grad Phi|| / ||theta||"),
        ("KKT residual, Clarke", number(found.residual_clarke),
         f"gates free at {found.kinks_freed} of {found.kinks} kinks"),
        *((f"  {part.name}", number(part.residual), "plain, over its own norm") for part in found.layers),
        ("margin", number(found.margin), f"normalised {number(found.normalized_margin)}"),
        ("eps, delta", f"{number(found.eps)}, {number(found.delta)}",
         f"||theta|| = {number(found.theta_norm)}"),
        ("multipliers", f"{lam['active']} active", f"sum {number(lam['sum'])}, max {number(lam['max'])}"),
        ("homogeneity order", number(found.homogeneity_order), f"identity gap {number(found.identity)}"),
        ("balance gap", number(found.balance), "0 at a KKT point"),
        ("status", found.status, ""),
    ]  # fmt: skip
    print_table(title, ("what", "value", "meaning"), rows)
    for note in found.notes:
        print_line(f"note: {note}")


def show_uniqueness(found: Certified, title: str) -> None:
    """Restart agreement and certificate side by side."""
    columns = (
        "#", "label", "restarts", "conf.", "pairs keep", "at least", "radius", "/ size", "stopped by",
    )  # fmt: skip
    unique, rows = found.unique, []
    for k, row in enumerate(found.to_json()["per_sample"][:ROWS]):
        bounded = not row["unbounded"] and row["size"]
        rows.append(
            (
                str(k), f"{row['label']:g}", *_agreement(row, found.found.restarts),
                number(row["determined_energy"], 3), number(row["determined_at_least"], 3),
                "free" if row["unbounded"] else number(row["radius"], 3),
                number(row["radius"] / row["size"], 3) if bounded else "-", row["blocked_by"],
            )
        )  # fmt: skip
    print_table(title, columns, rows)
    if len(unique) > ROWS:
        print_line(f"and {len(unique) - ROWS} more in the JSON")
    space = unique.null_space
    undoubled = _span(space.undoubled, space.undoubled_most)
    print_line(
        f"null space: {undoubled} dimensions as they are, "
        f"{_span(space.doubled, space.doubled_most)} with every candidate doubled: {space.twins} move "
        f"multiplier between equal copies, {space.pairs_inside} are opposite moves inside row(W1), "
        f"{space.pairs_outside} outside; {space.patterns} patterns for {unique.samples} candidates"
    )
    print_line(
        f"radius: both halves of a candidate move that far, one each way, before the residual changes "
        f"by {unique.tolerance:g} of the layers' norms; pairs keep: least energy of an image of such "
        "an equal pair over that of this one, as attained; at least: a lower bound of it, for pairs"
    )
    print_line("not covered, and may keep less: unequal splits, exchanges between candidates")
    print_line(f"granted to the attacker: {found.found.knowledge.line}")
    for note in unique.notes:
        print_line(f"note: {note}")


def _agreement(row: dict[str, Any], restarts: int) -> tuple[str, str]:
    if row["support"] is None:
        return "-", "-"
    return f"{row['support']}/{restarts}", number(row["confidence"], 2)


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
