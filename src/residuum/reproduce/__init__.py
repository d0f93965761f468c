"""Figures and tables of the papers again, with this project's numbers beside the published ones."""
