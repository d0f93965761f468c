"""``rs.identify``: what the weights of a polynomial network determine of its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Recover the samples of a polynomial network, or say what is determined instead.

    activation: linear, quadratic, cubic, quartic, quintic or poly:c0,c1,...
    rank: dimension of the samples' span.
    norm: of every sample.
    augmented: samples end in a constant 1.
    data: only to report the least margin on it.
    out: folder for samples, figures and a picture.
    """
    known: dict[str, Any] = {"rank": rank, "norm": norm, "augmented": augmented}
    found = attacks.identify(as_network(model, arch), activation, **known, data=data, seed=seed)
    if out is not None:
        folder = make_directory(out)
        write_atomic(folder / ".gitignore", "*\n")  # samples are private
        found.save(folder / SAMPLES)
        write_figures(folder, {PICTURE: identified_figure(found)})
        write_json(folder / SUMMARY, found.to_json())
    return found
