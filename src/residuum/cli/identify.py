"""``residuum identify``: what the weights of a polynomial network determine of its samples.

Examples:

residuum identify cubic.safetensors

residuum identify weights.pt --activation cubic --rank 8 --out found

residuum identify weights.pt --activation poly:0,1,0,-0.5 --data train.npz --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.records.identification import Identification


app = options.command_app("identify", __doc__)


@app.default
def command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    activation: Annotated[
        str | None,
        Parameter(
            help="linear, quadratic, cubic, quartic, quintic or poly:c0,c1,.... Required if the file does "
            "not hold it.",
            metavar="ACTIVATION",
            completer=lambda _: ("linear", "quadratic", "cubic", "quartic", "quintic", "poly:"),
        ),
    ] = None,
    rank: Annotated[
        int | None, Parameter(help="Dimension r of the samples' span, if known.")
    ] = None,
    norm: Annotated[
        float | None, Parameter(help="Norm of every sample, if known. It determines the scale.")
    ] = None,
    augmented: Annotated[
        bool, Parameter(help="Samples end in a constant 1, which determines scale and sign.")
    ] = False,
    data: Annotated[
        Path | None, Parameter(help="An .npz with x and y, to report the smallest margin.")
    ] = None,
    seed: Annotated[
        int, Parameter(help="Seed of the random slices and starts.", show_default=True)
    ] = 0,
    out: Annotated[
        Path | None, Parameter(help="Folder for the samples, the figures and a picture.")
    ] = None,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
) -> None:
    """Recover the samples of a polynomial network, or say what is determined instead."""
    from residuum.records import Dataset
    from residuum.verbs.identifying import identify

    samples = Dataset.from_npz(data) if data is not None else None
    known: dict[str, Any] = {"rank": rank, "norm": norm, "augmented": augmented, "arch": arch}
    found = identify(checkpoint, activation, **known, data=samples, seed=seed, out=out)
    output.result(found.to_json(), lambda: show(found))


def show(found: Identification) -> None:
    """The conditions, the samples, and what to make of them."""
    alpha = found.order - 1
    carrying = f"{found.carrying} hold 99.9% of |theta|^2"
    normalized = f"normalized {number(found.normalized_margin)}"
    margin = "needs --data" if found.min_margin is None else number(found.min_margin)
    rows = [
        ("order", str(found.order), f"degree {alpha} + 1"),
        (
            "r",
            str(found.r),
            f"span of the neurons; next singular value {number(found.spectral_gap)} "
            f"of the last one kept, {number(found.outside)} of the norm of W left out",
        ),
        ("rank of K", f"{found.rank_k} of N_r = {found.n_r}", f"condition {number(found.cond_k)}"),
        ("balance gap", number(found.balance_gap), f"|W_j|^2 = {alpha} a_j^2 at a KKT point"),
        ("neurons", f"{found.neurons} live, {found.dead} dead", carrying),
        ("|theta|, min margin", f"{number(found.theta_norm)}, {margin}", normalized),
        ("method", found.method, f"relative residual {number(found.residual)}"),
    ]
    print_table(found.arch, ("what", "value", "meaning"), rows)
    if len(found.x):
        sure = int(found.certified.sum())
        every = zip(found.weights, found.residuals, found.certified, strict=True)
        print_table(
            f"{len(found.x)} samples, {sure} certified; {found.scale}",
            ("sample", "weight lam y", "residual", "flag"),
            [
                (str(i), number(float(b)), number(float(e), 2), "certified" if c else "heuristic")
                for i, (b, e, c) in enumerate(every)
            ],
        )
    if found.aggregate is not None:
        print_line(f"aggregate sum_i lam_i y_i x_i: norm {number(float(found.aggregate.norm()))}")
    if found.eigenvalues is not None:
        values = " ".join(number(v) for v in found.eigenvalues.tolist())
        print_line(f"eigenvalues of the moment matrix: {values}")
    print_line(f"not determined: {found.symmetry}")
    print_notes(found.notes)
