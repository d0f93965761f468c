"""``residuum scan``: list what a file or folder reveals about the training data, without an attack.

If a file holds a network that residuum can read, measurements of the network follow the findings.

Examples:
residuum scan checkpoint.pt

residuum scan release/ --fail-on stored,optimizer-state,start,paths

residuum scan tuned.safetensors --base public.safetensors

residuum scan model.joblib --json --sarif scan.sarif
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import format_number, print_line, print_notes, print_wrapped, scan_progress

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan
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
            "a folder of such files. Code in a file is never run.",
        ),
    ],
    /,
    *,
    base: Annotated[
        Path | None,
        Parameter(
            help="File of the weights before training. With this file, the scan also finds the rows of "
            "embeddings and the layers that training changed.",
            metavar="FILE",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        Parameter(
            help="Exit with code 1 if there is a finding of one of these kinds, separated by commas: stored "
            "(records or labels in the file), update (a gradient or weight difference in place of weights), "
            "optimizer-state, start (initial weights), touched-rows (rows "
            "of an embedding that training changed), adapter, statistics (of the training data), paths "
            "(names of files) and classes (Python code of other packages that loading the file imports). "
            "With 'none', no kind leads to code 1. A file that would run code always leads to code 4.",
            metavar="KINDS",
            show_default=True,
        ),
    ] = "stored",
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

    failing_kinds = [] if fail_on == "none" else [kind.strip() for kind in fail_on.split(",")]
    with scan_progress(output.visible) as watch:
        scan_result = scan(release, base=base, fail_on=failing_kinds, watch=watch)
    if sarif is not None:
        from residuum.report.sarif import scan_sarif

        write_json(sarif, scan_sarif(scan_result.to_json()))
    output.print_result(scan_result.to_json(), lambda: show(scan_result))
    return scan_result.exit_code


def show(result: Scan) -> None:
    """Print every finding of a scan with its place, its reason and its remedy."""
    for file in result.files:
        file_line = f"{file.file} ({file.kind}, {file.bytes} bytes)"
        print_wrapped(
            file_line if file.findings else f"{file_line}: no finding, apart from the weights"
        )
        for finding in file.findings:
            count_text = "" if finding.count is None else f", {finding.count} in total"
            more_places = f" and {finding.places - 1} more places" if finding.places > 1 else ""
            reason = f"{finding.reason[:1].upper()}{finding.reason[1:]}"
            print_wrapped(
                f"{finding.kind}: {finding.what}{count_text}", f"  {finding.severity:<7} "
            )
            print_wrapped(f"at {finding.where or 'the top level'}{more_places}", INDENT)
            print_wrapped(f"{reason}. {finding.remedy}", INDENT)
        if file.network is None:
            print_wrapped(f"not measured: {file.network_reason}", NETWORK, INDENT)
        else:
            show_network(file.network)
    for unread in result.unread:
        print_wrapped(f"not read: {unread.file}: {unread.reason}", later_indent="  ")
    print_notes(result.notes)
    if result.failed:
        print_line(f"exit code 1: kinds of findings in --fail-on: {', '.join(result.failed)}")
    print_wrapped(
        "The weights of a network can reveal training data too. residuum audit tests PyTorch networks and "
        "the MLPs of scikit-learn. With --dry-run it lists the attacks that apply."
    )


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
