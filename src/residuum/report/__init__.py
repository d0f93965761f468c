"""Pages, and figures as PNG bytes."""

from residuum.report.figures import (
    alternatives_figure,
    ambiguity_figure,
    compared_figure,
    family_figure,
    identified_figure,
    loss_figure,
    matches_figure,
    output_figure,
    selected_figure,
)

__all__ = [
    "alternatives_figure",
    "ambiguity_figure",
    "compared_figure",
    "family_figure",
    "identified_figure",
    "loss_figure",
    "matches_figure",
    "output_figure",
    "selected_figure",
]
