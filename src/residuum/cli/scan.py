"""``residuum scan``: what a file or folder reveals before any attack.

If a file holds a network that residuum can read, its measurements follow the findings.

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
from residuum.cli.output import number, print_line, print_notes, print_wrapped, scan_progress

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan
    from residuum.surfaces.inspection import Inspection

INDENT, NETWORK = 10 * " ", "  network "


app = options.command_app("scan", __doc__)


@app.default
def command(
    release: Annotated[
        Path,
        Parameter(
            name="FILE-OR-FOLDER",
            help="A file of torch, scikit-learn (pickle, joblib), safetensors, TorchScript or ONNX, or "
            "a folder of them. Nothing in it is executed.",
        ),
    ],
    /,
    *,
    base: Annotated[
        Path | None,
        Parameter(
            help="The weights before training. With them the scan finds rows of embeddings and layers that "
            "changed.",
            metavar="FILE",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        Parameter(
            help="Kinds of findings that end in exit code 1, between commas: stored, optimizer-state, "
            "start, touched-rows, adapter, statistics, paths, classes; or none. The kind code always ends "
            "in exit code 4.",
            metavar="KINDS",
            show_default=True,
        ),
    ] = "stored",
    sarif: Annotated[
        Path | None, Parameter(help="Also write SARIF 2.1.0 for code scanning.", metavar="FILE")
    ] = None,
    output: options.Output = options.OUTPUT,
) -> int:
    """List what in a release can reveal training data, why, and what to do. Runs no code."""
    from residuum.records import write_json
    from residuum.scanning.scan import scan

    kinds = [] if fail_on == "none" else [kind.strip() for kind in fail_on.split(",")]
    with scan_progress(output.visible) as watch:
        found = scan(release, base=base, fail_on=kinds, watch=watch)
    if sarif is not None:
        from residuum.report.sarif import scan_sarif

        write_json(sarif, scan_sarif(found.to_json()))
    output.result(found.to_json(), lambda: show(found))
    return found.exit_code


def show(found: Scan) -> None:
    """Print the scan as a person reads it: of each finding what and where, why, and what to do."""
    for file in found.files:
        title = f"{file.file} ({file.kind}, {file.bytes} bytes)"
        print_wrapped(
            title if file.findings else f"{title}: no attack surface found besides the weights"
        )
        for one in file.findings:
            counted = "" if one.count is None else f", {one.count} in all"
            more = f" and {one.places - 1} more" if one.places > 1 else ""
            print_wrapped(f"{one.kind}: {one.what}{counted}", f"  {one.severity:<7} ")
            print_wrapped(f"at {one.where or 'the top'}{more}", INDENT)
            print_wrapped(f"{one.reason[:1].upper()}{one.reason[1:]}. {one.remedy}", INDENT)
        if file.network is None:
            print_wrapped(f"not measured: {file.network_reason}", NETWORK, INDENT)
        else:
            show_network(file.network)
    for unread in found.unread:
        print_wrapped(f"not read: {unread.file}: {unread.reason}", rest="  ")
    print_notes(found.notes)
    if found.failed:
        print_line(f"found: {', '.join(found.failed)}")
    print_wrapped(
        "The weights of a network can hold training data too. residuum audit tests networks of PyTorch "
        "and the MLPs of scikit-learn. With --dry-run it lists the attacks that apply."
    )


def show_network(network: Inspection) -> None:
    """Print the measurements of a network."""
    order = network.homogeneity_order
    shares = (f"{rank} above {100 * float(share):g}%" for share, rank in network.ranks.items())
    directions = "not known" if network.directions is None else str(network.directions)
    gap = "" if network.balance is None else f", balance gap {number(network.balance)}"
    lines = [
        f"inputs: {network.inputs}, outputs: {network.outputs}, weights: {network.parameters} "
        f"({network.dtype})",
        ("not homogeneous" if order is None else f"homogeneous of order {order:g}") + gap,
        f"directions of the first layer: {directions} ({network.directions_of})",
        "singular values of the first layer, as a share of the largest: " + ", ".join(shares),
        *(f"assumed: {sentence}" for sentence in network.assumptions),
    ]
    print_wrapped(network.arch, NETWORK)
    for line in lines:
        print_wrapped(line, INDENT)
