"""The output directory of a training run, which separates files to release from private files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from residuum.errors import InconclusiveError
from residuum.io.checkpoints import save_checkpoint
from residuum.networks.network import Network
from residuum.records import Dataset, Split, write_atomic, write_json
from residuum.records.rundir import RunDir, environment, sha256
from residuum.settings import TrainingConfig
from residuum.theory.rows import accuracy, choose_task
from residuum.training.loop import TrainingState, make_release

DIVERGED, SUMMARY = "diverged", "training.json"
STATE = Path("private", "state.safetensors")


class TrainingRun(RunDir):
    """The output directory of a training run, opened for writing."""

    what, files, summary = "a training", (SUMMARY,), SUMMARY

    def expected_files(self) -> Collection[str]:
        """Return the names by which the directory of a training run is recognized.

        These are the summary file and, if there is a saved state, the folder ``private``.
        """
        return {SUMMARY, *({"private"} if (self.path / STATE).is_file() else ())}


def write_run(
    out: Path,
    arch: str,
    split: Split,
    config: TrainingConfig,
    state: TrainingState,
    task: str,
    device: str,
) -> dict[str, Any]:
    """Write the output directory of a training run.

    The directory holds the trained weights to release, the initial weights, and the private training and
    held-out samples. The file training.json holds the settings, the results and the hashes of the files. If
    the run diverged, no trained weights are written, but all other files are.

    Args:
        out: The directory.
        arch: Architecture string.
        split: Training samples and held-out samples.
        config: Settings of the training.
        state: State of the finished run.
        task: Task of the network.
        device: Device of the training.

    Returns:
        The summary.

    Raises:
        InconclusiveError: If the run diverged.
    """
    network = make_release(state, arch, split.train, task)
    write_atomic(out / ".gitignore", "*\n")
    (out / "private").chmod(0o700)  # other users must not read the folder ``private``
    # If this run continues an earlier run, delete the trained weights of the earlier run.
    (out / "model.safetensors").unlink(missing_ok=True)
    files = ["init.safetensors", "private/train.npz", "private/holdout.npz"]
    save_checkpoint(network.replace(theta=state.theta0), out / files[0])
    split.train.to_npz(out / files[1])
    split.holdout.to_npz(out / files[2])
    if state.status != DIVERGED:
        files.insert(0, "model.safetensors")
        save_checkpoint(network, out / files[0])
    run_summary = _summary(network, split, state)
    run_description = {
        **run_summary,
        "data": split.train.name,
        "config": config.to_json(),
        "method_state": state.scalars,
        "sha256": {name: sha256(out / name) for name in files},
        "environment": environment(device),
        "history": list(state.history),
    }
    write_json(out / SUMMARY, run_description)
    if state.status == DIVERGED:
        raise InconclusiveError(
            f"The loss and the weights must stay finite during the training; they became infinite or "
            f"undefined before step {state.step}, so no weights were saved.",
            "Lower --lr, or pass --method margin.",
        )
    return run_summary


def _summary(network: Network, split: Split, state: TrainingState) -> dict[str, Any]:
    has_diverged = state.status == DIVERGED
    last_history_entry = state.history[-1] if state.history else {}
    return {
        "status": state.status,
        "steps": state.step,
        "loss": last_history_entry.get("loss"),
        "margin": last_history_entry.get("margin"),
        "theta_norm": last_history_entry.get("norm"),
        "train_accuracy": None if has_diverged else _accuracy(network, split.train),
        "holdout_accuracy": None if has_diverged else _accuracy(network, split.holdout),
        "samples": len(split.train),
        "available_samples": split.available,
        "holdout_samples": len(split.holdout),
        "task": network.task,
        "arch": network.arch,
    }


def _accuracy(network: Network, data: Dataset) -> float | None:
    """Return the share of correctly classified samples, or None for regression."""
    if network.task == "regression":
        return None
    outputs = network.module(data.x.to(next(iter(network.theta.values())).dtype))
    return accuracy(outputs, data.y, choose_task("auto", outputs.shape[1]))
