"""``residuum identify``: recover the samples of a polynomial network from its weights.

Examples:
residuum identify cubic.safetensors

residuum identify weights.pt --activation cubic --rank 8 --out found

residuum identify weights.pt --activation poly:0,1,0,-0.5 --data train.npz --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import format_number, print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.records.identification import Identification


app = options.command_app("identify", __doc__)


@app.default
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    activation: Annotated[
        str | None,
        Parameter(
            help="Activation: linear, quadratic, cubic, quartic, quintic or poly:c0,c1,.... Required if "
            "the file does not hold it.",
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
        int, Parameter(help="Seed of the random slices and starting points.", show_default=True)
    ] = 0,
    out: Annotated[
        Path | None, Parameter(help="Folder for the samples, the figures and a picture.")
    ] = None,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
) -> None:
    """Recover the samples of a polynomial network, or report what is determined instead."""
    from residuum.records import Dataset
    from residuum.verbs.identifying import identify

    samples = Dataset.from_npz(data) if data is not None else None
    result = identify(
        checkpoint,
        activation,
        rank=rank,
        norm=norm,
        augmented=augmented,
        data=samples,
        seed=seed,
        arch=arch,
        out=out,
    )
    output.print_result(result.to_json(), lambda: show(result))


def show(result: Identification) -> None:
    """Print the conditions, the recovered samples and what is not determined."""
    alpha = result.order - 1
    carrying = f"{result.carrying} carry 99.9% of |theta|^2"
    normalized = f"normalized {format_number(result.normalized_margin)}"
    margin = "needs --data" if result.min_margin is None else format_number(result.min_margin)
    rows = [
        ("order", str(result.order), f"degree {alpha} + 1"),
        (
            "r",
            str(result.r),
            f"span of the neurons; next singular value {format_number(result.spectral_gap)} "
            f"relative to the last in it, {format_number(result.outside)} of the norm of W outside",
        ),
        (
            "rank of K",
            f"{result.rank_k} of N_r = {result.n_r}",
            f"condition {format_number(result.cond_k)}",
        ),
        (
            "balance gap",
            format_number(result.balance_gap),
            f"|W_j|^2 = {alpha} a_j^2 at a KKT point",
        ),
        ("neurons", f"{result.neurons} live, {result.dead} dead", carrying),
        ("|theta|, min margin", f"{format_number(result.theta_norm)}, {margin}", normalized),
        ("method", result.method, f"relative residual {format_number(result.residual)}"),
    ]
    print_table(result.arch, ("what", "value", "meaning"), rows)
    if len(result.x):
        certified = int(result.certified.sum())
        samples = zip(result.weights, result.residuals, result.certified, strict=True)
        print_table(
            f"{len(result.x)} samples, {certified} certified; {result.scale}",
            ("sample", "weight lam y", "residual", "flag"),
            [
                (
                    str(i),
                    format_number(float(b)),
                    format_number(float(e), 2),
                    "certified" if c else "heuristic",
                )
                for i, (b, e, c) in enumerate(samples)
            ],
        )
    if result.aggregate is not None:
        print_line(
            f"aggregate sum_i lam_i y_i x_i: norm {format_number(float(result.aggregate.norm()))}"
        )
    if result.eigenvalues is not None:
        values = " ".join(format_number(v) for v in result.eigenvalues.tolist())
        print_line(f"eigenvalues of the moment matrix: {values}")
    print_line(f"not determined: {result.symmetry}")
    print_notes(result.notes)
