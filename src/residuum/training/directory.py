"""The output directory of a training, which separates files for release from private files."""

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
    """The output directory of a training, opened for writing."""

    what, files, summary = "a training", (SUMMARY,), SUMMARY

    def expected_files(self) -> Collection[str]:
        """Return the name of the summary file, and "private" if this folder holds the state of a training."""
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
    """Write the directory of a training: released weights, initial weights, private data and a protocol.

    If the run diverged, no weights are released, but all other files are written.

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
    checkpoint = make_release(state, arch, split.train, task)
    write_atomic(out / ".gitignore", "*\n")
    (out / "private").chmod(0o700)  # only the folder private must be hidden from other users
    # An earlier, shorter run may have written weights.
    (out / "model.safetensors").unlink(missing_ok=True)
    files = ["init.safetensors", "private/train.npz", "private/holdout.npz"]
    save_checkpoint(checkpoint.replace(theta=state.theta0), out / files[0])
    split.train.to_npz(out / files[1])
    split.holdout.to_npz(out / files[2])
    if state.status != DIVERGED:
        files.insert(0, "model.safetensors")
        save_checkpoint(checkpoint, out / files[0])
    summary = _summary(checkpoint, split, state)
    protocol = {
        **summary,
        "data": split.train.name,
        "config": config.to_json(),
        "method_state": state.scalars,
        "sha256": {name: sha256(out / name) for name in files},
        "environment": environment(device),
        "history": list(state.history),
    }
    write_json(out / SUMMARY, protocol)
    if state.status == DIVERGED:
        raise InconclusiveError(
            f"The training diverged before step {state.step}, so there are no weights to save.",
            "Lower --lr, or pass --method margin.",
        )
    return summary


def _summary(checkpoint: Network, split: Split, state: TrainingState) -> dict[str, Any]:
    diverged = state.status == DIVERGED
    last = state.history[-1] if state.history else {}
    return {
        "status": state.status,
        "steps": state.step,
        "loss": last.get("loss"),
        "margin": last.get("margin"),
        "theta_norm": last.get("norm"),
        "train_accuracy": None if diverged else _accuracy(checkpoint, split.train),
        "holdout_accuracy": None if diverged else _accuracy(checkpoint, split.holdout),
        "samples": len(split.train),
        "available_samples": split.available,
        "holdout_samples": len(split.holdout),
        "task": checkpoint.task,
        "arch": checkpoint.arch,
    }


def _accuracy(checkpoint: Network, data: Dataset) -> float | None:
    """Return the share of correctly classified samples, or None for regression."""
    if checkpoint.task == "regression":
        return None
    outputs = checkpoint.module(data.x.to(next(iter(checkpoint.theta.values())).dtype))
    return accuracy(outputs, data.y, choose_task("auto", outputs.shape[1]))
