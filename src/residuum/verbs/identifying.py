"""``rs.identify``: recover what the weights of a polynomial network determine about its training samples."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from residuum.attacks.exact import polynomial as attacks
from residuum.io.checkpoints import as_network
from residuum.networks.network import Network
from residuum.records import Dataset, make_directory, write_atomic, write_json
from residuum.records.identification import Identification
from residuum.report.figures import identified_figure
from residuum.verbs.attacking import write_figures

SUMMARY, SAMPLES, PICTURE = "identify.json", "identification.safetensors", "identified.png"


def identify(
    model: Network | nn.Module | str | Path,
    activation: str | None = None,
    *,
    rank: int | None = None,
    norm: float | None = None,
    augmented: bool = False,
    data: Dataset | None = None,
    seed: int = 0,
    arch: str | None = None,
    out: str | Path | None = None,
) -> Identification:
    """Recover the training samples of a polynomial network, or report what its weights determine instead.

    Args:
        model: The network, or the file of its weights.
        activation: Activation function: linear, quadratic, cubic, quartic, quintic or poly:c0,c1,... Required
            if the file of the weights does not hold the activation.
        rank: Dimension of the span of the samples, if known.
        norm: Norm of every sample, if known. The norm determines the scale of the samples.
        augmented: Whether every sample ends in a constant 1. The constant determines scale and sign.
        data: The training samples, only to report their smallest margin.
        seed: Seed of the random numbers of the search for samples.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        out: Folder for the recovered samples, a summary and a picture.

    Returns:
        The recovered samples, and which symmetries of the samples the weights do not determine.

    Example:
        >>> rs.identify("cubic.safetensors", rank=8).x.shape
    """
    identification = attacks.identify(
        as_network(model, arch),
        activation,
        rank=rank,
        norm=norm,
        augmented=augmented,
        data=data,
        seed=seed,
    )
    if out is not None:
        folder = make_directory(out)
        # Recovered samples are private and must not be committed.
        write_atomic(folder / ".gitignore", "*\n")
        identification.save(folder / SAMPLES)
        write_figures(folder, {PICTURE: identified_figure(identification)})
        write_json(folder / SUMMARY, identification.to_json())
    return identification
