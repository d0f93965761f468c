"""Search for training records that a release stores. Such records decide the verdict without any attack.

A nearest-neighbor model, a support vector machine or a Gaussian process consists of its training records. A
checkpoint may hold the arrays that it was trained on. If the user passes samples, we search for each
sample in the release. If the release has scalers, we also search for the scaled sample. A record matches a
sample if all values are equal, except for rounding errors. We search for held-out samples in the same way, as
a negative control.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from scipy.stats import hypergeom
from torch import Tensor

from residuum.auditing.outcomes import STORED, AttackOutcome
from residuum.errors import ResiduumError
from residuum.evaluation.null import SIGNIFICANCE
from residuum.io.estimators import read_scalings
from residuum.io.inert import InertObject
from residuum.io.release import Release
from residuum.networks.network import Network
from residuum.records import Dataset
from residuum.scanning.findings import RecordArray, records_in

# Start of the note that says why the other tests did not run.
ONLY_STORED = "only stored records were searched, because the model cannot receive the samples"
NAME = "stored outright"  # name of this search in the table of attacks
# A sample and a record match if their values differ by at most this share of the largest value of the sample.
ROUNDING = 16 * torch.finfo(torch.float32).eps
# To find close records fast, samples and records are projected on a random line. Each sample is compared with
# at most this many records on either side of its projection.
MAX_NEIGHBORS = 64
CHUNK = 4096  # number of records that are converted to float64 together, to limit the memory


@dataclass(frozen=True, eq=False)
class StoredRecords:
    """The data records that a release (the published files of a model) stores.

    Attributes:
        model: Class of the estimator that stores the records, "" if the records are not part of an estimator.
        arrays: The arrays that hold records.
        scalings: Factor and shift of every scaler in the release.
        inputs: Number of inputs of the network in the same release.
        notes: Why nothing else was tested: why the network cannot be read, or why it cannot receive the
            samples. () if the network was tested.
    """

    model: str
    arrays: tuple[RecordArray, ...]
    scalings: tuple[tuple[Tensor, Tensor], ...] = ()
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
        sizes = (a.records.shape[1] for a in self.arrays if a.records is not None)
        return next(sizes, None)

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
        return sum(array.finding.count or 0 for array in array_by_content.values())

    def without(self, network: Network) -> StoredRecords | None:
        """Return the records without arrays that are parameters of the network, None if no array remains."""
        parameter_names = tuple(network.source_names.values())
        arrays = tuple(
            array
            for array in self.arrays
            if array.certain or not array.finding.where.endswith(parameter_names)
        )
        input_count = network.architecture.inputs
        return replace(self, arrays=arrays, inputs=input_count) if arrays else None

    def distances(self, samples: Tensor) -> Tensor:
        """Return the distance of each sample to its nearest stored record.

        The distance is divided by the largest absolute value of the sample.

        Args:
            samples: (n, *shape) samples as the user gives them.

        Returns:
            (n,) distances. The distance is 0 if all values are equal, at most ``ROUNDING`` for a match, and
            infinity if no record matches. It is the smallest distance over all arrays, without scalers and
            after each scaler of the release.
        """
        flat_samples = samples.flatten(1).double()
        nearest_distances = torch.full((len(flat_samples),), torch.inf, dtype=torch.float64)
        for array in self.arrays:
            for scaled_samples in _after_each_scaler(flat_samples, self.scalings):
                if array.records is not None and array.records.shape[1] == scaled_samples.shape[1]:
                    nearest_distances = torch.minimum(
                        nearest_distances, distance_to_records(scaled_samples, array.records)
                    )
        return nearest_distances

    def outcome(self, train: Dataset | None, holdout: Dataset | None) -> AttackOutcome:
        """Return the row of the table of attacks that shows the search for stored records.

        The row decides the verdict in three cases. First, the program that wrote the file is known to store
        records in one of the arrays. Second, the name of an array suggests records, and more training samples
        are stored in it than held-out samples explain. Third, there are no training samples to search for,
        and the rows of an array have as many values as an input of the network.

        Args:
            train: The training samples, None if there are none.
            holdout: The held-out samples, None if there are none.

        Returns:
            The row of the table of attacks.
        """
        record_locations = "; ".join(
            f"{a.finding.what}{f' ({count})' if (count := a.finding.count) else ''}, at {a.finding.where}"
            for a in self.arrays
        )
        row = AttackOutcome(NAME, self.is_likely, True, True, record_locations, surface=STORED)
        row = row.replace(candidates=self.count)
        if train is None:
            return row
        record_distances = self.distances(train.x)
        equal_count, match_count = (
            int((record_distances == 0).sum()),
            int(record_distances.isfinite().sum()),
        )
        train_count = len(train)
        row = row.replace(
            decides=self.is_certain or match_count > 0,
            recovered=match_count,
            sample_count=train_count,
            rule="stored in the file",
            reason=f"{record_locations}; {equal_count} of {train_count} training samples are stored there "
            "bit for bit, "
            f"{match_count - equal_count} more within rounding",
        )
        if holdout is None or holdout.shape != train.shape:
            return row.replace(expected_by_chance=None)
        holdout_matches = int(self.distances(holdout.x).isfinite().sum())
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
            reason=f"{row.reason}; {holdout_matches} of {len(holdout)} held-out samples are stored there",
            expected_by_chance=train_count * holdout_matches / len(holdout),
            p_value=p_value,
        )


def find_records(release: Release) -> StoredRecords | None:
    """Return the data records that a release stores, or None if the release stores no records."""
    try:
        arrays = tuple(records_in(release))
        scalings = tuple(read_scalings(release)) if arrays else ()
    except ResiduumError:
        return None
    if not arrays:
        return None
    estimator_class = release.content.class_name if isinstance(release.content, InertObject) else ""
    return StoredRecords(estimator_class, arrays, scalings)


def unconfirmed(rows: tuple[AttackOutcome, ...]) -> tuple[str, ...]:
    """Return one note per search for stored records that does not decide the verdict.

    In such a search, the name of an array suggests records, but the array does not hold the training samples.
    """
    return tuple(f"not confirmed: {row.reason}" for row in rows if not row.is_stored)


def _after_each_scaler(x: Tensor, scalings: tuple[tuple[Tensor, Tensor], ...]) -> Iterator[Tensor]:
    """Yield the samples as passed, then after the first scaler, then after the first two, and so on."""
    yield x
    for factor, shift in scalings:
        if factor.numel() in (1, x.shape[1]) and shift.numel() in (1, x.shape[1]):
            x = x * factor + shift
            yield x


def distance_to_records(x: Tensor, records: Tensor) -> Tensor:
    """Return the distance of each sample to its nearest stored record.

    The distance is the largest difference between a value of the sample and the same value of the record. It
    is divided by the largest absolute value of the sample. To save time, samples and records are projected on
    a random line, and only neighbors on this line are compared. Equal samples and records have equal
    projections. If values differ by rounding errors, positive and negative errors partly cancel. The
    projections then differ at most by about the rounding error times the length of the vector that defines
    the line.

    Args:
        x: (n, d) samples in float64.
        records: (m, d) records.

    Returns:
        (n,) distances, infinity for samples without a record within ``ROUNDING``.
    """
    line_vector = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    projected_records = torch.cat([chunk.to(x) @ line_vector for chunk in records.split(CHUNK)])
    sorted_projections, sorted_records = projected_records.sort()
    largest_values = x.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    tolerance, projected_samples = (
        4 * ROUNDING * largest_values * line_vector.norm(),
        x @ line_vector,
    )
    search_bounds = torch.stack(
        [projected_samples - tolerance, projected_samples, projected_samples + tolerance]
    )
    first, middle, last = torch.searchsorted(sorted_projections, search_bounds)
    first, last = first.clamp(min=middle - MAX_NEIGHBORS), last.clamp(max=middle + MAX_NEIGHBORS)
    distances = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for i in (first < last).nonzero().flatten().tolist():
        neighbors = records[sorted_records[first[i] : last[i]]].to(x)
        distance = (neighbors - x[i]).abs().amax(1).nan_to_num(torch.inf).min() / largest_values[i]
        distances[i] = distance if distance <= ROUNDING else torch.inf
    return distances
