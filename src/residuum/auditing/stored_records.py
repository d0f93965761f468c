"""Search for training records that a model file stores. Such records decide the verdict without any attack.

A nearest-neighbor model, a support vector machine or a Gaussian process consists of its training records. A
checkpoint may hold the arrays that it was trained on. If the user passes samples, we search for each sample
in every array of the model file (:mod:`residuum.scanning.content`), whatever the array is called. We search
for held-out samples and shuffled samples in the same way, as a negative control.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.stats import hypergeom
from torch import Tensor, nn

from residuum.auditing.outcomes import STORED, AttackOutcome
from residuum.errors import ResiduumError
from residuum.evaluation.null import SIGNIFICANCE
from residuum.io.inert import Block, InertObject
from residuum.io.release import Release
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.scanning.content import REMOVE_ROWS, ContentSearch, Queries, RowPlace, search_content
from residuum.scanning.findings import RecordArray, records_in
from residuum.scanning.number_sources import read_tensor

# First words of the note that says why an audit ran no other tests.
ONLY_STORED = "only stored records were searched, because the model cannot receive the samples"
NAME = "stored outright"  # name of this search in the table of attacks


@dataclass(frozen=True, eq=False)
class StoredRecords:
    """The data records that a release (the published files of a model) stores.

    Attributes:
        model: Class of the estimator that stores the records, "" if the records are not part of an estimator.
        arrays: The arrays that hold records, which are known from their names or from their library.
        search: The search for the user's samples in all arrays, None without samples.
        inputs: Number of inputs of the network in the same release.
        notes: Why nothing else was tested: why the network cannot be read, or why it cannot receive the
            samples. () if the network was tested.
    """

    model: str
    arrays: tuple[RecordArray, ...]
    search: ContentSearch | None = None
    inputs: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether the program that wrote the file is known to store records in at least one of the arrays."""
        return any(array.certain for array in self.arrays)

    @property
    def is_likely(self) -> bool:
        """Whether the arrays probably hold records.

        This is the case if ``is_certain`` is True, or if the rows of some array have as many values as an
        input of the network.
        """
        values_per_record = {
            array.records.shape[1] for array in self.arrays if array.records is not None
        }
        return self.is_certain or self.inputs in values_per_record

    @property
    def values_per_record(self) -> int | None:
        """Number of values of a record in the first array of records, None if no array holds numbers."""
        record_sizes = (a.records.shape[1] for a in self.arrays if a.records is not None)
        return next(record_sizes, None)

    @property
    def count(self) -> int:
        """Number of stored records. If two arrays hold the same records, these records count once.

        For example, a nearest-neighbor model stores its records as an array and in a search tree.
        """
        array_by_content = {
            array.finding.where
            if array.records is None
            else float(array.records.double().sum()): array
            for array in self.arrays
        }
        named_count = sum(array.finding.count or 0 for array in array_by_content.values())
        found_count = 0 if self.search is None else len(self.search.samples)
        return max(named_count, found_count)

    @property
    def remedy(self) -> str:
        """What to do about the records before the release."""
        return self.arrays[0].finding.remedy if self.arrays else REMOVE_ROWS

    @property
    def places(self) -> tuple[RowPlace, ...]:
        """The arrays that hold samples of the user."""
        return () if self.search is None else self.search.rows

    def without(self, network: Network) -> StoredRecords | None:
        """Return the records without arrays that are parameters of the network, None if nothing remains.

        An array that holds samples of the user remains, even if it is a parameter.
        """
        parameter_names = tuple(network.source_names.values())
        arrays = tuple(
            array
            for array in self.arrays
            if array.certain or not array.finding.where.endswith(parameter_names)
        )
        input_count = network.architecture.inputs
        return replace(self, arrays=arrays, inputs=input_count) if arrays or self.places else None

    def outcome(self) -> AttackOutcome:
        """Return the row of the table of attacks that shows the search for stored records.

        The row decides the verdict in three cases. First, the program that wrote the file is known to store
        records in one of the arrays. Second, more training samples are stored in the file than held-out
        samples explain, or than shuffled samples explain if there are no held-out samples. Third, there are
        no training samples to search for, and the rows of an array have as many values as an input of the
        network.

        Returns:
            The row of the table of attacks.
        """
        named_locations = [
            f"{a.finding.what}{f' ({count})' if (count := a.finding.count) else ''}, at {a.finding.where}"
            for a in self.arrays
        ]
        train = None if self.search is None else self.search.queries.samples
        if self.search is None or train is None:
            row = AttackOutcome(
                NAME, self.is_likely, True, True, "; ".join(named_locations), surface=STORED
            )
            return row.replace(candidates=self.count)
        search, holdout = self.search, self.search.queries.holdout
        named_places = [array.finding.where for array in self.arrays]
        locations = named_locations + [
            f"{len(place.samples)} training samples in {place.where} ({place.storage_form})"
            for place in self.places
            if not any(place.where.startswith(named) for named in named_places if named)
        ]
        train_count, match_count = len(train), len(search.samples)
        equal_count = len(search.equal)
        shuffled_matches = max((place.shuffled for place in self.places), default=0)
        reason = (
            f"{'; '.join(locations)}; {equal_count} of {train_count} training samples are stored there "
            f"bit for bit, {match_count - equal_count} more within rounding"
        )
        row = AttackOutcome(
            NAME,
            self.is_certain or match_count > 0,
            True,
            True,
            f"{reason}; {shuffled_matches} of {search.shuffled_count} shuffled samples are stored there",
            surface=STORED,
            candidates=self.count,
            recovered=match_count,
            rule="stored in the file",
            sample_count=train_count,
        )
        if holdout is None or holdout.shape != train.shape:
            return row
        holdout_matches = len(search.holdout_samples)
        p_value = float(
            hypergeom.sf(
                match_count - 1,
                train_count + len(holdout),
                match_count + holdout_matches,
                train_count,
            )
        )
        return row.replace(
            decides=self.is_certain or p_value <= SIGNIFICANCE,
            reason=f"{row.reason}, and {holdout_matches} of {len(holdout)} held-out samples are stored there",
            expected_by_chance=train_count * holdout_matches / len(holdout),
            p_value=p_value,
        )


def find_records(
    release: Release, train: Dataset | None = None, holdout: Dataset | None = None
) -> StoredRecords | None:
    """Return the data records that a model file stores, or None if the release stores no records.

    Args:
        release: The model file that was opened.
        train: Samples that are searched in every array of the model file, as the user gives them.
        holdout: Samples that the model never saw, which are searched in the same way.

    Returns:
        The records.
    """
    try:
        arrays = tuple(records_in(release))
        queries = Queries(train, holdout)
        search = None if train is None else search_content(release, queries, include_values=False)
    except ResiduumError:
        return None
    if not arrays and (search is None or not search.rows):
        return None
    estimator_class = release.content.class_name if isinstance(release.content, InertObject) else ""
    return StoredRecords(estimator_class, arrays, search)


def wrap_tensors(tensors: Mapping[str, Tensor] | nn.Module) -> Release:
    """Return the tensors of a live model as a release, so that they can be searched like a file.

    Args:
        tensors: The tensors by name, or a module, whose state dict is used.

    Returns:
        The release. Its path is the name of the class.
    """
    state = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    blocks = {
        name: Block(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.detach().cpu,
            part_reader=read_tensor(tensor),
        )
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and not tensor.is_sparse and not tensor.is_quantized
    }
    return Release(Path(type(tensors).__name__), "torch", blocks)


def unconfirmed(rows: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """Return one note per search for stored records that does not decide the verdict.

    In such a search, the name of an array suggests records, but the array does not hold the training samples.
    """
    return tuple(f"not confirmed: {row.reason}" for row in rows if not row.is_stored)
