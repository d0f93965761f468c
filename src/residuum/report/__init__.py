"""Figures of attacks and scores, as PNG bytes."""

from residuum.report.figures import (
    compared_figure,
    loss_figure,
    matches_figure,
    output_figure,
    selected_figure,
)

__all__ = ["compared_figure", "loss_figure", "matches_figure", "output_figure", "selected_figure"]
