"""``residuum strip``: the weights of a checkpoint alone, bit for bit, without what need not be there.

Examples:

residuum strip checkpoint.pt --out weights.pt

residuum strip last.ckpt --out model.safetensors --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residuum.cli.options import Voice, option
from residuum.cli.output import print_line, print_table

if TYPE_CHECKING:
    from residuum.scanning.strip import Stripped


def command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A checkpoint of torch or a safetensors file.")
    ],
    *,
    out: Path = option(
        "New file; .safetensors is written as such, anything else with torch.save.",
        ...,
        metavar="CLEAN",
    ),
    voice: Voice,
) -> None:
    """Write the weights of a checkpoint alone: no optimiser state, averages, seeds or paths."""
    from residuum.scanning.strip import PickleError, strip

    try:
        found = strip(file, out)
    except PickleError as problem:
        if not voice.spoken:
            raise
        print_line("\n".join(problem.lines))
        raise
    voice.answer(found.to_json(), lambda: show(found))


def show(found: Stripped) -> None:
    """What was left out, and what is still there."""
    print_line(f"{found.out}: {found.tensors} tensors, {found.bytes} bytes, bit for bit as before")
    for title, part in (("left out", found.dropped), ("still there", found.left)):
        rows = [(one.kind, one.what, one.where) for one in part]
        if rows:
            print_table(title, ("kind", "what", "where"), rows)
