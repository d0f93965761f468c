"""Drawings of reproduced figures, from saved arrays alone; each takes an Outcome and returns a PNG."""
