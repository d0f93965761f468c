"""``residuum strip``: the weights of a checkpoint alone, bit for bit, without what need not be there.

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
def command(
    file: Annotated[
        Path, Parameter(name="FILE", help="A checkpoint of torch or a safetensors file.")
    ],
    /,
    *,
    out: Annotated[
        Path,
        Parameter(
            help="New file. A .safetensors file is written as such, any other with torch.save.",
            metavar="CLEAN",
        ),
    ],
    output: options.Output = options.OUTPUT,
) -> None:
    """Write the weights of a checkpoint alone: no optimizer state, averages, seeds or paths."""
    from residuum.scanning.strip import PickleError, strip

    try:
        found = strip(file, out)
    except PickleError as problem:
        if not output.visible:
            raise
        print_line("\n".join(problem.lines))
        raise
    output.result(found.to_json(), lambda: show(found))


def show(found: Stripped) -> None:
    """What was left out, and what is still there."""
    print_line(f"{found.out}: {found.tensors} tensors, {found.bytes} bytes, bit for bit as before")
    for title, part in (("left out", found.dropped), ("still there", found.remaining)):
        rows = [(one.kind, one.what, one.where) for one in part]
        if rows:
            print_table(title, ("kind", "what", "where"), rows)
