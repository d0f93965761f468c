"""Figures of attacks and scores, as PNG bytes."""

from residuum.report.figures import loss_figure, matches_figure, output_figure, selected_figure

__all__ = ["loss_figure", "matches_figure", "output_figure", "selected_figure"]
