"""Pictures of what a polynomial network's weights identify."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.records.identification import Identification
from residuum.report import drawing
from residuum.report.drawing import BLUE, GREY, INK, ORANGE, Cell

SHOWN, PANELS = 30, 12


def identified_figure(found: Identification, truth: Tensor | None = None) -> bytes | None:
    """Recovered samples or eigenvectors, with weight, residual and flag; None where there is none.

    truth: (n, d) drawn below, each under the sample nearest to it in direction, sign included.
    """
    vectors, captions, what = _rows(found)
    if vectors is None or not len(vectors):
        return None
    names: tuple[str, ...] = ("found",)
    images: list[tuple[Tensor, ...]] = [(v,) for v in vectors]
    if truth is not None:
        images = [_beside(v, truth) for v in vectors]
        names = ("found", "truth")
    title = f"{what}; degree {found.order - 1}, rank K {found.rank_k} of {found.n_r}"
    width = vectors.shape[1]
    shape = next(s for s in (found.input_shape, (width,)) if math.prod(s or (0,)) == width)
    if drawing.is_image(shape):
        cells = [
            Cell(tuple(v.reshape(shape) for v in pair), text)
            for pair, text in zip(images[:SHOWN], captions, strict=False)
        ]
        return drawing.image_grid(title, cells, names if truth is not None else ("",))
    panels = [
        (text, {name: v.numpy() for name, v in zip(names, pair, strict=False)})
        for pair, text in zip(images[:PANELS], captions, strict=False)
    ]
    return drawing.line_panels(title, panels)


def collapse_figure(networks: dict[str, tuple[Tensor, int, int]]) -> bytes:
    """Share of |theta|^2 per neuron, largest first; per name: shares (m,), r, N_r.

    The rank condition asks for at least N_r neurons: the dashed line.
    """
    figure = drawing.new_figure(4.2 * len(networks), 3.1)
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for axes, (name, (shares, r, needed)) in zip(panels, networks.items(), strict=True):
        sizes = shares.sort(descending=True).values.clamp_min(1e-12)
        axes.plot(range(1, len(sizes) + 1), sizes, "o", color=BLUE, markersize=3)
        axes.axvline(needed, color=ORANGE, ls="--", lw=1.2)
        axes.text(needed, 0.5, f"N_r = {needed} ", color=ORANGE, fontsize=8, ha="right")
        axes.axvline(r, color=GREY, ls=":", lw=1.2)
        axes.text(r, 1.5e-9, f" r = {r}", color=INK, fontsize=8)
        axes.set(yscale="log", ylim=(1e-9, 1.5), xscale="log")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("neuron, largest first", fontsize=8.5)
        drawing.tidy(axes)
    panels[0].set_ylabel("share of |theta|$^2$", fontsize=8.5)
    return drawing.png(figure)


def _rows(found: Identification) -> tuple[Tensor | None, list[str], str]:
    """Vectors to draw, a caption for each, and what they are."""
    if found.aggregate is not None:
        return found.aggregate[None], ["sum of lam y x"], "aggregate of all samples"
    if found.eigenvectors is not None and found.eigenvalues is not None:
        order = found.eigenvalues.abs().argsort(descending=True)
        captions = [f"eigenvalue {float(found.eigenvalues[i]):.2g}" for i in order]
        return found.eigenvectors.T[order], captions, "eigenvectors of the moment matrix"
    captions = [
        f"{float(residual):.0e} {'cert.' if sure else 'heur.'}"
        for residual, sure in zip(found.residuals, found.certified, strict=True)
    ]
    certified = int(found.certified.sum())
    return (
        found.x,
        captions,
        f"{len(found.x)} samples, {certified} certified (residual and flag above each)",
    )


def _beside(vector: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The vector and the row of ``truth`` nearest in direction; the free sign is the truth's."""
    cosine = truth @ vector / truth.norm(dim=1).clamp_min(1e-300)
    nearest = int(cosine.abs().argmax())
    return torch.where(cosine[nearest] < 0, -1.0, 1.0) * vector, truth[nearest]
