"""Options that several commands share, each with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
NoPlugins = Annotated[
    bool,
    typer.Option("--no-plugins", help="Leave installed plug-ins alone (or RESIDUUM_NO_PLUGINS=1)."),
]
_CHECKPOINT = typer.Argument(
    metavar="CKPT",
    help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
    show_default=False,
)
CheckpointPath = Annotated[Path, _CHECKPOINT]
CheckpointPathOrNone = Annotated[Path | None, _CHECKPOINT]
OwnData = Annotated[
    Path | None,
    typer.Option(
        help="An .npz with x (as the network receives it) and y, or a training directory "
        "(default: that of CKPT).",
        show_default=False,
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help="Architecture where it cannot be read off the file, such as "
        "convnet:1x28x28-8-16-10,bias=all, or to confirm the activation: mlp:784-128-10,bias=all,"
        "activation=relu.",
        show_default=False,
    ),
]
Task = Annotated[
    str, typer.Option("--task", help="auto, binary, multiclass or regression (auto: by outputs).")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]

# Which samples a network is trained on; read by ``datasets.load_dataset``.
Count = Annotated[
    int | None,
    typer.Option(
        help="Training samples, equally many of each label (default: all; half, where the held-out "
        "ones must come from the same file).",
        show_default=False,
    ),
]
DataRoot = Annotated[Path | None, typer.Option(help="Folder of data files (or RESIDUUM_DATA).")]
DataSeed = Annotated[
    int | None, typer.Option(help="Random choice of samples; without it the first n.")
]

# Settings of an attack; None where the preset decides.
Steps = Annotated[int | None, typer.Option(help="Steps of every restart.")]
Precision = Annotated[str | None, typer.Option(help="float64, float32; on a GPU also tf32, bf16.")]
DeviceOrNone = Annotated[str | None, typer.Option(help="cpu or cuda.")]
SeedOrNone = Annotated[
    int | None, typer.Option(min=0, max=2**31 - 1, help="Seed of all random numbers.")
]

# What an auditor may grant the attacker; read by ``granted.grant``.
Shape = Annotated[str | None, typer.Option(metavar="C,H,W", help="Granted: shape of one sample.")]
ValueRange = Annotated[
    str | None, typer.Option(metavar="LOW,HIGH", help="Granted: least and greatest value.")
]
Mean = Annotated[
    str | None,
    typer.Option(metavar="MEAN", help="Granted: a number, an .npy, or an .npz with 'mean'."),
]
MeanProvenance = Annotated[
    str, typer.Option(help="Where that mean is from: user, train or holdout.")
]
SampleCount = Annotated[
    int | None, typer.Option(min=1, help="Granted: number of training samples.")
]
LabelBalance = Annotated[
    str | None, typer.Option(metavar="SHARES", help="Granted: share of each label, as 0.5,0.5.")
]
InitialWeights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Granted: initial weights; own: those in the training directory."
    ),
]
TrainingLoss = Annotated[
    str | None, typer.Option(help="Granted: the training loss, as logistic or squared.")
]
WeightDecay = Annotated[float | None, typer.Option(help="Granted: weight decay of the training.")]


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    import torch

    from residuum.errors import InputError

    if device not in ("cpu", "cuda"):
        raise InputError(f"A device is cpu or cuda; got {device!r}.", "Use --device cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("No CUDA device was found.", "Use --device cpu.")


def numbers(text: str, option: str, example: str) -> tuple[float, ...]:
    """Finite numbers between commas, or one line on what ``option`` takes."""
    import math

    from residuum.errors import InputError

    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise InputError(
            f"{option} takes finite numbers between commas; got {text[:40]!r}.",
            f"Example: {option} {example}.",
        )
    return found
