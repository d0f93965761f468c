"""``residuum exposure``: rank training records by their risk, from weights and data, without an attack.

Examples:
residuum exposure model.safetensors --data train.npz --holdout test.npz --out runs/e

residuum exposure runs/m --data runs/m --holdout runs/m --init own --json

residuum exposure model.pt --data train.npz --holdout test.npz --group-by site

residuum exposure model.pt --data train.npz --canaries canaries.npz --delta 1e-5
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import (
    exposure_progress,
    print_line,
    print_notes,
    print_table,
)
from residuum.errors import InputError
from residuum.settings import ExposureRequest

if TYPE_CHECKING:
    from residuum.risk.forests import ForestExposure

app = options.command_app("exposure", __doc__)


@app.default
@with_options(
    settings=options_from(
        ExposureRequest,
        skip=("grouped_by",),
        changes={
            "label": Annotated[str, Parameter(metavar="COLUMN")],
            "drop": Annotated[list[str], Parameter(metavar="COLUMN")],
            "sensitive": Annotated[list[str], Parameter(metavar="COLUMN")],
            "model_code": Annotated[str, Parameter(metavar="CODE")],
        },
    )
)
def _command(
    checkpoint: options.CheckpointPath,
    /,
    *,
    data: Annotated[
        str,
        Parameter(
            help="Training records: an .npz with x and y, a table with a header (.csv, .tsv, .jsonl or "
            ".parquet), a folder of images, or a directory that `residuum train` wrote.",
            metavar="DATA",
        ),
    ],
    holdout: Annotated[
        str | None,
        Parameter(
            help="At least 100 records that the network never saw, in the same formats as for --data. "
            "Without these records, tests have no p-values.",
            metavar="DATA",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for the results. If the folder holds an interrupted run of this command, "
            "the run continues."
        ),
    ] = None,
    settings: dict[str, Any] | None = None,
    group_by: Annotated[
        str | None,
        Parameter(
            help="Name of the array or column in the data file that holds the group of each record. The "
            "result shows the risk of each group. By default, the group of a record is its class.",
            metavar="NAME",
        ),
    ] = None,
    attack: Annotated[
        Path | None,
        Parameter(
            help="Folder with the results of an attack. For each record, the most similar reconstruction "
            "of this attack is shown.",
            metavar="RUN",
        ),
    ] = None,
    canaries: Annotated[
        Path | None,
        Parameter(
            help="An .npz with canaries, which are records inserted into the training set at random. The "
            "array 'inserted' is 1 for a record x, y in the training set, and 0 for a record that was left "
            "out. The canaries give a lower bound on epsilon, the privacy loss of the training.",
            metavar="FILE",
        ),
    ] = None,
    fail_above: Annotated[
        float | None,
        Parameter(
            help="Exit with code 1 if a record's probability of being recovered is above this number from "
            "0 to 1. If the probabilities cannot be computed for this network, the command ends with an "
            "error."
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
    init: Annotated[
        str | None,
        Parameter(
            help="File of the initial weights, if the attacker knows these weights. With the value 'own', "
            "the initial weights are read from the training directory.",
            metavar="FILE",
            group=options.ATTACKER,
            completer=lambda _: ("own",),
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        Parameter(help="Weight decay (L2 penalty) that the training used.", group=options.ATTACKER),
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(
            help="File of the weights before fine-tuning. CKPT can be an adapter (LoRA) of these weights.",
            metavar="FILE",
            group=options.ATTACKER,
        ),
    ] = None,
    trust_code: options.TrustCode = False,
) -> int:
    """Rank training records by their risk of being recovered from the weights, without an attack."""
    from residuum.io.forests import read_forests
    from residuum.io.release import open_release
    from residuum.verbs.exposing import exposure
    from residuum.verbs.forests import forest_exposure

    settings = settings or {}
    request = options.make_from_options(ExposureRequest, settings)
    options.check_device(request.device)
    if canaries is None and settings.keys() & {"confidence", "delta"}:
        raise InputError(
            "--confidence and --delta are settings of the test with canaries (records inserted into the "
            "training set). They need --canaries.",
            "Pass --canaries FILE.",
        )
    if fail_above is not None and not 0 <= fail_above <= 1:
        raise InputError(
            f"--fail-above must be from 0 to 1; got {fail_above:g}.", "Example: --fail-above 0.5."
        )
    release = open_release(checkpoint)
    if read_forests(release):
        if request.attributes or request.sensitive:
            raise InputError(
                "--attributes tests networks; the file holds a forest.",
                "Leave --attributes and --sensitive out. residuum audit tests the values of a forest.",
            )
        ranking = forest_exposure(release, data, out, request.label, request.drop)
        output.print_result(ranking.to_json(), lambda: show_forest(ranking, request.top, out))
        return 0
    attacker_facts = {"init": init, "weight_decay": weight_decay}
    with exposure_progress(output.visible) as watch:
        record_risks = exposure(
            release,
            data,
            holdout,
            knowledge={name: value for name, value in attacker_facts.items() if value is not None},
            grouped_by=group_by or "",
            reconstruction=attack,
            canaries=canaries,
            out=out,
            base=None if base is None else str(base),
            trust_code=trust_code,
            watch=watch,
            **settings,
        )
    if fail_above is not None and record_risks.uncalibrated:
        raise InputError(
            "--fail-above needs the probability that each record is recovered by attacks. For these inputs "
            f"there are only scores: {record_risks.uncalibrated}.",
            "Omit --fail-above and read the ranking of the records. Or run `residuum audit` and use its "
            "exit code.",
        )
    count_above_limit = (
        0 if fail_above is None else int((record_risks.probability > fail_above).sum())
    )

    def show_all() -> None:
        record_risks.show()
        if out is not None:
            print_line(f"written to {out}")
        if count_above_limit:
            print_line(
                f"exit code 1: {count_above_limit} of {len(record_risks)} records are above --fail-above "
                f"{fail_above:g}"
            )

    output.print_result(record_risks.to_json(), show_all)
    return 1 if count_above_limit else 0


def show_forest(ranking: ForestExposure, top: int, out: Path | None) -> None:
    """Print how much of each record the trees of a forest determine.

    Args:
        ranking: The ranking.
        top: Number of records in the table.
        out: Folder that was written, None if no folder was written.
    """
    record_rows = [
        (
            str(row["id"] or row["record"]),
            f"{row['exact_columns']} of {ranking.columns}",
            f"{row['right_digits']:.2f}",
            "yes" if row["target"] else "no",
        )
        for row in ranking.per_record[:top]
    ]
    headers = ("record", "exact columns", "right digits", "target")
    print_table(
        f"{ranking.model}: the most exposed of {len(ranking)} records", headers, record_rows
    )
    print_notes(ranking.lines)
    if out is not None:
        print_line(f"written to {out}")
