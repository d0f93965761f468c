"""``residuum certify``: how close to a KKT point, and what equal pairs keep of a reconstruction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli import options
from residuum.cli.output import number, print_json, print_line, print_table
from residuum.cli.paths import own_data
from residuum.cli.unique import certify_reconstruction
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.records import Certificate

EXAMPLES = """Examples:

residuum certify runs/m

residuum certify model.safetensors --data train.npz --json

residuum certify weights.pt --arch mlp:784-100-10 --data train.npz --rivals best

residuum certify runs/m --reconstruction runs/a --out runs/a/certificate
"""


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
    from residuum.theory import certify

    released = load_checkpoint(checkpoint, arch)
    if reconstruction is not None:
        if data is not None:
            raise InputError(
                "--data and --reconstruction are two different certificates.", "Give one of them."
            )
        options.check_device(device)
        certify_reconstruction(
            checkpoint, released, reconstruction, task=task, which=candidates, samples=samples,
            tolerance=tolerance, device=device, out=out, json=json, quiet=quiet,
        )  # fmt: skip
        return
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
