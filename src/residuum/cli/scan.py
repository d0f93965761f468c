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
from typing import Annotated

from cyclopts import Parameter

from residuum.cli import options
from residuum.cli.output import scan_progress

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
            "(records or labels in the file), optimizer-state, start (initial weights), touched-rows (rows "
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
    output.print_result(scan_result.to_json(), scan_result.show)
    return scan_result.exit_code
