"""Refael et al. 2025, No Prior, No Leakage (arXiv 2509.21296)."""

from __future__ import annotations

from residuum.reproduce.figure import Figure, drawn
from residuum.reproduce.refael2025.plane import plane
from residuum.reproduce.refael2025.shift import shift
from residuum.reproduce.refael2025.sphere import sphere
from residuum.reproduce.refael2025.theorems import theorems

FIGURES: dict[str, Figure] = {
    "fig1": Figure(
        "merge and split in the plane, on an actual network", plane, drawn("plane.regions")
    ),
    "fig2a": Figure(
        "distance of reconstructions by initial radius, sphere", sphere, drawn("curves.radii")
    ),
    "fig2b": Figure("reconstructions without a known range, CIFAR", shift, drawn("images.shifts")),
    "theorems": Figure("every lemma and theorem: printed, corrected, exact", theorems),
}
