"""Show a scan in a terminal or in a notebook. Both show the same findings, measurements and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from residuum import notebook
from residuum.errors import InconclusiveError, UnsafeFileError
from residuum.scanning.finding import Finding
from residuum.surfaces.inspection import Inspection
from residuum.terminal import TextTable, format_number, print_wrapped

if TYPE_CHECKING:
    from residuum.scanning.scan import Scan, ScannedFile, Searched

INDENT, NETWORK, SEARCH = 10 * " ", "  network ", "  data    "
COLUMNS = ("severity", "file", "place", "what", "why", "what to do")
# Start of the reason why a readable network was not measured.
TOO_LARGE = "a scan measures at most"
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
        for i, line in enumerate(_search_lines(file.searched)):
            print_wrapped(line, INDENT if i else SEARCH, INDENT)
        for i, line in enumerate(_network_lines(file)):
            print_wrapped(line, INDENT if i else NETWORK, INDENT)
    for line in _closing_lines(result):
        print_wrapped(line, later_indent="  ")


def render(result: Scan) -> str:
    """Return a scan as HTML for a notebook, with everything that :func:`show` prints."""
    finding_rows = tuple(
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
    file_rows = tuple(
        (
            file.file,
            file.kind,
            f"{file.bytes:,}",
            "; ".join([*_search_lines(file.searched), *_network_lines(file)]),
        )
        for file in result.files
    )
    finding_count, file_count = (
        _counted(len(finding_rows), "finding"),
        _counted(len(file_rows), "file"),
    )
    title = f"{result.subject}: {finding_count} in {file_count}"
    tables = (
        TextTable("", COLUMNS, finding_rows[:MAX_ROWS]),
        TextTable("files", ("file", "format", "bytes", "network and search"), file_rows[:MAX_ROWS]),
    )
    lines = [*_closing_lines(result)]
    if max(len(finding_rows), len(file_rows)) > MAX_ROWS:
        lines.insert(
            0, f"Each table shows its first {MAX_ROWS} rows. The method show() prints all."
        )
    return notebook.render(title, tables, lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _file_line(file: ScannedFile) -> str:
    line = f"{file.file} ({file.kind}, {file.bytes} bytes)"
    is_model = file.network is not None or bool(file.network_reason)
    nothing = "no finding, apart from the weights" if is_model else "no finding"
    return line if file.findings else f"{line}: {nothing}"


def _what(finding: Finding) -> str:
    is_counted = finding.count is not None and str(finding.count) not in finding.what.split()
    return finding.what + (f", {finding.count} in total" if is_counted else "")


def _place(finding: Finding) -> str:
    more_places = f" and {finding.places - 1} more places" if finding.places > 1 else ""
    return f"{finding.where or 'the top level'}{more_places}"


def _reason(finding: Finding) -> str:
    return f"{finding.reason[:1].upper()}{finding.reason[1:]}"


def _network_lines(file: ScannedFile) -> list[str]:
    """Return the measurements of the network in a file, or why no network was measured."""
    if file.network is not None:
        return describe_network(file.network)
    return [f"not measured: {file.network_reason}"] if file.network_reason else []


def _search_lines(searched: Searched | None) -> list[str]:
    """Return how many of the given samples and texts are stored in a file."""
    if searched is None:
        return []
    count_lines = []
    if searched.samples:
        count_lines.append(
            f"{searched.found_samples} of {searched.samples} given samples, in {searched.arrays} arrays"
        )
    if searched.texts:
        count_lines.append(
            f"{searched.found_texts} of {searched.texts} given texts, in {searched.strings} strings"
        )
    notes = [f"note: {note}" for note in searched.notes]
    return [f"searched by content: found {' and '.join(count_lines)}", *notes]


def has_readable_network(file: ScannedFile) -> bool:
    """Return True if a file holds a network that ``residuum audit`` can read.

    Args:
        file: The file that was scanned.

    Returns:
        False for data files, for other models, and for networks that residuum cannot read from their weights
        alone.
    """
    return file.network is not None or file.network_reason.startswith(TOO_LARGE)


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
    """Yield the last lines of a scan: files that were not read, notes, the exit code and what to do next."""
    for unread in result.unread:
        yield f"not read: {unread.file}: {unread.reason}"
    for note in result.notes:
        yield f"note: {note}"
    if result.exit_code == UnsafeFileError.exit_code:
        yield "exit code 4: loading a file would run code or take too much memory"
        return
    if result.failed:
        limits = ",".join(result.fail_on)
        yield f"exit code 1: --fail-on {limits} applies to: {', '.join(result.failed)}"
    if result.exit_code == InconclusiveError.exit_code:
        yield "exit code 3: a model could not be read, so the scan is inconclusive"
    if any(has_readable_network(file) for file in result.files):
        yield AUDIT_NEXT
