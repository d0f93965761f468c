"""``residuum strip``: write a copy of a model without optimizer state, data and other training state.

For a pickle, strip prints a script, because only running the pickle can change it. Run the script if you
trust the file.

Examples:
residuum strip checkpoint.pt --out weights.pt

residuum strip last.ckpt --out model.safetensors --json

residuum strip model.joblib --out clean.joblib --script strip_model.py

residuum strip checkpoint-60/ --out release/
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import print_line, print_table, print_wrapped
from residuum.errors import OutputError

if TYPE_CHECKING:
    from residuum.scanning.stripped import Stripped


app = options.command_app("strip", __doc__)


@app.default
def _command(
    file: Annotated[
        Path,
        Parameter(
            name="FILE-OR-FOLDER",
            help="The model: a PyTorch checkpoint, a safetensors file, a file of pickle, joblib or "
            "skops, or a folder that Hugging Face libraries wrote.",
        ),
    ],
    /,
    *,
    out: Annotated[
        Path,
        Parameter(
            help="File or folder to write. If the file name ends in .safetensors, a safetensors file is "
            "written. Otherwise the file has the format of torch.save. If the input is a pickle, strip "
            "prints a script, and the script writes the file.",
            metavar="CLEAN",
        ),
    ],
    drop: Annotated[
        list[str] | None,
        Parameter(
            help="Also remove one value from the file, named by its place as `residuum scan` prints it, "
            "such as optimizer.state. Repeat the option for several values.",
            metavar="PLACE",
            negative="",
        ),
    ] = None,
    weights: Annotated[
        str,
        Parameter(
            help="Name of the entry of the file that holds the weights to write, such as ema. By "
            "default, the trained weights are written, and averaged weights (such as an EMA) are left out.",
            metavar="PLACE",
        ),
    ] = "",
    script: Annotated[
        Path | None,
        Parameter(
            help="File for the script that strip writes if the input is a pickle. By default, the script "
            "is printed. For other inputs, there is no script.",
            metavar="FILE",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Parameter(
            help="Name of a file in the folder that strip copies unchanged. By default, strip leaves out "
            "data, training state and files of unknown kinds. Repeat the option for several files.",
            metavar="NAME",
            negative="",
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
) -> int:
    """Write only the weights of a checkpoint, or print a script that removes training state from a pickle.

    The exit code is 0 if no finding of severity high remains, and 1 if one remains. It is 2 if the file
    cannot be stripped. Then nothing is written.

    Returns:
        The exit code.

    Raises:
        OutputError: If the file in ``--script`` exists.
    """
    from residuum.records import write_atomic
    from residuum.scanning.strip import strip

    if script is not None and (script.exists() or script.is_symlink()):
        message = f"strip writes a new script; {str(script)!r} exists already."
        raise OutputError(message, "Choose another --script.")
    strip_result = strip(file, out, drop=drop or (), weights=weights, keep=keep or ())
    if script is not None and strip_result.script:
        write_atomic(script, strip_result.script)
    output.print_result(strip_result.to_json(), lambda: show(strip_result, script))
    return strip_result.exit_code


def show(result: Stripped, script: Path | None = None) -> None:
    """Print what was removed from a file or folder, and the findings that remain.

    Args:
        result: The result of strip.
        script: The file with the script for a pickle, None to print the script and nothing else.
    """
    if result.script and script is None:
        print_line(result.script.rstrip())
        return
    if result.script:
        command = shlex.join(["python", str(script)])
        print_wrapped(
            f"{script}: the script that writes {result.out}. Loading a pickle runs its code, so run the "
            f"script only if you trust the file: {command}"
        )
    else:
        _show_files(result)
    if result.remaining:
        print_line("still in the new file:")
    for finding in result.remaining:
        print_wrapped(f"{finding.severity:<7} {finding.kind}: {finding.what}", "  ", 10 * " ")
        print_wrapped(f"at {finding.where or 'the top level'}", 10 * " ")
        print_wrapped(
            f"{finding.reason[:1].upper()}{finding.reason[1:]}. {finding.remedy}", 10 * " "
        )
    if result.exit_code:
        print_line("exit code 1: a finding of severity high remains")


def _show_files(result: Stripped) -> None:
    size_text = f"{result.tensors} tensors, {result.bytes} bytes"
    print_line(f"{result.out}: {size_text}, weights unchanged bit for bit")
    lists = (
        ("copied unchanged", result.copied),
        ("changed", result.changed),
        ("left out", result.left_out),
    )
    for title, lines in lists:
        if lines:
            print_line(f"{title}:")
        for line in lines:
            print_wrapped(line, "  ", "    ")
    if result.dropped:
        removed_rows = [(finding.kind, finding.what, finding.where) for finding in result.dropped]
        print_table("removed", ("kind", "what", "where"), removed_rows)
