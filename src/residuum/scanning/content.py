"""Find the user's samples and texts anywhere in a model file, whatever the arrays and strings are called.

Each sample is searched in the rows of every array of numbers (:mod:`.row_search`), the single values of a
table in every small array (:mod:`.value_search`), and each text in every string (:mod:`.text_search`).

A sample may be in an array by chance, for example if all of its values are zero. So the same search is done
for samples that no release should hold: shuffled samples (:class:`.sample_forms.ShuffledRows`), and the
held-out samples if there are any. A sample that equals one of them is not counted. A place is reported only
if it holds more given samples than shuffled samples explain, in an exact test.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import hypergeom
from torch import Tensor

from residuum.datasets.columns import fit_columns
from residuum.datasets.given import read_train_and_holdout
from residuum.datasets.texts import is_text_file, read_texts
from residuum.errors import CheckpointError, DataError
from residuum.io.estimators import read_scaling
from residuum.io.inert import UNREADABLE, Block, InertObject
from residuum.io.numpy_arrays import TextArray
from residuum.io.release import Release
from residuum.io.tree import walk
from residuum.records import Dataset
from residuum.records.tables import Table
from residuum.scanning.category_search import CategoryPlace, search_categories
from residuum.scanning.finding import STORED, Finding, printable
from residuum.scanning.number_sources import NumberSource, list_numbers
from residuum.scanning.row_search import (
    ROUNDING,
    Arrangement,
    Form,
    RowMatches,
    SampleIndex,
    ScaleFreeKeys,
    list_forms,
    match_array,
    measure_precision,
)
from residuum.scanning.sample_forms import (
    BYTES,
    GivenRows,
    Rows,
    ShuffledRows,
    list_layouts,
    list_scalings,
    split_rows,
)
from residuum.scanning.text_search import TextIndex, TextMatches
from residuum.scanning.tree_rules import name_of
from residuum.scanning.value_search import (
    MAX_COLUMNS,
    Column,
    ColumnMatches,
    make_column,
    match_columns,
)

# A place is reported if so many matches have at most this probability by chance.
SIGNIFICANCE = 0.01
MAX_COMPARED = 256  # number of columns in which samples are compared at first
TARGETS = "the targets"  # stands for the name of a column
MAX_SHOWN = 10  # largest number of row numbers that a finding lists
# Largest number of widths of arrays for which other columns of a table are searched, to limit the time.
MAX_WIDTHS = 8
# Arrays with more numbers than this hold single values of a table by chance, and sorting them takes long.
MAX_VALUES = 1_000_000
# Largest number of numbers of all arrays together in which single values are searched.
MAX_ALL_VALUES = 20_000_000
# Smallest share of the values of a column in an array for a finding of severity "high".
NEARLY_ALL = 0.9
REMOVE_ROWS = "Remove this array from the file before the release."
REMOVE_VALUES = (
    "Round these values, or group rare values, before the release. Or release only predictions."
)
REMOVE_TEXTS = "Remove these texts from the file before the release."


@dataclass(frozen=True, eq=False)
class Queries:
    """The samples and texts for which a model file is searched.

    Attributes:
        samples: Samples that the release should not hold, None if there are none.
        holdout: Samples that the model never saw, None if there are none.
        texts: Texts that the release should not hold.
        holdout_texts: Texts that the model never saw.
        notes: What could not be read.
        table: The table from which the samples were read, None if they were not read from a table.
        holdout_table: The table of the held-out samples, or None.
    """

    samples: Dataset | None = None
    holdout: Dataset | None = None
    texts: tuple[str, ...] = ()
    holdout_texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    table: Table | None = None
    holdout_table: Table | None = None


def read_queries(data: Any, holdout: Any = None) -> Queries:
    """Read the samples and texts to search for.

    Args:
        data: A file or folder of samples, a file of texts, or samples in memory.
        holdout: Samples or texts that the model never saw, in the same forms.

    Returns:
        The samples and texts.

    Raises:
        DataError: If there are neither samples nor texts.
    """
    texts, holdout_texts = read_texts(data), read_texts(holdout)
    train = held_out = None
    notes: tuple[str, ...] = ()
    if not is_text_file(data) and not (texts and isinstance(data, list | tuple)):
        try:
            train, held_out = read_train_and_holdout(
                data, None if is_text_file(holdout) else holdout
            )
        except DataError as problem:
            if not texts:
                raise
            notes = (f"only the texts of the data were searched: {problem.message}",)
    tables = [None if samples is None else samples.table for samples in (train, held_out)]
    # A table of texts and labels alone is a data set without any column of numbers.
    train, held_out = (None if s is None or not s.x[0].numel() else s for s in (train, held_out))
    if train is None and not texts:
        raise DataError(
            "The data that a scan searches for must contain samples or texts; the data that you passed "
            "contain none.",
            "Pass a file of samples, or a .txt file with one text per line.",
        )
    return Queries(train, held_out, texts, holdout_texts, notes, *tables)


@dataclass(frozen=True, eq=False)
class RowPlace:
    """An array in a model file that holds samples of the user as rows.

    Attributes:
        where: Place of the array in the model file.
        kind: Dtype of the array, or the container of the numbers, such as "DataFrame".
        storage_form: How the samples are stored, in words.
        samples: Indices of the user's samples in the array, ascending.
        equal: Indices of the user's samples that are stored exactly.
        stored_rows: Number of rows of the array that match a sample of the user.
        holdout: Indices of the held-out samples in the array.
        shuffled: Number of shuffled samples in the array.
        p_shuffled: Probability of so many matches if the user's samples were like shuffled samples.
        p_holdout: Probability of so many matches if the user's samples were like held-out samples, None
            without held-out samples.
    """

    where: str
    kind: str
    storage_form: str
    samples: tuple[int, ...]
    equal: tuple[int, ...]
    stored_rows: int
    holdout: tuple[int, ...]
    shuffled: int
    p_shuffled: float
    p_holdout: float | None

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the array holds more samples of the user than expected by chance, from shuffled samples."""
        return self.p_shuffled <= SIGNIFICANCE

    @property
    def is_beyond_holdout(self) -> bool:
        """Whether the array holds more samples of the user than expected from the held-out samples."""
        return not self.holdout or self.p_holdout is None or self.p_holdout <= SIGNIFICANCE


@dataclass(frozen=True, eq=False)
class ValuePlace:
    """An array in a model file that holds single values of columns of the user's table.

    Attributes:
        where: Place of the array in the model file.
        columns: The columns with their matches.
    """

    where: str
    columns: tuple[ColumnMatches, ...]


@dataclass(frozen=True, eq=False)
class TextPlace:
    """A place in a model file that holds texts of the user.

    Attributes:
        where: Path of the first string with a text of the user.
        places: Number of strings with a text of the user.
        long: Indices of the long texts that occur there.
        short: Indices of the short texts that occur there as whole strings.
        holdout: Number of held-out texts that were found in the same strings.
    """

    where: str
    places: int
    long: tuple[int, ...]
    short: tuple[int, ...]
    holdout: int


@dataclass(frozen=True, eq=False)
class ContentSearch:
    """The result of a search for the user's samples and texts in a model file.

    Attributes:
        queries: The samples and texts.
        rows: Arrays that hold samples of the user, those with most samples first.
        values: Arrays that hold single values of columns.
        texts: Places with texts of the user.
        categories: Places with values of text columns.
        shuffled_count: Number of shuffled samples to which the given samples were compared.
        array_count: Number of arrays, tables and lists of numbers in the release.
        string_count: Number of strings in the model file.
        notes: What was not searched.
    """

    queries: Queries
    rows: tuple[RowPlace, ...] = ()
    values: tuple[ValuePlace, ...] = ()
    texts: tuple[TextPlace, ...] = ()
    categories: tuple[CategoryPlace, ...] = ()
    shuffled_count: int = 0
    array_count: int = 0
    string_count: int = 0
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> set[int]:
        """Indices of the user's samples that are stored in the model file."""
        return {sample for place in self.rows for sample in place.samples}

    @property
    def equal(self) -> set[int]:
        """Indices of the user's samples that are stored exactly, without rounding."""
        return {sample for place in self.rows for sample in place.equal}

    @property
    def holdout_samples(self) -> set[int]:
        """Indices of the held-out samples in the arrays that also hold samples of the user."""
        return {sample for place in self.rows for sample in place.holdout}

    def findings(self) -> list[Finding]:
        """Return the findings of the search, for a scan."""
        groups: dict[tuple[str, tuple[int, ...]], list[RowPlace]] = {}
        for place in self.rows:
            groups.setdefault((place.storage_form, place.samples), []).append(place)
        return [
            *(self._describe_rows(g[0]).replace(places=len(g)) for g in groups.values()),
            *(
                self._describe_values(place).replace(places=count)
                for place, count in self._merge_values()
            ),
            *map(self._describe_texts, self.texts),
            *map(_describe_categories, self.categories),
        ]

    def _merge_values(self) -> list[tuple[ValuePlace, int]]:
        """Merge similar places, such as the trees of a forest, to one place and their number."""
        groups: dict[str, list[ValuePlace]] = {}
        for place in self.values:
            groups.setdefault(re.sub(r"\[\d+\]", "[]", place.where), []).append(place)
        merged_places = []
        for group in groups.values():
            group.sort(key=lambda place: -sum(match.found_count for match in place.columns))
            best: dict[str, ColumnMatches] = {}
            for match in (match for place in group for match in place.columns):
                other = best.setdefault(match.column.name, match)
                if match.found_count > other.found_count:
                    best[match.column.name] = match
            merged_places.append((ValuePlace(group[0].where, tuple(best.values())), len(group)))
        return merged_places

    def _describe_rows(self, place: RowPlace) -> Finding:
        samples = self.queries.samples
        assert samples is not None
        count, n = len(place.samples), len(samples)
        row_numbers = tuple(samples.rows[i] for i in place.samples)
        more = ", ..." if count > MAX_SHOWN else ""
        row_list = ", ".join(map(str, row_numbers[:MAX_SHOWN])) + more
        chance = [f"{place.shuffled} of {self.shuffled_count} shuffled samples"]
        if self.queries.holdout is not None:
            chance.insert(
                0, f"{len(place.holdout)} of {len(self.queries.holdout)} held-out samples"
            )
        reason = (
            f"the array ({place.kind}) holds the values of these samples {place.storage_form}: "
            f"row{'s' if count > 1 else ''} {row_list} of the data, counted from 0. For comparison, "
            f"{' and '.join(chance)} are in the array"
        )
        if not place.is_beyond_holdout:
            reason += ". So the array holds data of this kind, but not only the given samples"
        return Finding(
            STORED,
            "high" if place.is_beyond_holdout else "medium",
            f"{count} of {n} given samples",
            printable(place.where),
            printable(reason),
            REMOVE_ROWS,
            count=count,
            rows=row_numbers,
        )

    def _describe_values(self, place: ValuePlace) -> Finding:
        found_count = sum(match.found_count for match in place.columns)
        value_count = sum(len(match.column.values) for match in place.columns)
        by_chance = sum(match.by_chance for match in place.columns)
        names = [match.column.name for match in place.columns]
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        columns_text = f"column {listed}" if len(names) == 1 else f"{len(names)} columns ({listed})"
        columns_text = TARGETS if names == [TARGETS] else columns_text
        forms = Counter(match.column.form for match in place.columns)
        form = next(iter(forms)) if len(forms) == 1 else ""
        reason = (
            f"the array holds single values of the given samples{f' {form}' if form else ''}, "
            f"{by_chance:.2g} expected by chance"
        )
        severity = "high" if found_count >= NEARLY_ALL * value_count else "medium"
        finding_title = f"{found_count} of {value_count} values of {columns_text}"
        where, remedy = printable(place.where), REMOVE_VALUES
        return Finding(
            STORED, severity, printable(finding_title), where, reason, remedy, count=found_count
        )

    def _describe_texts(self, place: TextPlace) -> Finding:
        numbers = sorted({*place.long, *place.short})
        examples = [self.queries.texts[i] for i in numbers[:2]]
        quoted = " and ".join(repr(t if len(t) <= 30 else f"{t[:27]}...") for t in examples)
        reason = f"the strings contain given texts, such as {quoted}"
        if place.short:
            reason += f". {len(place.short)} of them are short and equal whole strings"
        if self.queries.holdout_texts:
            held_out = f"{place.holdout} of {len(self.queries.holdout_texts)} held-out texts"
            reason += f". For comparison, {held_out} are in these strings"
        return Finding(
            STORED,
            "high" if place.long else "medium",
            f"{len(numbers)} of {len(self.queries.texts)} given texts",
            printable(place.where),
            printable(reason),
            REMOVE_TEXTS,
            places=place.places,
            count=len(numbers),
            rows=tuple(numbers),
        )


def search_content(
    release: Release, queries: Queries, *, include_values: bool = True
) -> ContentSearch:
    """Search a model file for samples and texts of the user.

    Args:
        release: The model file that was opened.
        queries: The samples and texts.
        include_values: Whether to search for single values of columns, in addition to samples.

    Returns:
        Where the samples and texts are stored.
    """
    sources = list(list_numbers(release, rows_only=not include_values))
    notes = list(queries.notes)
    row_places: list[RowPlace] = []
    value_places: list[ValuePlace] = []
    shuffled_count = 0
    for train, holdout, fitting_sources in _choose_columns(queries, sources):
        # If no array is as large as a sample, no sample is stored, and there is nothing to prepare.
        value_count = train.x[0].numel()
        has_large_array = any(_numel(source) >= value_count for source in fitting_sources)
        is_first = train is queries.samples
        if not has_large_array and not (is_first and include_values):
            continue
        row_search = _RowSearch(train, holdout, release)
        row_places += row_search.run(fitting_sources)
        shuffled_count = max(shuffled_count, len(row_search.shuffled))
        notes += row_search.notes
        if is_first and include_values:
            value_search = _ValueSearch(train, row_search.forms)
            value_places = value_search.run(sources, {place.where for place in row_places})
            notes += value_search.notes
    texts, string_count, text_notes = _search_texts(release, queries)
    categories = search_categories(
        release, queries.table, queries.holdout_table, list_strings=_strings_at
    )
    row_places.sort(key=lambda place: -len(place.samples))
    return ContentSearch(
        queries,
        tuple(row_places),
        tuple(value_places),
        tuple(texts),
        tuple(categories),
        shuffled_count,
        len(sources),
        string_count,
        (*notes, *text_notes),
    )


def _describe_categories(place: CategoryPlace) -> Finding:
    """Return the finding about a place that holds values of a text column."""
    reason = "the strings equal values of this column of your table"
    if place.holdout_count:
        reason += (
            f". For comparison, {place.holdout_found} of {place.holdout_count} values that only the held-out "
            "table has are in these strings"
        )
    is_certain = place.holdout_count > 0 and place.found_count >= NEARLY_ALL * place.value_count
    return Finding(
        STORED,
        "high" if is_certain else "medium",
        printable(f"{place.found_count} of {place.value_count} values of column {place.column}"),
        printable(place.where),
        reason,
        REMOVE_VALUES,
        count=place.found_count,
    )


def _choose_columns(
    queries: Queries, sources: Sequence[NumberSource]
) -> Iterator[tuple[Dataset, Dataset | None, Sequence[NumberSource]]]:
    """Yield the samples as given, then with the columns of a table that arrays of another width may hold.

    A table can have columns that the model never received, such as row numbers. So if an array has fewer
    columns than the samples, the samples are also searched without the columns that :func:`fit_columns`
    leaves out for a model with so many inputs.

    Args:
        queries: The samples to search for.
        sources: The arrays of the release.

    Yields:
        Training samples, held-out samples or None, and the arrays to search.
    """
    train, holdout = queries.samples, queries.holdout
    if train is None or not train.x[0].numel():
        return
    yield train, holdout, sources
    if train.table is None:
        return
    # An array can hold the samples as its rows or as its columns.
    shapes = [source.reader.shape for source in sources]
    widths = {width for shape in shapes if len(shape) == 2 for width in shape}
    for width in sorted(widths & {*range(2, len(train.table.numbers) + 1)})[:MAX_WIDTHS]:
        fitted, fitted_holdout = fit_columns(train, holdout, width)
        if fitted is not None and fitted.x.shape[1] == width != train.x.shape[1]:
            fitting = [s for s, shape in zip(sources, shapes, strict=True) if width in shape]
            yield fitted, fitted_holdout, fitting


def _list_scalers(release: Release) -> list[tuple[str, Tensor, Tensor]]:
    """Return class name, factor and shift of every readable scaler in a model file."""
    scalers = []
    for place in walk(release.content):
        if isinstance(place.value, InertObject):
            try:
                scaling = read_scaling(place.value)
            except CheckpointError:
                continue
            if scaling is not None:
                scalers.append((place.value.class_name, *scaling))
    return scalers


class _RowSearch:
    """Searches arrays for rows that are samples of the user, and for control samples."""

    def __init__(self, samples: Dataset, holdout: Dataset | None, release: Release) -> None:
        same_shape = holdout is not None and holdout.shape == samples.shape
        self._samples = samples
        self._d = samples.x[0].numel()
        self._holdout = GivenRows(holdout.x) if same_shape and holdout is not None else None
        self.notes: list[str] = []
        # Equal samples are searched once.
        flat = samples.x.detach().cpu().flatten(1)
        flat = flat.float() if flat.dtype == torch.bfloat16 else flat
        rows, self._numbers = np.unique(flat.numpy(), axis=0, return_inverse=True)
        self._numbers = self._numbers.ravel()
        self._distinct = GivenRows(torch.from_numpy(rows))
        self.shuffled = ShuffledRows(samples.x)
        units = None
        if samples.scale is not None:
            offset = torch.zeros(()) if samples.offset is None else samples.offset
            mean = torch.zeros(()) if samples.mean is None else samples.mean
            units = (samples.scale.double(), mean.double() * samples.scale + offset)
        elif samples.mean is not None:
            units = (torch.ones(()), samples.mean.double())
        scalings = list_scalings(samples.x, _list_scalers(release), units)
        self.forms = list_forms(scalings, list_layouts(samples.shape)) if self._d > 1 else []
        self._controls: dict[tuple[str, int], SampleIndex] = {}

    @cached_property
    def _index(self) -> SampleIndex:
        return SampleIndex(self._distinct, self.forms)

    def run(self, sources: Sequence[NumberSource]) -> list[RowPlace]:
        """Return the arrays that hold more samples of the user than expected by chance."""
        places = []
        unread = 0
        for source in sources:
            if not source.has_rows or not self.forms:
                continue
            try:
                place_with_matches = self._search(source)
            except (CheckpointError, *UNREADABLE):
                unread += 1
                continue
            if place_with_matches is not None and place_with_matches.is_beyond_chance:
                places.append(place_with_matches)
        if unread:
            self.notes.append(f"{unread} damaged arrays were not searched")
        return places

    def _search(self, source: NumberSource) -> RowPlace | None:
        windows = match_array(self._index, source.reader, self._d)
        excluded = self._find_common({s for window in windows.values() for s in window.samples})
        for window in windows.values():
            _drop(window, excluded)
        windows = {key: window for key, window in windows.items() if window.rows}
        if not windows:
            return None
        used_forms = {number for window in windows.values() for number in window.forms}
        distinct = {s for window in windows.values() for s in window.samples}
        equal = {
            s
            for w in windows.values()
            for s, is_equal in zip(w.samples, w.equal, strict=True)
            if is_equal
        }
        samples = np.nonzero(np.isin(self._numbers, list(distinct)))[0].tolist()
        main = max(windows.items(), key=lambda item: len(set(item[1].samples)))
        shuffled = len(self._match_controls("shuffled", self.shuffled, used_forms, source))
        n, m = len(self._samples), len(samples)
        holdout: set[int] = set()
        p_holdout = None
        if self._holdout is not None:
            holdout = self._match_controls("holdout", self._holdout, used_forms, source)
            p_holdout = _p_value(m, n, len(holdout), len(self._holdout))
        return RowPlace(
            source.path,
            source.kind,
            describe_storage(*main[0], self._d, main[1], self.forms),
            tuple(samples),
            tuple(np.nonzero(np.isin(self._numbers, list(equal)))[0].tolist()),
            len({(key[0], row) for key, window in windows.items() for row in window.rows}),
            tuple(sorted(holdout)),
            shuffled,
            _p_value(m, n, shuffled, len(self.shuffled)),
            p_holdout,
        )

    def _match_controls(
        self, name: str, controls: Rows, used_forms: set[int], source: NumberSource
    ) -> set[int]:
        """Return the indices of the held-out or shuffled samples that an array holds as rows."""
        matched: set[int] = set()
        for form_number in used_forms:
            key = (name, form_number)
            if key not in self._controls:
                self._controls[key] = SampleIndex(controls, self.forms, {form_number})
            for window in match_array(self._controls[key], source.reader, self._d).values():
                matched.update(window.samples)
        return matched

    def _find_common(self, matched: set[int]) -> set[int]:
        """Return the samples that equal a shuffled or held-out sample, so that a match proves nothing."""
        if not matched:
            return set()
        matched_numbers = torch.tensor(sorted(matched))
        # Few samples agree in some random columns, and only these are compared in all columns.
        generator = torch.Generator().manual_seed(1)
        columns = torch.randperm(self._d, generator=generator)[:MAX_COMPARED].sort().values
        samples = self._distinct.take(matched_numbers, columns)
        random_direction = torch.randn(len(columns), dtype=torch.float64, generator=generator)
        keys, order = (samples @ random_direction).sort()
        slack = 1e-9 * float((samples.abs() @ random_direction.abs()).max())
        common: set[int] = set()
        all_controls: list[Rows] = [
            self.shuffled,
            *([] if self._holdout is None else [self._holdout]),
        ]
        for controls in all_controls:
            for chunk in split_rows(len(controls), len(columns)):
                control_rows = controls.take(chunk, columns)
                projections = control_rows @ random_direction
                first_candidates = torch.searchsorted(keys, projections - slack)
                last_candidates = torch.searchsorted(keys, projections + slack)
                for i in (first_candidates < last_candidates).nonzero().flatten().tolist():
                    candidates = order[first_candidates[i] : last_candidates[i]]
                    row = controls.take(chunk[i : i + 1])
                    is_same = (self._distinct.take(matched_numbers[candidates]) == row).all(1)
                    common.update(matched_numbers[candidates[is_same]].tolist())
        return common


def _drop(window: RowMatches, excluded: set[int]) -> None:
    """Remove the matches of some samples, such as samples that also occur in the held-out set."""
    chosen = [i for i, sample in enumerate(window.samples) if sample not in excluded]
    for name in ("rows", "samples", "forms", "equal", "factors", "shifts"):
        old_values = getattr(window, name)
        setattr(window, name, [old_values[i] for i in chosen])


def _p_value(matched: int, n: int, controls_matched: int, controls: int) -> float:
    """Return the probability of so many matches of the user's samples if all samples match equally often."""
    return float(hypergeom.sf(matched - 1, n + controls, matched + controls_matched, n))


def describe_storage(
    way: Arrangement, start: int, d: int, window: RowMatches, forms: Sequence[Form]
) -> str:
    """Describe how an array stores samples, in words such as "transposed, divided by 255".

    Args:
        way: How the numbers of the array are arranged in rows.
        start: First column of the sample in such a row.
        d: Number of values of a sample.
        window: The matches.
        forms: The forms of the samples.

    Returns:
        The description.
    """
    form = forms[Counter(window.forms).most_common(1)[0][0]]
    descriptions = [way.name, form.layout.name]
    if way.width > d:
        descriptions.append(f"in columns {start + 1} to {start + d} of {way.width}")
    descriptions.append(form.scaling.name)
    if isinstance(form.keys, ScaleFreeKeys):
        descriptions.append(_describe_scale(window, form))
    return ", ".join(filter(None, descriptions)) or "as given"


def _describe_scale(window: RowMatches, form: Form) -> str:
    factors, shifts = window.factors, window.shifts
    factor, shift = median(factors), median(shifts)
    if all(window.equal) or (abs(factor - 1) < 0.01 and abs(shift) < 0.01):
        return ""
    spread = max(abs(f - factor) for f in factors)
    if isinstance(form.keys, ScaleFreeKeys) and form.keys.count > 1:
        return "scaled by channel"
    if spread > 0.05 * abs(factor):
        return "each sample scaled on its own"
    for name, known_factor, known_shift in (
        (f"divided by {BYTES:g}", 1 / BYTES, 0.0),
        (f"multiplied by {BYTES:g}", BYTES, 0.0),
        ("scaled to [-1, 1]", 2.0, -1.0),
        ("scaled from 0 ... 255 to [-1, 1]", 2 / BYTES, -1.0),
    ):
        if abs(factor / known_factor - 1) < 0.01 and abs(shift - known_shift) < 0.01 * max(
            1, factor
        ):
            return name
    sign = "-" if shift < 0 else "+"
    return f"as {factor:.4g} * x {sign} {abs(shift):.4g}"


class _ValueSearch:
    """Searches arrays for the distinct values of the columns of a table."""

    def __init__(self, samples: Dataset, forms: Sequence[Form]) -> None:
        self.notes: list[str] = []
        self._columns: list[Column] = []
        if samples.x.ndim != 2 or samples.x.shape[1] > MAX_COLUMNS:
            return
        relative = torch.finfo(samples.x.dtype).eps if samples.x.is_floating_point() else 0.0
        scalings = {form.scaling.name: form.scaling for form in forms if not form.scaling.is_scalar}
        for j in range(samples.x.shape[1]):
            name = samples.features[j] if samples.features else str(j)
            column = make_column(name, samples.x[:, j].double().numpy(), relative)
            if column is None:
                continue
            self._columns.append(column)
            for scaling in scalings.values():
                factor, shift = float(scaling.factor[j]), float(scaling.shift[j])
                if factor:
                    self._columns.append(column.scale(scaling.name, factor, shift, ROUNDING))
        if samples.y.ndim == 1 and not samples.classes:
            relative = torch.finfo(samples.y.dtype).eps if samples.y.is_floating_point() else 0.0
            column = make_column(TARGETS, samples.y.double().numpy(), relative)
            self._columns += [] if column is None else [column]

    def run(self, sources: Sequence[NumberSource], excluded: set[str]) -> list[ValuePlace]:
        """Return the arrays that hold more values of the user's columns than expected by chance."""
        if not self._columns:
            return []
        small = [
            source
            for source in sources
            if 1 < _numel(source) <= MAX_VALUES and source.path not in excluded
        ]
        places = []
        numbers_left, skipped = MAX_ALL_VALUES, 0
        for source in small:
            numbers_left -= _numel(source)
            if numbers_left < 0:
                skipped += 1
                continue
            try:
                tensor = source.reader.read(0, _numel(source))
            except (CheckpointError, *UNREADABLE):
                continue
            if tensor.is_complex():
                continue
            precision = measure_precision(tensor)
            array = np.unique(tensor.double().numpy())
            array = array[np.isfinite(array)]
            if not len(array):
                continue
            matches = match_columns(self._columns, array, precision.relative)
            p_value_limit = SIGNIFICANCE / (len(self._columns) * len(small))
            best: dict[str, ColumnMatches] = {}
            for match in matches:
                if match.p_value > p_value_limit:
                    continue
                if (
                    match.column.name not in best
                    or match.found_count > best[match.column.name].found_count
                ):
                    best[match.column.name] = match
            if best:
                places.append(ValuePlace(source.path, tuple(best.values())))
        if skipped:
            self.notes.append(
                f"single values were not searched in {skipped} arrays, because they are many"
            )
        return places


def _numel(source: NumberSource) -> int:
    return int(np.prod(source.reader.shape, dtype=np.int64))


@dataclass
class _Strings:
    """The strings at one place of a model file, such as all entries of a list."""

    where: str
    strings: int = 0
    queries: TextMatches = field(default_factory=TextMatches)
    holdout: TextMatches = field(default_factory=TextMatches)


def _search_texts(release: Release, queries: Queries) -> tuple[list[TextPlace], int, list[str]]:
    """Search a model file for the user's texts. Return the places, the number of strings, and notes."""
    if not queries.texts:
        return [], 0, []
    index, holdout_index = TextIndex(queries.texts), TextIndex(queries.holdout_texts)
    places: dict[str, _Strings] = {}
    string_count = 0
    tree = {"": release.content, "metadata": dict(release.metadata), "config": dict(release.config)}
    for place in walk(tree):
        path_of_strings = place.path or name_of(release)
        for string in _strings_at(place.value):
            string_count += 1
            matches = TextMatches()
            index.match(string, matches)
            if not (matches.long or matches.short):
                continue
            parent = path_of_strings.partition("[")[0]
            strings = places.setdefault(parent, _Strings(path_of_strings))
            strings.strings += 1
            strings.queries.long |= matches.long
            strings.queries.short |= matches.short
            holdout_index.match(string, strings.holdout)
    notes = (
        ["not all strings were searched, because they are too long"] if index.is_exhausted else []
    )
    return (
        [
            TextPlace(
                strings.where,
                strings.strings,
                tuple(sorted(strings.queries.long)),
                tuple(sorted(strings.queries.short)),
                len(strings.holdout.long | strings.holdout.short),
            )
            for strings in places.values()
        ],
        string_count,
        notes,
    )


def _strings_at(value: Any) -> Iterable[str]:
    """Return the strings that a value of a model file holds directly."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, bytes):
        return [value.decode("utf-8", "replace")]
    if isinstance(value, dict):
        return (key for key in value if isinstance(key, str))
    if isinstance(value, Block) and isinstance(value.objects, TextArray):
        return value.objects.full_texts()
    if isinstance(value, Block) and value.objects is not None:
        return (entry for entry in value.objects if isinstance(entry, str))
    return ()
