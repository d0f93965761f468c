"""Scoring of reconstructions: metrics, matching with samples, and how many matches occur by chance."""

from residuum.evaluation.lookup import Lookup, lookup
from residuum.evaluation.matching import MATCHINGS, METRICS, Matching, Metric
from residuum.evaluation.null import Calibration, calibrate
from residuum.evaluation.scoring import score

__all__ = [
    "MATCHINGS",
    "METRICS",
    "Calibration",
    "Lookup",
    "Matching",
    "Metric",
    "calibrate",
    "lookup",
    "score",
]
