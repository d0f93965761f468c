"""Certificates of files: closeness to a KKT point, and ``rs.uniqueness`` of a reconstruction."""

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
class CertifiedReconstruction:
    """A certified reconstruction.

    Attributes:
        uniqueness: The certificate.
        solution: The candidates that were certified.
        reconstruction: The result of the attack.
        candidates: Which candidates were certified, "selected" or "best".
        seconds: Expected time of the computation.
        arch: Architecture of the network.
    """

    uniqueness: Uniqueness
    solution: Solution
    reconstruction: Reconstruction
    candidates: str
    seconds: float
    arch: str

    def to_json(self) -> dict[str, Any]:
        """Return the published form, with the support and confidence of every sample."""
        summary, support = self.uniqueness.to_json(), self.solution.support
        confidence = self.solution.confidence
        for row in summary["per_sample"]:
            i = row["index"]
            row["support"] = None if support is None else int(support[i])
            row["confidence"] = None if confidence is None else plain(confidence[i])
        return {
            **summary,
            "candidates": self.candidates,
            "restarts": self.reconstruction.restarts,
            "estimated_seconds": self.seconds,
            "attack": self.reconstruction.attack,
            "knowledge": dict(self.reconstruction.knowledge.provenance),
        }

    def write(self, out: Path) -> None:
        """Write the record, the picture, and last the summary to the folder ``out``."""
        self.uniqueness.save(out / RECORD)
        support, restarts = self.solution.support, self.reconstruction.restarts
        agreement = None if support is None else [f"{int(s)}/{restarts}" for s in support]
        mean = self.reconstruction.knowledge.mean
        figure = ambiguity_figure(self.solution.x, self.uniqueness, mean, agreement)
        write_figures(out, {PICTURE: figure})
        write_json(out / SUMMARY, self.to_json())


def certify_kkt(
    checkpoint: Path,
    data: Path | None,
    *,
    arch: str | None,
    task: str,
    rivals: str,
    kink_tolerance: float,
    out: Path | None,
) -> tuple[Certificate, str]:
    """Measure how close a checkpoint is to a KKT point on the samples of a file.

    Args:
        checkpoint: File of the network, or a training directory.
        data: File of the samples, by default those in the training directory.
        arch: Architecture, if the file does not hold it.
        task: "binary", "multiclass", "regression", or "auto" to use that of the network.
        rivals: With several classes, "tied" or "best".
        kink_tolerance: Relative pre-activation below which a neuron has a kink at a sample.
        out: Folder for ``certificate.json``, if any.

    Returns:
        The certificate, and a title with the network and the number of samples.
    """
    network = as_network(checkpoint, arch)
    samples = Dataset.from_npz(find_training_samples(checkpoint, data))
    task = network.task if task == "auto" and network.task else task
    certificate = certify(
        network.module,
        samples.x,
        samples.y,
        task=task,
        rivals=rivals,
        kink_tolerance=kink_tolerance,
    )
    if out is not None:
        write_json(out / KKT, certificate.to_json())
    return certificate, f"{network.arch} on {certificate.samples} samples"


def uniqueness(
    model: Network | nn.Module | str | Path,
    reconstruction: Reconstruction | str | Path,
    *,
    candidates: str = "selected",
    samples: int | None = None,
    share: float = theory.SHARE,
    arch: str | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
) -> Uniqueness:
    """Certify what each reconstruction shares with every other training set of the same weights.

    The other sets have the same labels and activation patterns.

    Args:
        model: The attacked network, or its file.
        reconstruction: The result of an attack, or the folder of the attack.
        candidates: "selected" (those that several restarts agree on) or "best" (all of the best restart).
        samples: Number of candidates to certify, from the first. None certifies all.
        share: Smallest share of a candidate's multiplier that another image takes over.
        arch: Architecture, if the file does not hold it.
        device: Where to compute.
        out: Folder for the certificate and a picture.

    Returns:
        The certificate.

    Example:
        >>> rs.uniqueness("model.safetensors", "runs/a").determined_at_least
    """
    return certify_reconstruction(
        model,
        reconstruction,
        candidates=candidates,
        samples=samples,
        share=share,
        arch=arch,
        device=device,
        out=out,
    ).uniqueness


def certify_reconstruction(
    model: Network | nn.Module | str | Path,
    reconstruction: Reconstruction | str | Path,
    *,
    candidates: str,
    samples: int | None,
    share: float,
    arch: str | None,
    device: str,
    out: str | Path | None,
    watch: Any = None,
    show_cost: Callable[[str], None] | None = None,
) -> CertifiedReconstruction:
    """Compute the certificate of :func:`uniqueness`, and keep what it was computed from.

    Args:
        model: The attacked network, or its file.
        reconstruction: The result of an attack, or the folder of the attack.
        candidates: "selected" or "best".
        samples: Number of candidates to certify, from the first. None certifies all.
        share: Smallest share of a candidate's multiplier that another image takes over.
        arch: Architecture, if the file does not hold it.
        device: Where to compute.
        out: Folder for the certificate and a picture.
        watch: Receives the number of finished samples and of all samples.
        show_cost: Receives a line with the expected cost before the computation.

    Returns:
        The certified reconstruction.
    """
    attacked = (
        reconstruction
        if isinstance(reconstruction, Reconstruction)
        else load_run(Path(reconstruction))
    )
    released = as_network(model, arch)
    network = (canonical(released) if attacked.canonical else released).double_module
    chosen = build_solution(network, attacked, candidates)
    box = attacked.knowledge.box(chosen.x[0])
    cost = theory.estimate_cost(chosen.kkt, box=box, samples=samples, device=device)
    if show_cost is not None:
        show_cost(f"cost: {cost}")
    certificate = theory.uniqueness(
        chosen.kkt, box=box, share=share, samples=samples, device=device, watch=watch
    ).replace(best_residual=find_best_residual(network, [attacked]))
    are_files = isinstance(model, str | Path) and not isinstance(reconstruction, Reconstruction)
    if are_files and attacked_other(Path(str(model)), Path(str(reconstruction))):
        certificate = certificate.replace(notes=(*certificate.notes, OTHER))
    result = CertifiedReconstruction(
        certificate, chosen, attacked, candidates, cost.seconds, released.arch
    )
    if out is not None:
        result.write(Path(out))
    return result
