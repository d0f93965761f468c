"""``residuum certify``: check how training samples explain a network, or certify a reconstruction.

A certificate of a reconstruction bounds what the reconstruction must share with every other training set that
fits the same weights.

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

MAX_ROWS = 30  # maximal number of samples in the printed table
COLUMNS_EXPLAINED = (
    "others keep at least: share of the energy (squared norm) of a sample that every other training set is "
    "proved to keep. least found: share that the farthest training set found by a search keeps. distance at "
    "most: largest Euclidean distance of the image of another training set from the sample."
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
            help="Folder of a finished attack. The certificate then proves how much every other training "
            "set that fits the same weights must share with the images that this attack reconstructed. "
            "Without this option, the command measures how well the samples in --data satisfy the KKT "
            "equation (the equation of a network with maximal margin).",
            metavar="RUN",
        ),
    ] = None,
    candidates: Annotated[
        Literal["selected", "best"],
        Parameter(
            help="With --reconstruction: which candidates (reconstructed images) to certify. selected: "
            "the candidates that several restarts of the attack found. best: all candidates of the best "
            "restart.",
            show_default=True,
        ),
    ] = "selected",
    samples: Annotated[
        int | None,
        Parameter(
            help="With --reconstruction: number of candidates (reconstructed images) to certify, starting "
            "from the first."
        ),
    ] = None,
    device: options.Device = "cpu",
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for the file certificate.json. With --reconstruction, folder for the files "
            "uniqueness.json, uniqueness.safetensors and ambiguity.png."
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
    rivals: Annotated[
        Literal["tied", "best"],
        Parameter(
            help="For networks with several classes: which wrong classes of a sample get a multiplier (a "
            "term) in the KKT equation. best: only the wrong class with the largest output. tied: every "
            "wrong class that shares the largest output.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = "tied",
    kink_tolerance: Annotated[
        float,
        Parameter(
            help="Tolerance for kinks. A kink is a sample at which the input of a ReLU is zero. The input "
            "counts as zero if its relative size is below this number.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = 1e-3,
    share: Annotated[
        float,
        Parameter(
            help="With --reconstruction: the certificate bounds how far an image of another training set "
            "can be from a candidate (a reconstructed image). It considers only images whose multiplier "
            "(weight) is at least this share of the candidate's multiplier.",
            group=options.EXPERT,
            show_default=True,
        ),
    ] = 0.1,
) -> None:
    """Measure how well samples explain the weights of a network, or how unique a reconstruction is."""
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
            f"--samples must be positive; got {samples}.",
            "Leave --samples out to certify all candidates.",
        )
    if data is not None:
        raise InputError(
            "The options --data and --reconstruction ask for two different certificates; got both options.",
            "Pass --data or --reconstruction.",
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
    """Print a table that shows how well samples explain the weights of a network (KKT equation).

    Args:
        certificate: The KKT certificate: residuals, margins and multipliers of the network at samples.
        title: Title of the table.
    """
    lam, n = certificate.to_json()["multipliers"], format_number
    clarke_text = (
        f"{certificate.kinks_freed} of {certificate.kinks} neurons with a kink may be partly active"
    )
    table_rows = [
        (
            "KKT residual, plain",
            n(certificate.residual_plain),
            "||theta - sum lam y grad Phi|| / ||theta||",
        ),
        ("KKT residual, Clarke", n(certificate.residual_clarke), clarke_text),
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
    print_table(title, ("what", "value", "meaning"), table_rows)
    print_notes(certificate.notes)


def show_uniqueness(certified: CertifiedReconstruction, title: str) -> None:
    """Print a table with the uniqueness certificate of a reconstruction.

    For every sample, the table says how many restarts found the sample, and how much of the sample every
    other training set must share.

    Args:
        certified: The reconstruction with its uniqueness certificate.
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
        print_line(f"{len(uniqueness) - MAX_ROWS} more samples are in the output of --json")
    for line in (*uniqueness.sentences, COLUMNS_EXPLAINED):
        print_wrapped(line)
    print_wrapped(f"known to the attacker: {certified.reconstruction.knowledge.line}")
    print_notes(uniqueness.notes)
