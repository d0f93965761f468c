"""``residuum certify``: how close to a KKT point, and what other training sets keep of a reconstruction.

Examples:

residuum certify runs/m

residuum certify model.safetensors --data train.npz --json

residuum certify weights.pt --arch mlp:784-100-10 --data train.npz --rivals best

residuum certify runs/m --reconstruction runs/a --out runs/a/certificate
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from residuum.cli import options
from residuum.cli.options import option
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


def command(
    checkpoint: options.CheckpointPath,
    *,
    data: Path | None = options.OWN_DATA,
    arch: str | None = options.ARCH,
    task: str = options.TASK,
    rivals: str = option(
        "Multiclass: a multiplier per tied rival, or for the best one.",
        "tied",
        choices=("tied", "best"),
        place="expert",
    ),
    kink_tolerance: float = option(
        "Relative pre-activation below which a pair is a kink.", 1e-3, place="expert"
    ),
    reconstruction: Path | None = option(
        "Folder of an attack: what other sets keep of its reconstructions instead.", metavar="RUN"
    ),
    candidates: str = option(
        "With RUN: selected (what several restarts hold) or best (all of the best restart).",
        "selected",
        choices=("selected", "best"),
    ),
    samples: int | None = option("With RUN: certify the first so many.", min=1),
    share: float = option(
        "With RUN: least part of a candidate's weight that another image takes over.",
        0.1,
        place="expert",
    ),
    device: str = options.DEVICE,
    out: Path | None = option(
        "Directory for certificate.json; with RUN for uniqueness.json, .safetensors and ambiguity.png."
    ),
    voice: options.Voice,
) -> None:
    """Measure KKT residuals and margins on samples, or what other sets keep of a reconstruction."""
    from residuum.verbs.certifying import certified, kkt

    if reconstruction is None:
        found, title = kkt(checkpoint, data, arch, task, rivals, kink_tolerance, out)
        voice.answer(found.to_json(), lambda: show(found, title))
        return
    if data is not None:
        rule = "--data and --reconstruction are two different certificates."
        raise InputError(rule, "Give one of them.")
    options.check_device(device)
    with certificate_progress(voice.spoken) as watch:
        how = (candidates, samples, share, arch, device, out)
        say = print_line if voice.spoken else None
        answer = certified(checkpoint, reconstruction, *how, watch=watch, say=say)
    title = f"{answer.arch}, {len(answer.unique)} of {candidates}: {reconstruction}"
    voice.answer(answer.to_json(), lambda: show_uniqueness(answer, title))
    if out is not None and voice.spoken:
        print_line(f"written to {out}")


def show(found: Certificate, title: str) -> None:
    """The certificate as a person reads it."""
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
        ("margin", n(found.margin), f"normalised {n(found.normalized_margin)}"),
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
    for line in (*unique.standing, MEANING):
        print_wrapped(line)
    print_wrapped(f"granted to the attacker: {found.found.knowledge.line}")
    print_notes(unique.notes)
