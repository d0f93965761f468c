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
            help="Activation function: linear, quadratic, cubic, quartic, quintic or poly:c0,c1,.... "
            "Required if the file does not hold the activation function.",
            metavar="ACTIVATION",
            completer=lambda _: ("linear", "quadratic", "cubic", "quartic", "quintic", "poly:"),
        ),
    ] = None,
    rank: Annotated[
        int | None,
        Parameter(help="Dimension of the linear span of the training samples, if known."),
    ] = None,
    norm: Annotated[
        float | None,
        Parameter(
            help="Norm of every training sample, if known. The norm determines the scale of recovered "
            "samples."
        ),
    ] = None,
    augmented: Annotated[
        bool,
        Parameter(
            help="The last coordinate of every sample is the constant 1. This constant determines the "
            "scale and the sign of recovered samples."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        Parameter(
            help="Training samples, an .npz file with the arrays x and y. The command then also reports "
            "their smallest margin."
        ),
    ] = None,
    seed: Annotated[
        int,
        Parameter(
            help="Seed of the random numbers that the recovery of samples uses.", show_default=True
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        Parameter(help="Folder for the results: the recovered samples, a summary and a picture."),
    ] = None,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
) -> None:
    """Recover the samples of a polynomial network, or report what its weights determine instead."""
    from residuum.records import Dataset
    from residuum.verbs.identifying import identify

    samples = Dataset.from_npz(data) if data is not None else None
    identification = identify(
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
    output.print_result(identification.to_json(), lambda: show(identification))


def show(result: Identification) -> None:
    """Print the quantities that decide whether samples can be recovered, and the recovered samples.

    The last lines say what the weights leave undetermined, such as the sign of the samples.
    """
    degree = result.order - 1
    neuron_text = f"{result.carrying} neurons hold 99.9% of |theta|^2"
    normalized_margin_text = f"normalized margin {format_number(result.normalized_margin)}"
    margin_text = "needs --data" if result.min_margin is None else format_number(result.min_margin)
    table_rows = [
        ("order", str(result.order), f"degree {degree} + 1"),
        (
            "r",
            str(result.r),
            f"dimension of the span of the neurons; singular value r + 1 is "
            f"{format_number(result.spectral_gap)} of singular value r; "
            f"{format_number(result.outside)} of the norm of W is outside the span",
        ),
        (
            "rank of K",
            f"{result.rank_k} of N_r = {result.n_r}",
            f"condition {format_number(result.cond_k)}",
        ),
        (
            "balance gap",
            format_number(result.balance_gap),
            f"|W_j|^2 = {degree} a_j^2 at a KKT point",
        ),
        ("neurons", f"{result.neurons} live, {result.dead} dead", neuron_text),
        (
            "|theta|, min margin",
            f"{format_number(result.theta_norm)}, {margin_text}",
            normalized_margin_text,
        ),
        ("method", result.method, f"relative residual {format_number(result.residual)}"),
    ]
    print_table(result.arch, ("what", "value", "meaning"), table_rows)
    if len(result.x):
        certified_count = int(result.certified.sum())
        sample_values = zip(result.weights, result.residuals, result.certified, strict=True)
        print_table(
            f"{len(result.x)} samples, {certified_count} certified; {result.scale}",
            ("sample", "weight lam y", "residual", "flag"),
            [
                (
                    str(i),
                    format_number(float(b)),
                    format_number(float(e), 2),
                    "certified" if c else "heuristic",
                )
                for i, (b, e, c) in enumerate(sample_values)
            ],
        )
    if result.aggregate is not None:
        print_line(
            f"aggregate sum_i lam_i y_i x_i: norm {format_number(float(result.aggregate.norm()))}"
        )
    if result.eigenvalues is not None:
        eigenvalue_text = " ".join(format_number(v) for v in result.eigenvalues.tolist())
        print_line(f"eigenvalues of the moment matrix: {eigenvalue_text}")
    print_line(f"not determined by the weights: {result.symmetry}")
    print_notes(result.notes)
