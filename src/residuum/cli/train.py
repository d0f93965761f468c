"""``residuum train``: a victim with its secrets kept apart.

Examples:

residuum train --data digits --n 40 --arch mlp:64-100-1 --out runs/d

residuum train --data mnist --n 500 --arch mlp:784-1000-1000-1 --method margin --out runs/m

residuum train --data cifar10 --n 500 --arch mlp:3072-1000-1000-1 --method gd --steps 1000000 --out runs/c
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from residuum.cli import options
from residuum.cli.options import option
from residuum.cli.output import number, print_line, print_table, training_progress
from residuum.settings import TrainingConfig


def command(
    *,
    data: str = option(
        f"{', '.join(options.DATASETS)}, an .npz or a folder.",
        ...,
        metavar="DATA",
        suggested=options.DATASETS,
    ),
    arch: str = option(
        "Architecture: mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 (input, channels, outputs) "
        "or polynomial:64-36-1,coefficients=0/0/0/1.",
        ...,
        metavar="ARCH",
    ),
    out: Path = option("Directory to write; an unfinished run there is resumed.", ...),
    chosen: options.Chosen,
    holdout: int | None = option("Held-out samples (default: up to 2000)."),
    center: bool = option("Subtract the mean of the training samples.", True),
    task: str = options.TASK,
    settings: Annotated[dict[str, Any], options.Generated(TrainingConfig, shown=True)],
    device: str = options.DEVICE,
    voice: options.Voice,
) -> None:
    """Train a network and write what may be released apart from what must stay private."""
    from residuum.datasets import load_dataset
    from residuum.networks import Architecture
    from residuum.theory.rows import choose_task
    from residuum.training import train
    from residuum.training.directory import STATE, TrainingRun, write_run

    said = {name: value for name, value in settings.items() if value is not None}
    config = options.made(TrainingConfig(), said, taken=settings)
    options.check_device(device)
    architecture = Architecture.parse(arch)
    task = choose_task(task, architecture.outputs)
    how: dict[str, Any] = {"seed": chosen.data_seed, "root": chosen.data_root, "holdout": holdout}
    split = load_dataset(data, chosen.n, task=task, center=center, **how)
    with TrainingRun.open(out):
        with training_progress(voice.spoken) as watch:
            where: dict[str, Any] = {"device": device, "state_path": out / STATE, "watch": watch}
            state = train(str(architecture), split.train, config, task=task, **where)
        summary = write_run(out, str(architecture), split, config, state, task, device)
    voice.answer(summary, lambda: _show(summary, out, noted=chosen.n is None))


def _show(summary: dict[str, Any], out: Path, noted: bool) -> None:
    right = f"{number(summary['train_accuracy'])} / {number(summary['holdout_accuracy'])}"
    rows = [
        ("status", str(summary["status"])),
        ("steps", str(summary["steps"])),
        ("loss", number(summary["loss"])),
        ("margin", number(summary["margin"])),
        ("train / held-out accuracy", right),
        ("released", str(out / "model.safetensors")),
        ("private", str(out / "private")),
    ]
    print_table(f"{summary['arch']} on {summary['samples']} samples", ("what", "value"), rows)
    taken, all_there = summary["samples"], summary["available_samples"]
    if noted and all_there > taken:  # a file of one's own is not trained on as a whole
        print_line(
            f"note: {taken} of {all_there} samples were trained on, equally many of each label; "
            f"{all_there - taken} are held out or left out. --n says how many to train on."
        )
