"""Show a scan in a terminal or in a notebook. Both show the same findings, measurements and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from residuum import notebook
from residuum.scanning.findings import Finding
from residuum.surfaces.inspection import Inspection
from residuum.terminal import TextTable, format_number, print_wrapped

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan, ScannedFile

INDENT, NETWORK = 10 * " ", "  network "
COLUMNS = ("severity", "file", "place", "what", "why", "what to do")
MAX_ROWS = 200  # largest number of findings that a notebook shows
AUDIT_NEXT = (
    "The weights of a network can reveal training data too. residuum audit tests PyTorch networks and the "
    "MLPs of scikit-learn. With --dry-run it lists the attacks that apply."
)


def show(result: Scan) -> None:
    """Print every finding of a scan with its place, its reason and its remedy."""
    for file in result.files:
        print_wrapped(_file_line(file))
        for finding in file.findings:
            print_wrapped(f"{finding.kind}: {_what(finding)}", f"  {finding.severity:<7} ")
            print_wrapped(f"at {_place(finding)}", INDENT)
            print_wrapped(f"{_reason(finding)}. {finding.remedy}", INDENT)
        for i, line in enumerate(_network_lines(file)):
            print_wrapped(line, INDENT if i else NETWORK, INDENT)
    for line in _closing_lines(result):
        print_wrapped(line, later_indent="  ")
    print_wrapped(AUDIT_NEXT)


def render(result: Scan) -> str:
    """Return a scan as HTML for a notebook, with everything that :func:`show` prints."""
    rows = tuple(
        (
            finding.severity,
            file.file,
            _place(finding),
            f"{finding.kind}: {_what(finding)}",
            f"{_reason(finding)}.",
            finding.remedy,
        )
        for file in result.files
        for finding in file.findings
    )
    files = tuple(
        (file.file, file.kind, f"{file.bytes:,}", "; ".join(_network_lines(file)))
        for file in result.files
    )
    title = f"{result.subject}: {_counted(len(rows), 'finding')} in {_counted(len(files), 'file')}"
    tables = (
        TextTable("", COLUMNS, rows[:MAX_ROWS]),
        TextTable("files", ("file", "format", "bytes", "network"), files[:MAX_ROWS]),
    )
    lines = [*_closing_lines(result), AUDIT_NEXT]
    if max(len(rows), len(files)) > MAX_ROWS:
        lines.insert(
            0, f"Each table shows its first {MAX_ROWS} rows. The method show() prints all."
        )
    return notebook.render(title, tables, lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _file_line(file: ScannedFile) -> str:
    line = f"{file.file} ({file.kind}, {file.bytes} bytes)"
    return line if file.findings else f"{line}: no finding, apart from the weights"


def _what(finding: Finding) -> str:
    return finding.what + ("" if finding.count is None else f", {finding.count} in total")


def _place(finding: Finding) -> str:
    more_places = f" and {finding.places - 1} more places" if finding.places > 1 else ""
    return f"{finding.where or 'the top level'}{more_places}"


def _reason(finding: Finding) -> str:
    return f"{finding.reason[:1].upper()}{finding.reason[1:]}"


def _network_lines(file: ScannedFile) -> list[str]:
    """Return the measurements of the network in a file, or why no network was measured."""
    if file.network is None:
        return [f"not measured: {file.network_reason}"]
    return describe_network(file.network)


def describe_network(network: Inspection) -> list[str]:
    """Return the measurements of a network that a scan has read, one line each."""
    homogeneity_order = network.homogeneity_order
    rank_texts = (f"{rank} above {100 * float(share):g}%" for share, rank in network.ranks.items())
    direction_count = "unknown" if network.directions is None else str(network.directions)
    balance_text = (
        "" if network.balance is None else f", balance gap {format_number(network.balance)}"
    )
    return [
        network.arch,
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


def _closing_lines(result: Scan) -> Iterator[str]:
    """Yield what follows the findings: files that were not read, notes and the reason of the exit code."""
    for unread in result.unread:
        yield f"not read: {unread.file}: {unread.reason}"
    for note in result.notes:
        yield f"note: {note}"
    if result.failed:
        yield f"exit code 1: kinds of findings in --fail-on: {', '.join(result.failed)}"
