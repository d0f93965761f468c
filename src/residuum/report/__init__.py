"""Pages, and figures as PNG bytes."""
