"""``residuum scan``: list what a file or folder reveals about the training data, without an attack.

If a file holds a network that residuum can read, measurements of the network follow the findings.

Examples:
residuum scan checkpoint.pt

residuum scan release/ --fail-on medium

residuum scan tuned/ --base public/

residuum scan model.joblib --json --sarif scan.sarif
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import format_number, print_line, print_notes, print_wrapped, scan_progress
from residuum.errors import InconclusiveError

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan, ScannedFile
    from residuum.surfaces.inspection import Inspection

INDENT, NETWORK = 10 * " ", "  network "


app = options.command_app("scan", __doc__)


@app.default
def _command(
    release: Annotated[
        Path,
        Parameter(
            name="FILE-OR-FOLDER",
            help="A file of PyTorch, scikit-learn (pickle, joblib), safetensors, TorchScript or ONNX, or "
            "the folder of a release. In a folder, all files are examined: models, data, tokenizers and "
            "files of a Trainer. Code in a file is never run.",
        ),
    ],
    /,
    *,
    base: Annotated[
        Path | None,
        Parameter(
            help="File or folder of the weights before training. With it, the scan also finds the rows of "
            "embeddings and the layers that training changed, and tokens that were added to the tokenizer.",
            metavar="FILE",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        Parameter(
            help="Exit with code 1 if there is a finding of at least this severity: high, medium or low. Or "
            "name kinds of findings, separated by commas: stored (records or labels in the file), "
            "optimizer-state, start (initial weights), touched-rows (rows of an embedding that training "
            "changed), adapter, statistics (of the training data), paths (names of files) and classes "
            "(Python code of other packages that loading the file imports). With 'none', no finding leads to "
            "code 1. A file that would run code always leads to code 4. If a model in a folder cannot be "
            "read, the code is 3.",
            metavar="SEVERITY|KINDS",
            show_default=True,
        ),
    ] = "high",
    sarif: Annotated[
        Path | None,
        Parameter(
            help="Also write the findings to this file, as SARIF 2.1.0 for code scanning.",
            metavar="FILE",
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
) -> int:
    """List what in a release can reveal training data, why, and what to do. No code in a file is run."""
    from residuum.records import write_json
    from residuum.scanning.scan import scan

    with scan_progress(output.visible) as watch:
        scan_result = scan(release, base=base, fail_on=fail_on, watch=watch)
    if sarif is not None:
        from residuum.report.sarif import scan_sarif

        write_json(sarif, scan_sarif(scan_result.to_json()))
    output.print_result(scan_result.to_json(), lambda: show(scan_result))
    return scan_result.exit_code


def show(result: Scan) -> None:
    """Print every finding of a scan with its place, its reason and its remedy."""
    for file in result.files:
        file_line = f"{file.file} ({file.kind}, {file.bytes} bytes)"
        is_model = file.network is not None or bool(file.network_reason)
        nothing = ": no finding, apart from the weights" if is_model else ": no finding"
        print_wrapped(file_line if file.findings else f"{file_line}{nothing}")
        for finding in file.findings:
            is_counted = (
                finding.count is not None and str(finding.count) not in finding.what.split()
            )
            count_text = f", {finding.count} in total" if is_counted else ""
            more_places = f" and {finding.places - 1} more places" if finding.places > 1 else ""
            reason = f"{finding.reason[:1].upper()}{finding.reason[1:]}"
            print_wrapped(
                f"{finding.kind}: {finding.what}{count_text}", f"  {finding.severity:<7} "
            )
            print_wrapped(f"at {finding.where or 'the top level'}{more_places}", INDENT)
            print_wrapped(f"{reason}. {finding.remedy}", INDENT)
        if file.network is not None:
            show_network(file.network)
        elif file.network_reason:
            print_wrapped(f"not measured: {file.network_reason}", NETWORK, INDENT)
    for unread in result.unread:
        print_wrapped(f"not read: {unread.file}: {unread.reason}", later_indent="  ")
    print_notes(result.notes)
    if result.failed:
        limits = ",".join(result.fail_on)
        print_line(f"exit code 1: --fail-on {limits} applies to: {', '.join(result.failed)}")
    if result.exit_code == InconclusiveError.exit_code:
        print_line("exit code 3: a model could not be read, so the scan is inconclusive")
    if not any(may_be_audited(file) for file in result.files):
        return
    print_wrapped(
        "The weights of a network can reveal training data too. residuum audit tests PyTorch networks and "
        "the MLPs of scikit-learn. With --dry-run it lists the attacks that apply."
    )


def may_be_audited(file: ScannedFile) -> bool:
    """Return True if ``residuum audit`` may accept a file that was scanned.

    Args:
        file: The file.

    Returns:
        False for data files, and for networks that residuum cannot read from their weights alone.
    """
    from residuum.networks.recognition import SUPPORTED

    is_readable = bool(file.network_reason) and not file.network_reason.startswith(SUPPORTED)
    return file.network is not None or is_readable


def show_network(network: Inspection) -> None:
    """Print the measurements of a network that a scan has read."""
    homogeneity_order = network.homogeneity_order
    rank_texts = (f"{rank} above {100 * float(share):g}%" for share, rank in network.ranks.items())
    direction_count = "unknown" if network.directions is None else str(network.directions)
    balance_text = (
        "" if network.balance is None else f", balance gap {format_number(network.balance)}"
    )
    lines = [
        f"inputs: {network.inputs}, outputs: {network.outputs}, weights: {network.parameters} "
        f"({network.dtype})",
        (
            "not homogeneous"
            if homogeneity_order is None
            else f"homogeneous of order {homogeneity_order:g}"
        )
        + balance_text,
        f"directions that training left in the first layer: {direction_count} ({network.directions_of})",
        "number of singular values of the first layer, relative to the largest: "
        + ", ".join(rank_texts),
        *(f"assumed: {sentence}" for sentence in network.assumptions),
    ]
    print_wrapped(network.arch, NETWORK)
    for line in lines:
        print_wrapped(line, INDENT)
