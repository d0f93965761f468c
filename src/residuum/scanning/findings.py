"""Find what in a model file can reveal training data. This needs no attack and no data, and runs no code.

Each rule inspects one place in the tree of values that :mod:`residuum.io.release` reads. The rule reports
what is stored there, why this matters and what to do. Places of the same kind and class are merged into one
finding.

================  ====================================================  =============================
kind              what                                                  what it reveals
================  ====================================================  =============================
code              calls of functions that are not known to be harmless  the file is not safe to load
stored            records, their values, or targets of single records   records
update            a gradient or a weight difference, without weights    the samples of one client
optimizer-state   momentum, Adam's moments, averaged copies             sums of the last gradients
start             the weights before training, or their seed            W - W0, a sum over samples
statistics        means, scales, counts, trees, loss curves             moments of the data
touched-rows      rows of an embedding that training moved              tokens, users, items
adapter           low-rank changes of a base                            the weight update, exactly
paths             names of files and folders                            what it was trained on
classes           classes and functions of other packages               which packages loading runs
================  ====================================================  =============================

Attacks receive what they can use: a mean of the last gradients without weight decay
(:mod:`residuum.io.optimizer_state`), and the initial weights of a scikit-learn network if its trained weights
confirm the initial weights (:mod:`residuum.io.estimators`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject, make_key
from residuum.io.release import Release
from residuum.io.release_weights import DELETE, find_weights
from residuum.io.tree import Place, walk
from residuum.scanning.code_rules import find_code
from residuum.scanning.finding import (
    ADAPTER,
    CLASSES,
    CODE,
    KINDS,
    PATHS,
    SEVERITIES,
    START,
    STATE,
    STATISTICS,
    STORED,
    TOUCHED,
    Finding,
    Kind,
    printable,
    rank,
)
from residuum.scanning.optimizer_rules import (
    find_adapters,
    find_initial_weights_and_seeds,
    find_optimizer_state,
)
from residuum.scanning.path_rules import find_paths
from residuum.scanning.statistics_rules import find_statistics
from residuum.scanning.stored_arrays import RecordArray, find_stored_arrays, records_in
from residuum.scanning.stored_rules import FRAMES
from residuum.scanning.survey import Survey, survey_release
from residuum.scanning.text_rules import find_prose, find_text_arrays
from residuum.scanning.tree_rules import find_tree_models
from residuum.scanning.value_rules import find_categories, find_quantiles, find_vocabularies

__all__ = [
    "ADAPTER", "CLASSES", "CODE", "FRAMES", "KINDS", "PATHS", "SEVERITIES", "START", "STATE", "STATISTICS",
    "STORED", "TOUCHED", "Finding", "Kind", "RecordArray", "findings", "printable", "rank", "records_in",
]  # fmt: skip
ADAPTER_TEXTS = ("base_model_name_or_path", "dataset", "data_path", "output_dir", "train_file")


def findings(release: Release) -> list[Finding]:
    """Return everything in a file that can reveal training data, the most severe first."""
    groups: dict[tuple[str, ...], tuple[Finding, int, int]] = {}
    for finding in _apply_rules(release):
        key = (finding.kind, finding.severity, finding.what)
        first, places, count = groups.get(key, (finding, 0, 0))
        groups[key] = (first, places + finding.places, count + (finding.count or 0))
    merged_findings = []
    for first, places, count in groups.values():
        printable_texts = {
            name: printable(getattr(first, name)) for name in ("what", "where", "reason")
        }
        merged_findings.append(first.replace(places=places, count=count or None, **printable_texts))
    try:
        find_weights(release)
    except CheckpointError as problem:
        merged_findings = [_without_strip(finding, problem.remedy) for finding in merged_findings]
    return sorted(merged_findings, key=rank)


def _without_strip(finding: Finding, remedy: str) -> Finding:
    """Return a finding with other advice than ``residuum strip``, which cannot write the weights of the file.

    Args:
        finding: The finding.
        remedy: What :func:`find_weights` advises for this file.
    """
    if "residuum strip" not in finding.remedy:
        return finding
    if remedy != DELETE:
        remedy = "Remove this value from the object before you save the object again."
    return finding.replace(remedy=remedy)


def _apply_rules(release: Release) -> Iterator[Finding]:
    metadata = {make_key(key): value for key, value in release.metadata.items()}
    config = {k: v for k, v in release.config.items() if k in ADAPTER_TEXTS}
    survey = survey_release(release)
    yield from find_adapters(release)
    yield from find_tree_models(release)
    yield from find_code(release)
    for array in find_stored_arrays(release, survey):
        yield array.finding
    for place in walk({"": release.content, "metadata": metadata, "adapter_config": config}):
        for find in RULES.get(type(place.value), ()):
            yield from find(place)
        for find_values in VALUE_RULES.get(type(place.value), ()):
            yield from find_values(place, survey)


RULES: dict[type, tuple[Callable[[Place], Iterator[Finding]], ...]] = {
    InertObject: (find_initial_weights_and_seeds, find_statistics),
    Block: (
        find_optimizer_state,
        find_initial_weights_and_seeds,
        find_statistics,
        find_text_arrays,
    ),
    dict: (find_text_arrays,),
    list: (find_statistics, find_text_arrays),
    tuple: (find_text_arrays,),
    int: (find_initial_weights_and_seeds, find_statistics),
    str: (find_paths, find_prose),
}
# Rules that need to know more about the release.
VALUE_RULES: dict[type, tuple[Callable[[Place, Survey], Iterator[Finding]], ...]] = {
    InertObject: (find_quantiles,),
    Block: (find_categories,),
    dict: (find_vocabularies,),
}
