"""``residuum train``: a victim with its secrets kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from residuum.cli import options
from residuum.cli.output import number, print_json, print_line, print_table, training_progress

EXAMPLES = """Examples:

residuum train --data digits --n 40 --arch mlp:64-100-1 --out runs/d

residuum train --data mnist --n 500 --arch mlp:784-1000-1000-1 --method margin --out runs/m

residuum train --data cifar10 --n 500 --arch mlp:3072-1000-1000-1 --method gd --steps 1000000 --out runs/c
"""
Seconds = Annotated[float | None, typer.Option(help="Stop after this much wall-clock time.")]


def command(
    data: Annotated[
        str, typer.Option(help="digits, circle, sphere, mnist, cifar10, an .npz or a folder.")
    ],
    arch: Annotated[
        str,
        typer.Option(
            help="Architecture: mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 (input, channels, outputs) "
            "or polynomial:64-36-1,coefficients=0/0/0/1."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Directory to write; an unfinished run there is resumed.")
    ],
    n: options.Count = None,
    data_root: options.DataRoot = None,
    data_seed: options.DataSeed = None,
    holdout: Annotated[
        int | None, typer.Option(help="Held-out samples (default: up to 2000).")
    ] = None,
    center: Annotated[bool, typer.Option(help="Subtract the mean of the training samples.")] = True,
    task: options.Task = "auto",
    method: Annotated[str, typer.Option(help="margin, gd or sgd.")] = "margin",
    loss: Annotated[str, typer.Option(help="logistic, exponential, squared, cross_entropy.")] = "",
    steps: Annotated[int, typer.Option(help="Steps at most.")] = 5000,
    lr: Annotated[float, typer.Option(help="Learning rate of gd and sgd.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Momentum of gd and sgd.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Batch size of sgd.")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of gd and sgd.")] = 0.0,
    init: Annotated[
        str, typer.Option(help="small (first layer scaled down), default, or lecun.")
    ] = "small",
    init_scale: Annotated[float, typer.Option(help="First-layer scale of the small init.")] = 1e-4,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    device: options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the batches.")] = 0,
    seconds: Seconds = None,
    stop_margin: Annotated[
        float | None, typer.Option(help="Stop at this normalised margin.")
    ] = None,
    stop_residual: Annotated[float, typer.Option(help="Stop at this relative KKT residual.")] = 0.0,
    stop_loss: Annotated[float, typer.Option(help="Stop at this training loss.")] = 0.0,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a network and write what may be released apart from what must stay private."""
    import math

    from residuum.datasets import load_dataset
    from residuum.networks import Architecture
    from residuum.theory.rows import choose_task
    from residuum.training import TrainingConfig, train
    from residuum.training.directory import STATE, TrainingRun, write_run

    config = TrainingConfig(
        method=method, loss=loss, steps=steps, lr=lr, momentum=momentum, batch=batch,
        weight_decay=weight_decay, init=init, init_scale=init_scale, dtype=dtype, seed=seed,
        seconds=seconds if seconds is not None else math.inf,
        stop_margin=stop_margin if stop_margin is not None else math.inf,
        stop_residual=stop_residual, stop_loss=stop_loss,
    )  # fmt: skip
    options.check_device(device)
    architecture = Architecture.parse(arch)
    task = choose_task(task, architecture.outputs)
    split = load_dataset(
        data, n, seed=data_seed, root=data_root, task=task, holdout=holdout, center=center
    )
    with TrainingRun.open(out):
        with training_progress(not (json or quiet)) as watch:
            state = train(
                str(architecture), split.train, config, task=task, device=device,
                state_path=out / STATE, watch=watch,
            )  # fmt: skip
        summary = write_run(out, str(architecture), split, config, state, task, device)
    if json:
        print_json(summary)
    elif not quiet:
        _show(summary, out)
        if n is None:
            _note(summary)


def _show(summary: dict[str, Any], out: Path) -> None:
    rows = [
        ("status", str(summary["status"])),
        ("steps", str(summary["steps"])),
        ("loss", number(summary["loss"])),
        ("margin", number(summary["margin"])),
        ("train / held-out accuracy", f"{number(summary['train_accuracy'])} / "
                                      f"{number(summary['holdout_accuracy'])}"),
        ("released", str(out / "model.safetensors")),
        ("private", str(out / "private")),
    ]  # fmt: skip
    print_table(f"{summary['arch']} on {summary['samples']} samples", ("what", "value"), rows)


def _note(summary: dict[str, Any]) -> None:
    """A file of one's own is not trained on as a whole: said where nobody asked for a number."""
    taken, all_there = summary["samples"], summary["available_samples"]
    if all_there > taken:
        print_line(
            f"note: {taken} of {all_there} samples were trained on, equally many of each label; "
            f"{all_there - taken} are held out or left out. --n says how many to train on."
        )
