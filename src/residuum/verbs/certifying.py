"""Certificates of files: how close to a KKT point, and ``rs.uniqueness``, what other sets keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from residuum.attacks.stationarity.solution import Solution, build_solution, find_best_residual
from residuum.io.checkpoints import as_network
from residuum.networks.canonical import canonical
from residuum.networks.network import Network
from residuum.records import Certificate, Dataset, Reconstruction, Uniqueness
from residuum.records.base import plain
from residuum.records.inputs import find_training_samples
from residuum.records.rundir import write_json
from residuum.report.figures import ambiguity_figure
from residuum.theory import certify
from residuum.theory import uniqueness as theory
from residuum.verbs.attacking import attacked_other, load_run, write_figures

SUMMARY, RECORD, PICTURE = "uniqueness.json", "uniqueness.safetensors", "ambiguity.png"
KKT = "certificate.json"
OTHER = "CKPT is not the checkpoint that was attacked"


@dataclass(frozen=True, eq=False)
class Certified:
    """A certificate and what it is of; seconds: what it was expected to take."""

    unique: Uniqueness
    chosen: Solution
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
            row["confidence"] = None if chosen.confidence is None else plain(chosen.confidence[i])
        return {
            **summary,
            "candidates": self.which,
            "restarts": self.found.restarts,
            "estimated_seconds": self.seconds,
            "attack": self.found.attack,
            "knowledge": dict(self.found.knowledge.provenance),
        }

    def write(self, out: Path) -> None:
        """The record, a picture, and the summary last."""
        self.unique.save(out / RECORD)
        support = self.chosen.support
        every = self.found.restarts
        agreement = None if support is None else [f"{int(s)}/{every}" for s in support]
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
    released = as_network(checkpoint, arch)
    given = Dataset.from_npz(find_training_samples(checkpoint, data))
    task = released.task if task == "auto" and released.task else task
    how: dict[str, Any] = {"rivals": rivals, "kink_tolerance": kink_tolerance, "task": task}
    found = certify(released.module, given.x, given.y, **how)
    if out is not None:
        write_json(out / KKT, found.to_json())
    return found, f"{released.arch} on {found.samples} samples"


def uniqueness(
    model: Network | nn.Module | str | Path,
    found: Reconstruction | str | Path,
    *,
    candidates: str = "selected",
    samples: int | None = None,
    share: float = theory.SHARE,
    arch: str | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
) -> Uniqueness:
    """What every other set of the same patterns and labels keeps of each reconstruction.

    found: a reconstruction, or the folder of an attack.
    candidates: "selected" (what several restarts hold) or "best" (all of the best restart).
    samples: certify the first so many.
    share: least part of a candidate's multiplier that another image takes over.
    out: folder for the certificate and a picture.
    """
    return certified(model, found, candidates, samples, share, arch, device, out).unique


def certified(
    model: Network | nn.Module | str | Path,
    found: Reconstruction | str | Path,
    candidates: str,
    samples: int | None,
    share: float,
    arch: str | None,
    device: str,
    out: str | Path | None,
    watch: Any = None,
    say: Callable[[str], None] | None = None,
) -> Certified:
    """:func:`uniqueness` with all that belongs to it; say: told the cost before the work."""
    part = found if isinstance(found, Reconstruction) else load_run(Path(found))
    released = as_network(model, arch)
    network = (canonical(released) if part.canonical else released).double_module
    chosen = build_solution(network, part, candidates)
    box = part.knowledge.box(chosen.x[0])
    cost = theory.estimate_cost(chosen.kkt, box=box, samples=samples, device=device)
    if say is not None:
        say(f"cost: {cost}")
    unique = theory.uniqueness(
        chosen.kkt, box=box, share=share, samples=samples, device=device, watch=watch
    ).replace(best_residual=find_best_residual(network, [part]))
    files = isinstance(model, str | Path) and not isinstance(found, Reconstruction)
    if files and attacked_other(Path(str(model)), Path(str(found))):
        unique = unique.replace(notes=(*unique.notes, OTHER))
    result = Certified(unique, chosen, part, candidates, cost.seconds, released.arch)
    if out is not None:
        result.write(Path(out))
    return result
