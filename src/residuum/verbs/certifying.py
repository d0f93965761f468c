"""Certificates: how well samples explain the weights, and how unique a reconstruction is."""

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
OTHER = "the checkpoint passed as CKPT is not the checkpoint that was attacked"


@dataclass(frozen=True, eq=False)
class CertifiedReconstruction:
    """A reconstruction with its uniqueness certificate.

    Attributes:
        uniqueness: How much every other training set that fits the weights must share with the
            reconstruction.
        solution: The candidates that were certified.
        reconstruction: The result of the attack.
        candidates: Which candidates were certified, "selected" or "best".
        seconds: Expected time to compute the certificate, in seconds.
        arch: Architecture of the network.
    """

    uniqueness: Uniqueness
    solution: Solution
    reconstruction: Reconstruction
    candidates: str
    seconds: float
    arch: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``uniqueness.json``, with the number of runs that found each sample."""
        summary, support = self.uniqueness.to_json(), self.solution.support
        confidence = self.solution.confidence
        for row in summary["per_sample"]:
            sample_index = row["index"]
            row["support"] = None if support is None else int(support[sample_index])
            row["confidence"] = None if confidence is None else plain(confidence[sample_index])
        return {
            **summary,
            "candidates": self.candidates,
            "restarts": self.reconstruction.restarts,
            "estimated_seconds": self.seconds,
            "attack": self.reconstruction.attack,
            "knowledge": dict(self.reconstruction.knowledge.provenance),
        }

    def write(self, out: Path) -> None:
        """Write the certificate and its picture to the folder ``out``, and the summary last."""
        self.uniqueness.save(out / RECORD)
        support, restarts = self.solution.support, self.reconstruction.restarts
        agreement_texts = None if support is None else [f"{int(s)}/{restarts}" for s in support]
        subtracted_mean = self.reconstruction.knowledge.mean
        figure = ambiguity_figure(
            self.solution.x, self.uniqueness, subtracted_mean, agreement_texts
        )
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
    """Measure how exactly the samples in a file solve the KKT equation for a network.

    Args:
        checkpoint: File of the network, or a training directory.
        data: File of the samples. None uses the training samples in the training directory.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        task: "binary", "multiclass", "regression", or "auto" to use the task of the network.
        rivals: With several classes, the wrong classes of a sample that get a multiplier. "tied" means every
            wrong class whose output equals the largest output of a wrong class. "best" means only one wrong
            class with the largest output.
        kink_tolerance: A kink is a sample at which the pre-activation of a neuron is zero. A pre-activation
            counts as zero if its relative size is below this number.
        out: Folder for ``certificate.json``, or None to write no file.

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
    """Certify how much every other training set that fits the weights must share with each reconstruction.

    The certificate is about training sets with the same labels and activation patterns.

    Args:
        model: The attacked network, or the file of its weights.
        reconstruction: The result of an attack, or the folder of the attack.
        candidates: "selected" for the candidates that several restarts found, or "best" for all candidates
            of the best restart.
        samples: Number of candidates to certify, counted from the first. None certifies all candidates.
        share: Smallest share of a candidate's multiplier that an image of another training set must have to
            replace the candidate. The certificate bounds how far such an image can be from the candidate.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        device: Device to compute on.
        out: Folder for the certificate and its picture.

    Returns:
        The uniqueness certificate of the candidates.

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
    """Compute the certificate of :func:`uniqueness`. Also return the candidates and the result of the attack.

    Args:
        model: The attacked network, or the file of its weights.
        reconstruction: The result of an attack, or the folder of the attack.
        candidates: "selected" for the candidates that several restarts found, or "best" for all candidates
            of the best restart.
        samples: Number of candidates to certify, counted from the first. None certifies all candidates.
        share: Smallest share of a candidate's multiplier that an image of another training set must have to
            replace the candidate. The certificate bounds how far such an image can be from the candidate.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        device: Device to compute on.
        out: Folder for the certificate and its picture.
        watch: Function that receives the number of finished samples and the number of all samples.
        show_cost: Function that receives a line with the expected cost before the computation.

    Returns:
        The certificate, with the candidates and the result of the attack.
    """
    attack_result = (
        reconstruction
        if isinstance(reconstruction, Reconstruction)
        else load_run(Path(reconstruction))
    )
    released = as_network(model, arch)
    network = (canonical(released) if attack_result.canonical else released).double_module
    solution = build_solution(network, attack_result, candidates)
    value_bounds = attack_result.knowledge.box(solution.x[0])
    cost = theory.estimate_cost(solution.kkt, box=value_bounds, samples=samples, device=device)
    if show_cost is not None:
        show_cost(f"expected cost of the certificate: {cost}")
    certificate = theory.uniqueness(
        solution.kkt, box=value_bounds, share=share, samples=samples, device=device, watch=watch
    ).replace(best_residual=find_best_residual(network, [attack_result]))
    has_paths = isinstance(model, str | Path) and not isinstance(reconstruction, Reconstruction)
    if has_paths and attacked_other(Path(str(model)), Path(str(reconstruction))):
        certificate = certificate.replace(notes=(*certificate.notes, OTHER))
    certified_reconstruction = CertifiedReconstruction(
        certificate, solution, attack_result, candidates, cost.seconds, released.arch
    )
    if out is not None:
        certified_reconstruction.write(Path(out))
    return certified_reconstruction
