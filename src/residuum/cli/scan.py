"""``residuum scan``: list what a file or folder reveals about the training data, without an attack.

If a file holds a network that residuum can read, measurements of the network follow the findings.

Examples:
residuum scan checkpoint.pt

residuum scan release/ --fail-on medium

residuum scan tuned/ --base public/

residuum scan model.joblib --json --sarif scan.sarif

residuum scan model.pt --data train.npz --holdout test.npz
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
            help="A model file of PyTorch, scikit-learn (pickle, joblib), safetensors, TorchScript or "
            "ONNX, or a folder with such files. In a folder, the scan examines all files: models, data, "
            "tokenizers, and files that a Trainer of Hugging Face saved. Code in a file is never run.",
        ),
    ],
    /,
    *,
    base: Annotated[
        Path | None,
        Parameter(
            help="File or folder with the weights before training. If you pass this option, the scan "
            "also lists what training changed: rows of embeddings, layers, and new tokens of the tokenizer.",
            metavar="FILE",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        Parameter(
            help="File or folder of training samples (.npz, .csv, images) or texts (.txt, .jsonl). The "
            "scan searches the arrays and strings of the model file for each sample and text.",
            metavar="FILE",
        ),
    ] = None,
    holdout: Annotated[
        Path | None,
        Parameter(
            help="File or folder of samples or texts that the model never saw. The scan also counts how "
            "many of these are stored in the model file, for comparison with --data.",
            metavar="FILE",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        Parameter(
            help="Exit with code 1 if there is a finding of at least this severity: high, medium or low. "
            "Or pass the kinds of findings that lead to code 1, separated by commas. The kinds are "
            "stored (records or labels in the file), update (a gradient or weight difference in place of "
            "weights), "
            "optimizer-state, start (initial weights), touched-rows (rows of an embedding that training "
            "changed), adapter, statistics (of the training data), paths (names of files) and classes "
            "(Python code of other packages that loading the file imports). With 'none', no finding leads "
            "to code 1. The exit code is always 4 if loading a file would run code, and 3 if a model in a "
            "folder cannot be read.",
            metavar="SEVERITY|KINDS",
            show_default=True,
        ),
    ] = "high",
    sarif: Annotated[
        Path | None,
        Parameter(
            help="Also write the findings to this file, as SARIF 2.1.0 for code scanning.",
            metavar="FILE",
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
) -> int:
    """List what in a model file can reveal training data, why, and what to do. No code in a file is run."""
    from residuum.records import write_json
    from residuum.scanning.scan import scan

    with scan_progress(output.visible) as watch:
        scan_result = scan(
            release, base=base, data=data, holdout=holdout, fail_on=fail_on, watch=watch
        )
    if sarif is not None:
        from residuum.report.sarif import scan_sarif

        write_json(sarif, scan_sarif(scan_result.to_json()))
    output.print_result(scan_result.to_json(), scan_result.show)
    return scan_result.exit_code
