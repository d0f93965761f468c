"""Frozen dataclasses that cross stages, and their files on disk."""

from residuum.records.base import Record, same
from residuum.records.inputs import TASKS, Dataset, Knowledge, Split, read_npz
from residuum.records.results import (
    Certificate,
    Exposure,
    LayerResidual,
    Reconstruction,
    Scores,
    Selection,
    Sums,
    Uniqueness,
)
from residuum.records.rundir import make_directory, read_json, write_atomic, write_json
