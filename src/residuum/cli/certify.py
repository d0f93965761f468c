"""``residuum certify``: how close to a KKT point, and what other training sets keep of a reconstruction.

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
    number,
    print_line,
    print_notes,
    print_table,
    print_wrapped,
)
from residuum.errors import InputError

if TYPE_CHECKING:
    from residuum.records import Certificate
    from residuum.verbs.certifying import Certified

ROWS = 30  # of a table
MEANING = (
    "least found: what the farthest such set that was found keeps; distance at most: how far from it, as "
    "Euclidean distance, the other image can lie"
)


app = options.command_app("certify", __doc__)


@app.default
def command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    data: options.OwnData = None,
    task: options.TaskOption = "auto",
    reconstruction: Annotated[
        Path | None,
        Parameter(
            help="Folder of an attack: certify what other training sets share with its reconstructions "
            "instead.",
            metavar="RUN",
        ),
    ] = None,
    candidates: Annotated[
        Literal["selected", "best"],
        Parameter(
            help="With RUN: selected (those that several restarts hold) or best (all of the best restart).",
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
    """Measure KKT residuals and margins on samples, or what other sets keep of a reconstruction."""
    from residuum.verbs.certifying import certified, kkt

    if reconstruction is None:
        found, title = kkt(checkpoint, data, arch, task, rivals, kink_tolerance, out)
        output.result(found.to_json(), lambda: show(found, title))
        return
    if samples is not None and samples < 1:
        raise InputError(f"--samples must be positive; got {samples}.", "Leave it out for all.")
    if data is not None:
        rule = "--data and --reconstruction are two different certificates."
        raise InputError(rule, "Pass one of them.")
    options.check_device(device)
    with certificate_progress(output.visible) as watch:
        how = (candidates, samples, share, arch, device, out)
        say = print_line if output.visible else None
        answer = certified(checkpoint, reconstruction, *how, watch=watch, say=say)
    title = f"{answer.arch}, {len(answer.unique)} of {candidates}: {reconstruction}"
    output.result(answer.to_json(), lambda: show_uniqueness(answer, title))
    if out is not None and output.visible:
        print_line(f"written to {out}")


def show(found: Certificate, title: str) -> None:
    """Print the certificate as a person reads it."""
    lam, n = found.to_json()["multipliers"], number
    freed = f"neurons that switch at a sample count in part: {found.kinks_freed} of {found.kinks}"
    rows = [
        (
            "KKT residual, plain",
            n(found.residual_plain),
            "||theta - sum lam y grad Phi|| / ||theta||",
        ),
        ("KKT residual, Clarke", n(found.residual_clarke), freed),
        *(
            (f"  {part.name}", n(part.residual), "plain, over its own norm")
            for part in found.layers
        ),
        ("margin", n(found.margin), f"normalized {n(found.normalized_margin)}"),
        ("eps, delta", f"{n(found.eps)}, {n(found.delta)}", f"||theta|| = {n(found.theta_norm)}"),
        ("multipliers", f"{lam['active']} active", f"sum {n(lam['sum'])}, max {n(lam['max'])}"),
        ("homogeneity order", n(found.homogeneity_order), f"identity gap {n(found.identity)}"),
        ("balance gap", n(found.balance), "0 at a KKT point"),
        ("status", found.status, ""),
    ]
    print_table(title, ("what", "value", "meaning"), rows)
    print_notes(found.notes)


def show_uniqueness(found: Certified, title: str) -> None:
    """Restart agreement and certificate side by side; the JSON has more of each."""
    columns = ("#", "label", "restarts", "others keep at least", "least found", "distance at most")
    unique, rows = found.unique, []
    for k, row in enumerate(found.to_json()["per_sample"][:ROWS]):
        known, most = row["support"] is not None, row["radius_most"]
        rows.append(
            (
                str(k),
                f"{row['label']:g}",
                f"{row['support']}/{found.found.restarts}" if known else "-",
                number(row["determined_at_least"], 3),
                number(row["determined_energy"], 3),
                "any" if most is None else number(most, 3),
            )
        )
    print_table(title, columns, rows)
    if len(unique) > ROWS:
        print_line(f"and {len(unique) - ROWS} more in the JSON")
    for line in (*unique.sentences, MEANING):
        print_wrapped(line)
    print_wrapped(f"known to the attacker: {found.found.knowledge.line}")
    print_notes(unique.notes)
