"""``residuum attack fill``: infer missing values of training records from the weights.

The attack needs records of the training set in which some values are missing: empty cells, NaN or "?". No
training data is read. The network must be a chain of dense layers with ReLU or LeakyReLU.

The records, together with a reference sample, must have at least 30 known values of every column. If you have
only a few partial records, pass other records of the same kind as the reference. They need not be training
records.

A cell is filled if its false discovery rate q is at most 5%. With fewer than 10 such cells, q must be at most
1%. Other cells stay empty. The file filled.cells.csv lists p and q of every missing cell. The p-value is the
chance that a record that was never trained on gives this much evidence. It is not the probability that the
value is wrong.

One missing value of a record is inferred in columns of any kind. Two or three are inferred if their columns
are continuous, and at half of these rates. A group of one-hot columns is one value.

Examples:
residuum attack fill model.pkl --partial records.csv --out filled.csv

residuum attack fill model.pt --partial record.csv --reference others.csv --out filled.csv
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import print_line, print_notes, print_table

if TYPE_CHECKING:
    from residuum.verbs.filling import FilledTable

NAME = "fill"
MAX_ROWS = 20  # largest number of cells in the printed table

app = options.command_app(NAME, __doc__)
app.help = "Infer missing values of training records that the attacker has in part."


@app.default
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    partial: Annotated[
        Path,
        Parameter(
            help="Table of training records with missing values (.csv, .tsv, .json, .jsonl or .parquet), in "
            "the units of the pipeline if the model file is a pipeline with scalers.",
            metavar="FILE",
            group=options.ATTACKER,
        ),
    ],
    out: Annotated[Path, Parameter(help="The .csv file to write.", metavar="FILE")],
    reference: Annotated[
        Path | None,
        Parameter(
            help="Table of other records of the same kind, which need not be training records. They give "
            "the ranges of the columns.",
            metavar="FILE",
            group=options.ATTACKER,
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        Parameter(help="Name of a column that is no input of the network.", metavar="COLUMN"),
    ] = None,
    columns: Annotated[
        str | None,
        Parameter(
            help="One-hot groups among the inputs, counted from 0, such as 0-2:onehot,5-8:onehot. By "
            "default they are recognized from the records.",
            metavar="FIRST-LAST:TYPE,...",
            group=options.ATTACKER,
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of the decoys.")] = 0,
    output: options.Output = options.OUTPUT,
    arch: options.Arch = None,
    model: options.ModelCode = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Infer missing values of training records that the attacker has in part."""
    from residuum.io.loading import load_network
    from residuum.io.release import open_release
    from residuum.verbs.filling import fill_table

    release = open_release(checkpoint)
    network = load_network(release, arch=arch, model=model, trust_code=trust_code)
    table = fill_table(
        release,
        network,
        partial,
        out,
        reference=reference,
        drop=drop or (),
        columns=columns,
        seed=seed,
    )
    output.print_result(table.to_json(), lambda: show(table, out))


def show(table: FilledTable, out: Path) -> None:
    """Print the missing cells, those with the smallest q first.

    Args:
        table: The result of the attack.
        out: The file that was written.
    """
    cells = sorted(table.cells, key=lambda cell: (cell.value is None, cell.q is None, cell.q or 0))
    rows = [
        (
            str(cell.row),
            cell.column,
            "" if cell.value is None else f"{cell.value:.6g}",
            "" if cell.q is None else f"{cell.q:.2g}",
            "" if cell.p is None else f"{cell.p:.2g}",
        )
        for cell in cells[:MAX_ROWS]
    ]
    print_table("missing cells", ("record", "column", "inferred value", "q", "p"), rows)
    if len(cells) > MAX_ROWS:
        print_line(
            f"{len(cells) - MAX_ROWS} more missing cells are in {out.with_suffix('')}.cells.csv"
        )
    print_line(table.line)
    print_line(f"written to {out}")
    print_notes(table.notes)
