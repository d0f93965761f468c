"""``residuum strip``: write only the weights of a checkpoint, unchanged bit for bit.

Examples:
residuum strip checkpoint.pt --out weights.pt

residuum strip last.ckpt --out model.safetensors --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import print_line, print_table

if TYPE_CHECKING:
    from residuum.scanning.strip import Stripped


app = options.command_app("strip", __doc__)


@app.default
def _command(
    file: Annotated[
        Path, Parameter(name="FILE", help="A PyTorch checkpoint or a safetensors file.")
    ],
    /,
    *,
    out: Annotated[
        Path,
        Parameter(
            help="File to write. A name that ends in .safetensors gives a safetensors file. Any other name "
            "gives a file of torch.save.",
            metavar="CLEAN",
        ),
    ],
    output: options.Output = options.OUTPUT,
) -> None:
    """Write only the weights of a checkpoint, without optimizer state, averaged weights, seeds and paths."""
    from residuum.scanning.strip import PickleError, strip

    try:
        strip_result = strip(file, out)
    except PickleError as problem:
        if not output.visible:
            raise
        print_line("\n".join(problem.lines))
        raise
    output.print_result(strip_result.to_json(), lambda: show(strip_result))


def show(result: Stripped) -> None:
    """Print the findings that were removed from a checkpoint, and the findings that are still in the file."""
    size_text = f"{result.tensors} tensors, {result.bytes} bytes"
    print_line(f"{result.out}: {size_text}, weights unchanged bit for bit")
    for title, findings in (("removed", result.dropped), ("still in the file", result.remaining)):
        finding_rows = [(finding.kind, finding.what, finding.where) for finding in findings]
        if finding_rows:
            print_table(title, ("kind", "what", "where"), finding_rows)
