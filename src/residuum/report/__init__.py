"""Reports as HTML pages, and figures as PNG bytes."""
