"""Options that several commands share, each with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
CheckpointPath = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT",
        help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
        show_default=False,
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="Architecture where it cannot be read off the file, such as mlp:784-1000-1000-1.",
        show_default=False,
    ),
]
Task = Annotated[
    str, typer.Option("--task", help="auto, binary, multiclass or regression (auto: by outputs).")
]
