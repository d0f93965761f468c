"""``residuum train``: train a network to try attacks on.

The files that must stay private, such as the training samples, are written to a separate folder.

Examples:
residuum train --data digits --n 40 --arch mlp:64-100-1 --out runs/d

residuum train --data mnist --n 500 --arch mlp:784-1000-1000-1 --method margin --out runs/m

residuum train --data cifar10 --n 500 --arch mlp:3072-1000-1000-1 --method gd --steps 1000000 --out runs/c
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from residuum.cli import options
from residuum.cli.options import options_from, with_options
from residuum.cli.output import format_number, print_line, print_table, training_progress
from residuum.settings import TrainingConfig

app = options.command_app("train", __doc__)


@app.default
@with_options(settings=options_from(TrainingConfig, group=Group("Training", sort_key=2)))
def _command(
    *,
    data: Annotated[
        str,
        Parameter(
            help=f"Training samples: the name of a dataset ({', '.join(options.DATASETS)}), an .npz file "
            f"or a folder.",
            metavar="DATA",
            completer=lambda _: options.DATASETS,
        ),
    ],
    arch: Annotated[
        str,
        Parameter(
            help="Architecture of the network, such as mlp:784-1000-1000-1, convnet:1x8x8-16-32-1 (input, "
            "channels, outputs) or polynomial:64-36-1,coefficients=0/0/0/1.",
            metavar="ARCH",
        ),
    ],
    out: Annotated[
        Path,
        Parameter(
            help="Folder for the trained network. If the folder holds an unfinished training, "
            "this training is continued."
        ),
    ],
    n: Annotated[
        int | None,
        Parameter(
            help="Number of training samples. Every label gets the same number of samples. By default all "
            "samples are used, or half of them if the held-out samples come from the same file."
        ),
    ] = None,
    data_root: Annotated[
        Path | None,
        Parameter(
            help="Folder of downloaded datasets. By default the folder in the environment variable "
            "RESIDUUM_DATA."
        ),
    ] = None,
    data_seed: Annotated[
        int | None,
        Parameter(
            help="Seed that selects the training samples. By default the first n samples are used."
        ),
    ] = None,
    holdout: Annotated[
        int | None,
        Parameter(
            help="Number of held-out samples, which the network is not trained on. By "
            "default up to 2000."
        ),
    ] = None,
    center: Annotated[
        bool,
        Parameter(
            help="Subtract the mean of the training samples from all samples.",
            negative_bool="no-",
            show_default=lambda _: "on",
        ),
    ] = True,
    task: options.TaskOption = "auto",
    device: options.Device = "cpu",
    output: options.Output = options.OUTPUT,
    settings: dict[str, Any] | None = None,
) -> None:
    """Train a network. Files that may be released are separate from files that must stay private."""
    from residuum.datasets import load_dataset
    from residuum.networks import Architecture
    from residuum.theory.rows import choose_task
    from residuum.training import train
    from residuum.training.directory import STATE, TrainingRun, write_run

    config = options.make_from_options(TrainingConfig, settings or {})
    options.check_device(device)
    architecture = Architecture.parse(arch)
    chosen_task = choose_task(task, architecture.outputs)
    split = load_dataset(
        data, n, task=chosen_task, center=center, seed=data_seed, root=data_root, holdout=holdout
    )
    with TrainingRun.open(out):
        with training_progress(output.visible) as watch:
            training_state = train(
                str(architecture),
                split.train,
                config,
                task=chosen_task,
                device=device,
                state_path=out / STATE,
                watch=watch,
            )
        run_summary = write_run(
            out, str(architecture), split, config, training_state, chosen_task, device
        )
    output.print_result(run_summary, lambda: _show(run_summary, out, is_default_n=n is None))


def _show(summary: dict[str, Any], out: Path, is_default_n: bool) -> None:
    accuracies = (
        f"{format_number(summary['train_accuracy'])} / {format_number(summary['holdout_accuracy'])}"
    )
    table_rows = [
        ("why training ended", str(summary["status"])),
        ("steps", str(summary["steps"])),
        ("loss", format_number(summary["loss"])),
        ("margin", format_number(summary["margin"])),
        ("train / held-out accuracy", accuracies),
        ("released", str(out / "model.safetensors")),
        ("private", str(out / "private")),
    ]
    print_table(f"{summary['arch']} on {summary['samples']} samples", ("what", "value"), table_rows)
    used, available = summary["samples"], summary["available_samples"]
    if (
        is_default_n and available > used
    ):  # tell the user that some samples of the file are not used
        print_line(
            f"note: the network was trained on {used} of {available} samples, with equal numbers of each "
            f"label. {available - used} are held out or unused. --n sets the number of training samples."
        )
