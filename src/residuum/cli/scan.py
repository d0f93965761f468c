"""``residuum scan``: what a file or folder gives away before any attack.

If a file holds a network that residuum can read, its measurements follow the findings.

Examples:

residuum scan checkpoint.pt

residuum scan release/ --fail-on stored,optimiser-state,start,paths

residuum scan tuned.safetensors --base public.safetensors

residuum scan model.joblib --json --sarif scan.sarif
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli.options import Voice, option
from residuum.cli.output import number, print_line, print_notes, print_wrapped, scan_progress

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan
    from residuum.surfaces.inspection import Inspection

INDENT, NETWORK = 10 * " ", "  network "


def command(
    release: Annotated[
        Path,
        typer.Argument(
            metavar="FILE-OR-FOLDER",
            help="A file of torch, scikit-learn (pickle, joblib), safetensors, TorchScript or ONNX, or "
            "a folder of them. Nothing in it is executed.",
        ),
    ],
    *,
    base: Path | None = option(
        "The weights that training began from: tells the rows of embeddings and the layers that moved.",
        metavar="FILE",
    ),
    fail_on: str = option(
        "Kinds that end in exit code 1, of: stored, optimiser-state, start, touched-rows, adapter, "
        "statistics, paths, classes; or none. The kind code always ends in exit code 4.",
        "stored",
        metavar="KINDS",
    ),
    sarif: Path | None = option("Also write SARIF 2.1.0 for code scanning.", metavar="FILE"),
    voice: Voice,
) -> None:
    """List what in a release can give training data away, why, and what to do; runs no code."""
    from residuum.records import write_json
    from residuum.scanning.scan import scan

    kinds = [] if fail_on == "none" else [kind.strip() for kind in fail_on.split(",")]
    with scan_progress(voice.spoken) as watch:
        found = scan(release, base=base, fail_on=kinds, watch=watch)
    if sarif is not None:
        from residuum.report.sarif import scan_sarif

        write_json(sarif, scan_sarif(found.to_json()))
    voice.answer(found.to_json(), lambda: show(found))
    raise typer.Exit(found.exit_code)


def show(found: Scan) -> None:
    """The scan as a person reads it: per finding what and where, why, and what to do."""
    for file in found.files:
        title = f"{file.file} ({file.kind}, {file.bytes} bytes)"
        print_wrapped(title if file.findings else f"{title}: no surface found beside the weights")
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
