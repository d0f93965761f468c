"""Certificates of files: how close to a KKT point, and ``rs.uniqueness``, what equal pairs keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from residuum.attacks import OBJECTIVES
from residuum.checkpoints import as_checkpoint, build_model
from residuum.records import Certificate, Checkpoint, Dataset, Reconstruction, Uniqueness
from residuum.records.data import own_data
from residuum.records.rundir import write_json
from residuum.report.figures import ambiguity_figure
from residuum.theory import certify
from residuum.theory.uniqueness import question
from residuum.theory.uniqueness.reconstruction import Candidates
from residuum.verbs.attacking import attacked_other, load_run, write_figures

SUMMARY, RECORD, PICTURE = "uniqueness.json", "uniqueness.safetensors", "ambiguity.png"
KKT = "certificate.json"
OTHER = "CKPT is not the checkpoint that was attacked"


@dataclass(frozen=True, eq=False)
class Certified:
    """A certificate and what it is of; seconds: what it was expected to take."""

    unique: Uniqueness
    chosen: Candidates
    found: Reconstruction
    which: str
    seconds: float
    arch: str

    def to_json(self) -> dict[str, Any]:
        """The published form, with what the restarts say of each."""
        summary, chosen = self.unique.to_json(), self.chosen
        for row in summary["per_sample"]:
            i = row["index"]
            row["support"] = None if chosen.support is None else int(chosen.support[i])
            row["confidence"] = None if chosen.confidence is None else float(chosen.confidence[i])
        return {
            **summary, "candidates": self.which, "restarts": self.found.restarts,
            "estimated_seconds": self.seconds, "attack": self.found.attack,
            "knowledge": dict(self.found.knowledge.provenance),
        }  # fmt: skip

    def write(self, out: Path) -> None:
        """The record, a picture, and the summary last."""
        self.unique.save(out / RECORD)
        support = self.chosen.support
        agreement = None
        if support is not None:
            agreement = [f"{int(s)}/{self.found.restarts}" for s in support]
        mean = self.found.knowledge.mean
        write_figures(out, {PICTURE: ambiguity_figure(self.chosen.x, self.unique, mean, agreement)})
        write_json(out / SUMMARY, self.to_json())


def kkt(
    checkpoint: Path,
    data: Path | None,
    arch: str | None,
    task: str,
    rivals: str,
    kink_tolerance: float,
    out: Path | None,
) -> tuple[Certificate, str]:
    """How close a checkpoint is to a KKT point on samples of a file, and what that is of."""
    released = as_checkpoint(checkpoint, arch)
    given = Dataset.from_npz(own_data(checkpoint, data))
    found = certify(
        build_model(released), given.x, given.y, rivals=rivals, kink_tolerance=kink_tolerance,
        task=released.task if task == "auto" and released.task else task,
    )  # fmt: skip
    if out is not None:
        write_json(out / KKT, found.to_json())
    return found, f"{released.arch} on {found.samples} samples"


def uniqueness(
    model: Checkpoint | nn.Module | str | Path,
    found: Reconstruction | str | Path,
    *,
    candidates: str = "selected",
    samples: int | None = None,
    tolerance: float = 1e-6,
    task: str = "auto",
    arch: str | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
) -> Uniqueness:
    """What pairs of other images, in the place of each reconstruction, keep of it.

    found: a reconstruction, or the folder of an attack; candidates: "selected" (what several restarts
    hold) or "best" (all of the best restart); samples: certify the first so many; tolerance: change
    of the residual, over the layers' norms, that still counts as none; out: folder for the certificate
    and a picture.
    """
    return certified(
        model, found, candidates=candidates, samples=samples, tolerance=tolerance, task=task,
        arch=arch, device=device, out=out,
    ).unique  # fmt: skip


def certified(
    model: Checkpoint | nn.Module | str | Path,
    found: Reconstruction | str | Path,
    *,
    candidates: str,
    samples: int | None,
    tolerance: float,
    task: str,
    arch: str | None,
    device: str,
    out: str | Path | None,
    watch: Any = None,
    say: Callable[[str], None] | None = None,
) -> Certified:
    """:func:`uniqueness` with all that belongs to it; say: told the cost before the work."""
    part = found if isinstance(found, Reconstruction) else load_run(Path(found))
    if task == "auto" and part.attack in OBJECTIVES:
        task = OBJECTIVES[part.attack].task or task
    released = as_checkpoint(model, arch)
    asked = question(build_model(released).double(), part, candidates, task)
    cost = asked.cost(samples, device)
    if say is not None:
        say(f"cost: {cost}")
    unique = asked.answer(tolerance, samples, device=device, watch=watch)
    files = isinstance(model, str | Path) and not isinstance(found, Reconstruction)
    if files and attacked_other(Path(str(model)), Path(str(found))):
        unique = unique.replace(notes=(*unique.notes, OTHER))
    result = Certified(unique, asked.candidates, part, candidates, cost.seconds, released.arch)
    if out is not None:
        result.write(Path(out))
    return result
