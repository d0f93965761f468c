"""Records: frozen dataclasses that hold samples or results, and the files in which they are saved."""

from residuum.records.base import Record, same
from residuum.records.certificate import Certificate, LayerResidual
from residuum.records.exposure import Exposure
from residuum.records.filled_records import FilledRecords
from residuum.records.inputs import TASKS, Dataset, Split, read_npz
from residuum.records.knowledge import Knowledge
from residuum.records.reconstruction import Reconstruction, Selection
from residuum.records.recovered_table import RecoveredTable
from residuum.records.rundir import make_directory, read_json, write_atomic, write_json
from residuum.records.scores import Scores
from residuum.records.tables import Table
from residuum.records.uniqueness import Sums, Uniqueness
