"""``residuum certify``: measure how close a network is to a KKT point, or certify a reconstruction.

A certificate of a reconstruction bounds what it must share with every other training set that explains
the same weights.

Examples:
residuum certify runs/m

residuum certify model.safetensors --data train.npz --json

residuum certify weights.pt --arch mlp:784-100-10 --data train.npz --rivals best

residuum certify runs/m --reconstruction runs/a --out runs/a/certificate
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import (
    certificate_progress,
    format_number,
    print_line,
    print_notes,
    print_table,
    print_wrapped,
)
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.records import Certificate
    from residuum.verbs.certifying import CertifiedReconstruction

MAX_ROWS = 30
COLUMNS_EXPLAINED = (
    "least found: what the farthest such set that was found still shares with the reconstruction. distance "
    "at most: the largest Euclidean distance at which the other image can lie."
)


app = options.command_app("certify", __doc__)


@app.default
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    data: options.OwnData = None,
    task: options.TaskOption = "auto",
    reconstruction: Annotated[
        Path | None,
        Parameter(
            help="Folder of an attack. Certify what other training sets share with its reconstructions, "
            "instead of measuring samples.",
            metavar="RUN",
        ),
    ] = None,
    candidates: Annotated[
        Literal["selected", "best"],
        Parameter(
            help="With RUN: selected (those that several restarts agree on) or best (all of the best "
            "restart).",
            show_default=True,
        ),
    ] = "selected",
    samples: Annotated[
        int | None, Parameter(help="With RUN: number of candidates to certify, from the first.")
    ] = None,
    device: options.Device = "cpu",
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for certificate.json; with RUN for uniqueness.json, .safetensors and "
            "ambiguity.png."
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
    rivals: Annotated[
        Literal["tied", "best"],
        Parameter(
            help="With several classes: a multiplier for every tied rival class, or for the best one only.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = "tied",
    kink_tolerance: Annotated[
        float,
        Parameter(
            help="Relative pre-activation below which a neuron has a kink at a sample.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = 1e-3,
    share: Annotated[
        float,
        Parameter(
            help="With RUN: smallest part of a candidate's weight that another image takes over.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = 0.1,
) -> None:
    """Measure KKT residuals and margins on samples, or certify a reconstruction."""
    from residuum.verbs.certifying import certify_kkt, certify_reconstruction

    if reconstruction is None:
        certificate, title = certify_kkt(
            checkpoint,
            data,
            arch=arch,
            task=task,
            rivals=rivals,
            kink_tolerance=kink_tolerance,
            out=out,
        )
        output.print_result(certificate.to_json(), lambda: show(certificate, title))
        return
    if samples is not None and samples < 1:
        raise InputError(
            f"--samples must be positive; got {samples}.", "Leave it out to certify all candidates."
        )
    if data is not None:
        raise InputError(
            "--data and --reconstruction ask for two different certificates; got both.",
            "Pass one of them.",
        )
    options.check_device(device)
    with certificate_progress(output.visible) as watch:
        certified = certify_reconstruction(
            checkpoint,
            reconstruction,
            candidates=candidates,
            samples=samples,
            share=share,
            arch=arch,
            device=device,
            out=out,
            watch=watch,
            show_cost=print_line if output.visible else None,
        )
    title = f"{certified.arch}, {len(certified.uniqueness)} of {candidates}: {reconstruction}"
    output.print_result(certified.to_json(), lambda: show_uniqueness(certified, title))
    if out is not None and output.visible:
        print_line(f"written to {out}")


def show(certificate: Certificate, title: str) -> None:
    """Print a certificate of a KKT point as a table.

    Args:
        certificate: The certificate.
        title: Title of the table.
    """
    lam, n = certificate.to_json()["multipliers"], format_number
    kinks = f"neurons with a kink at a sample count partly: {certificate.kinks_freed} of {certificate.kinks}"
    rows = [
        (
            "KKT residual, plain",
            n(certificate.residual_plain),
            "||theta - sum lam y grad Phi|| / ||theta||",
        ),
        ("KKT residual, Clarke", n(certificate.residual_clarke), kinks),
        *(
            (f"  {layer.name}", n(layer.residual), "plain, relative to the norm of the layer")
            for layer in certificate.layers
        ),
        ("margin", n(certificate.margin), f"normalized {n(certificate.normalized_margin)}"),
        (
            "eps, delta",
            f"{n(certificate.eps)}, {n(certificate.delta)}",
            f"||theta|| = {n(certificate.theta_norm)}",
        ),
        ("multipliers", f"{lam['active']} active", f"sum {n(lam['sum'])}, max {n(lam['max'])}"),
        (
            "homogeneity order",
            n(certificate.homogeneity_order),
            f"identity gap {n(certificate.identity)}",
        ),
        ("balance gap", n(certificate.balance), "0 at a KKT point"),
        ("status", certificate.status, ""),
    ]
    print_table(title, ("what", "value", "meaning"), rows)
    print_notes(certificate.notes)


def show_uniqueness(certified: CertifiedReconstruction, title: str) -> None:
    """Print the agreement of the restarts and the certificate of every sample.

    Args:
        certified: The certified reconstruction.
        title: Title of the table.
    """
    columns = ("#", "label", "restarts", "others keep at least", "least found", "distance at most")
    uniqueness, rows = certified.uniqueness, []
    for k, row in enumerate(certified.to_json()["per_sample"][:MAX_ROWS]):
        support, radius = row["support"], row["radius_most"]
        rows.append(
            (
                str(k),
                f"{row['label']:g}",
                "-" if support is None else f"{support}/{certified.reconstruction.restarts}",
                format_number(row["determined_at_least"], 3),
                format_number(row["determined_energy"], 3),
                "any" if radius is None else format_number(radius, 3),
            )
        )
    print_table(title, columns, rows)
    if len(uniqueness) > MAX_ROWS:
        print_line(f"and {len(uniqueness) - MAX_ROWS} more in the JSON")
    for line in (*uniqueness.sentences, COLUMNS_EXPLAINED):
        print_wrapped(line)
    print_wrapped(f"known to the attacker: {certified.reconstruction.knowledge.line}")
    print_notes(uniqueness.notes)
