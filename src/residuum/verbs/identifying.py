"""``rs.identify``: what the weights of a polynomial network determine of its samples."""

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
    """Recover the samples of a polynomial network, or report what is determined instead.

    Args:
        model: The network, or its file.
        activation: linear, quadratic, cubic, quartic, quintic or poly:c0,c1,... Required if the file does
            not hold it.
        rank: Dimension of the span of the samples, if known.
        norm: Norm of every sample, if known. It determines the scale.
        augmented: Whether samples end in a constant 1, which determines scale and sign.
        data: Samples, only to report the smallest margin on them.
        seed: Seed of the random slices and starting points.
        arch: Architecture, if the file does not hold it.
        out: Folder for samples, figures and a picture.

    Returns:
        The recovered samples, and which symmetries remain.

    Example:
        >>> rs.identify("cubic.safetensors", rank=8).x.shape
    """
    result = attacks.identify(
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
        write_atomic(folder / ".gitignore", "*\n")  # samples are private
        result.save(folder / SAMPLES)
        write_figures(folder, {PICTURE: identified_figure(result)})
        write_json(folder / SUMMARY, result.to_json())
    return result
