"""Find values of single columns that a file stores: vocabularies, categories, quantiles and thresholds.

A category reveals nothing if many records share it, such as a month. It is a value of a few records if there
are nearly as many categories as records, such as surnames. Estimators rarely store the number of records. So
a list of categories is reported as stored values in these cases:

- it has more than ``MAX_LABELS`` entries,
- the release stores the number of training records, and there are fewer than ``MIN_SHARING`` records for each
  category,
- the number of training records is unknown, and an encoder has more than ``MAX_FEW`` categories.

Shorter lists are statistics. Integers that fill a third of their range are codes of categories, counts or
ages. They are not reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.tree import Place, join_path
from residuum.scanning.finding import STATISTICS, STORED, Finding
from residuum.scanning.survey import Survey

MAX_LABELS = 50
MAX_FEW = 10
MIN_SHARING = 5
MAX_GAP = 3  # integers are codes of categories if they fill at least 1 / MAX_GAP of their range
MAX_READ = 1 << 22  # largest number of categories that are read
ENCODERS = ("OneHotEncoder", "OrdinalEncoder", "TargetEncoder")
VOCABULARIES = ("vocabulary_", "vocab", "token2id", "item2id", "user2id", "word2idx", "stoi")
DIGITS = 6  # measured values rarely have more significant digits
ROUNDING = 1e-9  # largest relative error of a quantile that equals a value
MIN_MEASURED = 0.5  # smallest share of different quantiles with few digits that shows stored values
MIN_WORDS = 20  # smallest number of entries of a dict that is reported as a vocabulary
CLASS_LABELS = re.compile(
    r"label|class|target|column|feature|param|layer|module|state", re.IGNORECASE
)
REASON = "this list holds the exact values of one column in the training records"
GROUP = (
    "Before fitting, group rare texts and round or bin numbers, so that the encoder never sees the values of "
    "single records."
)
# Numbers of a column are measured values of records if there are at least this many that are not whole.
MIN_MEASURED_NUMBERS = 20


def find_vocabularies(place: Place, survey: Survey) -> Iterator[Finding]:
    """Find vocabularies, which are dicts from words, users or items to indices.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model. This rule does not use them.

    Yields:
        The findings.
    """
    value = place.value
    if (place.name in VOCABULARIES and isinstance(value, dict) and value) or _is_index(place):
        finding_title = f"a vocabulary in {place.owner or 'the file'}"
        reason = "a vocabulary lists every word, user or item in the training data by name"
        remedy = "Drop rare words (min_df), or hash all words (HashingVectorizer)."
        yield Finding(STORED, "medium", finding_title, place.path, reason, remedy, count=len(value))


def _is_index(place: Place) -> bool:
    """Return True if a dict maps many texts to numbers 0, 1, 2, and the texts are no class or layer names."""
    dict_to_check = place.value
    if not MIN_WORDS <= len(dict_to_check) <= MAX_READ or CLASS_LABELS.search(place.name):
        return False
    numbers = {number for number in dict_to_check.values() if type(number) is int}
    if len(numbers) < len(dict_to_check) or max(numbers) - min(numbers) >= len(dict_to_check):
        return False
    return all(type(word) is str for word in dict_to_check) and not any(
        "." in word for word in dict_to_check
    )


def find_categories(place: Place, survey: Survey) -> Iterator[Finding]:
    """Find lists of categories of encoders, and of class labels.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model, such as the number of values of a sample.

    Yields:
        The findings.
    """
    value, owner = place.value, place.owner
    if place.name not in ("categories_", "classes_") or not isinstance(value, Block):
        return
    has_texts, is_code = _describe_categories(value)
    if is_code:
        return
    category_count = value.numel
    is_encoder = owner in ENCODERS or (place.name == "categories_" and bool(owner))
    is_stored = category_count > MAX_LABELS
    if is_encoder and survey.sample_count:
        is_stored |= category_count > 2 and survey.sample_count < MIN_SHARING * category_count
    elif is_encoder:
        is_stored |= category_count > MAX_FEW
    if not (is_stored or has_texts):
        return
    kind_and_severity = (STORED, "medium") if is_stored else (STATISTICS, "low")
    has_single_targets = owner == "TargetEncoder" and category_count >= MIN_MEASURED_NUMBERS
    if is_stored and (has_single_targets or _count_fractions(value) >= MIN_MEASURED_NUMBERS):
        kind_and_severity = (STORED, "high")
    finding_title = f"values of a column in {owner}.{place.name}"
    yield Finding(
        *kind_and_severity, finding_title, place.path, REASON, GROUP, count=category_count
    )
    if is_stored and owner == "TargetEncoder":
        finding_title = "targets in TargetEncoder.encodings_"
        reason = (
            "the encoding of a category is the mean target of its records, shrunk towards the mean of all "
            "targets. If a category has one record, the target of this record follows from its encoding"
        )
        where = place.path.replace("categories_", "encodings_")
        yield Finding(STORED, "medium", finding_title, where, reason, GROUP, count=category_count)


def _count_fractions(block: Block) -> int:
    """Return how many categories of a column are numbers that are not whole."""
    entries = block.objects if isinstance(block.objects, list) else []
    if block.read is not None and block.numel <= MAX_READ:
        try:
            entries = block.tensor().flatten().tolist()
        except CheckpointError:
            return 0
    return sum(isinstance(entry, float) and not entry.is_integer() for entry in entries)


def _describe_categories(block: Block) -> tuple[bool, bool]:
    """Return whether the categories of a column are texts, and whether they are mere codes or unreadable."""
    entries: list[Any] = []
    if block.kind == "text":
        return True, False
    if isinstance(block.objects, list):
        entries = block.objects[:MAX_READ]
        if any(isinstance(entry, str) for entry in entries):
            return True, False
    elif block.read is not None and block.numel <= MAX_READ:
        try:
            entries = block.tensor().flatten().tolist()
        except CheckpointError:
            return False, True
    numbers = sorted(
        {entry for entry in entries if isinstance(entry, int | float) and entry == entry}
    )
    is_code = not numbers or (
        all(number == int(number) for number in numbers if abs(number) < 2**53)
        and numbers[-1] - numbers[0] < MAX_GAP * len(numbers)
    )
    return False, is_code


def find_quantiles(place: Place, survey: Survey) -> Iterator[Finding]:
    """Find estimators that store many values of single columns: quantiles, edges, knots and thresholds.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model. This rule does not use them.

    Yields:
        The findings.
    """
    model = place.value
    if not isinstance(model, InertObject) or model.class_name not in COLUMN_VALUES:
        return
    name = COLUMN_VALUES[model.class_name]
    attributes = model.attributes
    quantile_count = _count_values(attributes.get(name))
    if not quantile_count:
        return
    where, finding_title = (
        join_path(place.path, name),
        f"values of columns in {model.class_name}.{name}",
    )
    if model.class_name == "QuantileTransformer":
        limit, used = attributes.get("n_quantiles"), attributes.get("n_quantiles_")
        if type(limit) is int and type(used) is int and used < limit:
            kind_and_severity = (STORED, "high")
            reason = (
                f"there were only {used} training records, so the quantiles are the sorted values of every "
                "column"
            )
        elif measured := _count_measured(attributes.get(name)):
            kind_and_severity, quantile_count = (STORED, "high"), measured
            reason = (
                f"{measured} quantiles have at most {DIGITS} digits, as measured values have. Numbers "
                "between two values would have more, so these are values of training records"
            )
        else:
            kind_and_severity = (STATISTICS, "medium")
            reason = (
                "the quantiles lie at or between values of the training records, and the first and last are "
                "the smallest and largest value of a column"
            )
        remedy = "Use fewer quantiles (n_quantiles) than a tenth of the number of records."
        yield Finding(
            *kind_and_severity, finding_title, where, reason, remedy, count=quantile_count
        )
    elif model.class_name == "IsotonicRegression":
        # In a calibrated classifier, the values are scores of records and no column of the data.
        kind_and_severity = (STATISTICS, "low") if "calibrat" in place.path else (STORED, "medium")
        reason = "the thresholds are exact values that were passed to fit"
        remedy = "Round the thresholds, or release a table of predictions on a grid."
        yield Finding(
            *kind_and_severity, finding_title, where, reason, remedy, count=quantile_count
        )
    else:
        setting = attributes.get("knots" if model.class_name == "SplineTransformer" else "strategy")
        is_many = (
            quantile_count > MAX_LABELS * (_column_count(attributes) or 1) and setting == "quantile"
        )
        kind_and_severity = (STORED, "medium") if is_many else (STATISTICS, "low")
        reason = "edges and knots are the smallest and largest value of a column, and quantiles"
        remedy = "Use fewer bins or knots, or evenly spaced ones."
        yield Finding(
            *kind_and_severity, finding_title, where, reason, remedy, count=quantile_count
        )


# For each class, the attribute that stores values of columns.
COLUMN_VALUES = {
    "QuantileTransformer": "quantiles_",
    "IsotonicRegression": "X_thresholds_",
    "KBinsDiscretizer": "bin_edges_",
    "SplineTransformer": "bsplines_",
}


def _count_measured(value: Any) -> int:
    """Count different quantiles that look like measured values, because they have few digits."""
    if not isinstance(value, Block) or len(value.shape) != 2 or value.numel > MAX_READ:
        return 0
    try:
        columns = value.tensor().double().T.tolist()
    except CheckpointError:
        return 0
    counts_by_column = []
    for column in columns:
        values_with_few_digits = {
            number
            for number in column
            if abs(number - float(f"{number:.{DIGITS}g}")) <= ROUNDING * abs(number)
        }
        counts_by_column.append(
            len(values_with_few_digits)
            if len(values_with_few_digits) >= MIN_MEASURED * len(column)
            else 0
        )
    return sum(counts_by_column)


def _column_count(attributes: dict[str, Any]) -> int | None:
    columns = attributes.get("n_features_in_")
    return columns if type(columns) is int else None


def _count_values(value: Any) -> int:
    """Return the number of values in an array, in an array of arrays, or in the knots of splines."""
    if isinstance(value, Block) and isinstance(value.objects, list):
        return sum(map(_count_values, value.objects))
    if isinstance(value, list):
        return sum(map(_count_values, value))
    if isinstance(value, InertObject):
        return _count_values(value.attributes.get("t", value.attributes.get("_t")))
    return value.numel if isinstance(value, Block) else 0
