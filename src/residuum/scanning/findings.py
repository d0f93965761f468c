"""Find what in a release can reveal training data. This needs no attack and no data, and runs no code.

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

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.adapters import find_adapter_pairs
from residuum.io.boosted_files import find_boosted_forests
from residuum.io.estimators import NETWORKS, find_initial_weights
from residuum.io.forest_files import READERS
from residuum.io.forests import read_forests
from residuum.io.inert import Block, InertObject, make_key
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.release import Release
from residuum.io.release_weights import find_weights
from residuum.io.tree import MAX_PATH_LENGTH, OPTIMIZERS, Place, join_path, walk
from residuum.io.trees import SAVE_AGAIN, TreeModel, read_tree_model
from residuum.records import Record
from residuum.records.inputs import is_size
from residuum.records.published import Count, SchemaRule
from residuum.scanning.forests import ADVICE, LIMIT_LEAVES, describe_trees
from residuum.trees.forest import Forest

STORED, STATE, START, STATISTICS = "stored", "optimizer-state", "start", "statistics"
TOUCHED, ADAPTER, PATHS = "touched-rows", "adapter", "paths"
CODE, CLASSES, UPDATE = "code", "classes", "update"
# Formats of files, other than pickles, that can hold decision trees.
KINDS_OF_TREES = ("onnx", "xgboost", "lightgbm", "catboost")
# The place in findings about code. Other findings name the path of a value in the file.
PROGRAM = "the pickle"
KINDS = (CODE, STORED, UPDATE, STATE, START, TOUCHED, ADAPTER, STATISTICS, PATHS, CLASSES)
Kind = Annotated[str, SchemaRule(enum=[*KINDS])]
SEVERITIES = ("high", "medium", "low")
# Largest number of unsafe calls for which a scan reports one finding each. A hostile file may make any number
# of calls.
MAX_NAMED = 20
MAX_DENSE = 1 << 24  # largest number of values of a sparse array that is converted to a dense array
# A list of categories with more entries than this can hold values of single records, and not only class
# labels.
MAX_LABELS = 50


@dataclass(frozen=True, eq=False)
class Finding(Record):
    """Something in a file that can reveal training data.

    Attributes:
        kind: A member of ``KINDS``.
        severity: "high", "medium" or "low".
        what: What was found, in a few words.
        where: The first place in the file where it was found.
        reason: What the finding reveals about the training data.
        remedy: What to do about the finding before the release.
        places: Number of places in the file where it was found.
        count: Number of records, rows, words or values that were found, or None if they were not counted.
        rows: Rows of an embedding that training changed.
    """

    kind: Kind
    severity: Annotated[str, SchemaRule(enum=[*SEVERITIES])]
    what: str
    where: str
    reason: str
    remedy: str
    places: Count = 1
    count: Count | None = None
    rows: tuple[Count, ...] = ()


# Attributes of scikit-learn estimators that hold training records, each with the classes in which it holds
# records. An empty tuple stands for all classes.
RECORDS: dict[str, tuple[str, ...]] = {
    "_fit_X": (),
    "support_vectors_": (),
    "X_train_": (),
    "X_fit_": (),
    "training_data_": (),
    "_raw_data": (),
    "X_": ("LabelPropagation", "LabelSpreading"),
    "components_": ("DBSCAN", "Nystroem"),
    "cluster_centers_": ("AffinityPropagation",),
}
RECORD_NAMES = re.compile(
    r"(^|[._])(x_?train|train_?x|train(ing)?_(data|images|samples|inputs|set)|raw_data|"
    r"replay_buffer|exemplars?|support_set|dataset)([._]|$)",
    re.IGNORECASE,
)
PROTOTYPES = re.compile(r"(^|[._])(prototypes?|memory_bank|queue)([._]|$)", re.IGNORECASE)
TREES = re.compile(r"(KDTree|BallTree)(32|64)?$")
# Names in a pickle of pandas: the class of a table, and the function that restores the columns of one type.
FRAME, FRAME_PART = "DataFrame", "_unpickle_block"
FRAMES = re.compile(r"^(pandas|polars|pyarrow|PIL|datasets)\.")
STATISTIC_NAMES = {
    "mean_", "scale_", "var_", "data_min_", "data_max_", "data_range_", "center_", "quantiles_",
    "statistics_", "n_samples_seen_", "class_count_", "class_prior_", "theta_", "means_",
    "covariance_", "location_", "centroids_", "cluster_centers_", "idf_", "bin_edges_", "loss_curve_",
    "validation_scores_", "running_mean", "running_var", "num_batches_tracked", "priors_",
}  # fmt: skip
SEEDS = re.compile(
    r"^(seed|random_?seed|manual_seed|global_seed|.*rng_state|rng_states|data_seed)$", re.I
)
PATH = re.compile(
    r"^(~|\.{0,2}/|[A-Za-z]:[\\/]|\\\\|s3://|gs://|hdfs://|abfss?://|file://).*[\w-]{2}|"
    r"^[\w ./\\-]+\.(csv|tsv|jsonl?|npz|npy|parquet|txt|jpe?g|png|dcm|wav|mp3|h5|hdf5|tfrecord|arrow|xlsx?"
    r"|sqlite|db)$",
    re.IGNORECASE,
)


NAMED = "the name of the array says that it holds training data"
DROP_STATE = "Remove the state before release: residuum strip FILE --out CLEAN."
KEEP_NONE = "Release an estimator that stores no records, or release only predictions."
DROP_SKLEARN = (
    "Before saving, delete the attribute _optimizer of the network. Predictions do not need it."
)


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
    if not _has_weights(release):
        merged_findings = [_without_strip(finding, release) for finding in merged_findings]
    return sorted(merged_findings, key=rank)


def _has_weights(release: Release) -> bool:
    """Return True if ``residuum strip`` can write the weights of this file alone."""
    try:
        return bool(find_weights(release))
    except CheckpointError:
        return False


def _without_strip(finding: Finding, release: Release) -> Finding:
    """Return a finding without advice to run ``residuum strip``, if this command cannot change the file."""
    if "residuum strip" not in finding.remedy:
        return finding
    remedy = "Remove this value from the object before you save the object again."
    if release.kind == "torch" and not isinstance(release.content, InertObject):
        remedy = "Delete this file from the release. Users of the model do not need this file."
    return finding.replace(remedy=remedy)


def printable(text: str) -> str:
    """Replace every unprintable character of a text by "?", because it could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def rank(finding: Finding) -> tuple[int, int]:
    """Return the key for sorting findings: first by severity, then by kind."""
    return SEVERITIES.index(finding.severity), KINDS.index(finding.kind)


def _apply_rules(release: Release) -> Iterator[Finding]:
    metadata = {make_key(key): value for key, value in release.metadata.items()}
    config = {k: v for k, v in release.config.items() if k in ADAPTER_TEXTS}
    yield from _find_adapters(release)
    yield from _find_tree_models(release)
    yield from _find_code(release)
    for place in walk({"": release.content, "metadata": metadata, "adapter_config": config}):
        for find in RULES.get(type(place.value), ()):
            yield from find(place)


ADAPTER_TEXTS = ("base_model_name_or_path", "dataset", "data_path", "output_dir", "train_file")


def rows_of(value: Any) -> int | None:
    """Return the number of rows of an array, a sparse array or a search tree, or None for other values."""
    if isinstance(value, Block):
        return value.shape[0] if len(value.shape) > 1 and value.shape[0] > 1 else None
    if isinstance(value, InertObject):
        shape = value.attributes.get("_shape")
        if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
            return shape[0]
        return rows_of(_tree_data(value))
    return None


def _tree_data(tree: InertObject) -> Block | None:
    """Return the records in a search tree of scikit-learn: the first array of its state that has rows."""
    state_values = tree.state if isinstance(tree.state, tuple) else ()
    return next(
        (value for value in state_values if isinstance(value, Block) and rows_of(value)), None
    )


@dataclass(frozen=True, eq=False)
class RecordArray:
    """An array of training records that a file stores verbatim.

    Attributes:
        finding: What the scan reports about the array.
        records: The records (N, d), or None if they cannot be read as numbers.
        certain: Whether the library that wrote the file stores records at this place. If not, only the name
            of the array suggests training records.
    """

    finding: Finding
    records: Tensor | None
    certain: bool


def records_in(release: Release) -> list[RecordArray]:
    """Return every array in a file whose rows are training records."""
    return [
        RecordArray(finding, _records(place.value), finding.reason != NAMED)
        for place in walk(release.content)
        for finding in _find_stored(place)
        if finding.severity == "high"
    ]


def _records(value: Any) -> Tensor | None:
    """Return the records in an array, table or search tree as a matrix (N, d), None for other values."""
    try:
        if isinstance(value, InertObject) and value.class_name == FRAME:
            return _frame_rows(value)
        if isinstance(value, InertObject) and "_shape" in value.attributes:
            return _dense(value)
        block = _tree_data(value) if isinstance(value, InertObject) else value
        if not isinstance(block, Block) or block.read is None:
            return None
        records = block.tensor().flatten(1)
    except CheckpointError:  # the records are damaged, so the finding is reported without them
        return None
    if records.is_complex() or not records.numel():
        return None
    return records if records.is_floating_point() else records.double()


def _frame_rows(frame: InertObject) -> Tensor | None:
    """Return the numeric columns of a DataFrame as N records (N, d), or None if no columns are readable.

    pandas stores all columns of the same type in one array (columns, rows), and their indices in the table.
    """
    manager = frame.attributes.get("_mgr")
    block_sources = (manager.state, manager.arguments) if isinstance(manager, InertObject) else ()
    columns: dict[int, Tensor] = {}
    for source in block_sources:
        frame_blocks = source[0] if isinstance(source, tuple) and source else ()
        for block in frame_blocks if isinstance(frame_blocks, tuple | list) else ():
            if isinstance(block, InertObject) and len(block.arguments) >= 2:
                values, column_places = block.arguments[:2]
                if isinstance(values, Block) and values.read and len(values.shape) == 2:
                    numbers = values.tensor()
                    indices = _column_indices(column_places)
                    columns |= dict(zip(indices, numbers.double(), strict=False))
    column_list = [columns[place] for place in sorted(columns)]
    return (
        torch.stack(column_list, 1)
        if column_list and len({len(row) for row in column_list}) == 1
        else None
    )


def _column_indices(stored_indices: Any) -> list[int]:
    """Return the column indices that pandas stores with an array of columns, as a slice or as an array."""
    if isinstance(stored_indices, Block) and stored_indices.read:
        return stored_indices.tensor().flatten().tolist()
    slice_arguments = stored_indices.arguments if isinstance(stored_indices, InertObject) else ()
    if (
        len(slice_arguments) == 3
        and all(type(end) is int and abs(end) < MAX_DENSE for end in slice_arguments)
        and slice_arguments[2]
    ):
        return list(range(*slice_arguments))
    return []


def _dense(sparse: InertObject) -> Tensor | None:
    """Return a sparse matrix of scipy as a dense matrix, or None for other formats and large matrices."""
    from scipy.sparse import csc_matrix, csr_matrix

    matrix_type = {"csr": csr_matrix, "csc": csc_matrix}.get(sparse.class_name[:3])
    attributes, shape = sparse.attributes, sparse.attributes["_shape"]
    blocks = [attributes.get(name) for name in ("data", "indices", "indptr")]
    arrays = [b.tensor().numpy() for b in blocks if isinstance(b, Block) and b.read]
    is_matrix = isinstance(shape, tuple) and len(shape) == 2 and all(map(is_size, shape))
    if matrix_type is None or len(arrays) < 3 or not is_matrix:
        return None
    if not 0 < shape[0] * shape[1] <= MAX_DENSE:
        return None
    try:
        matrix = matrix_type(tuple(arrays), shape)
        matrix.check_format(full_check=True)  # check the indices, which come from an untrusted file
        return torch.from_numpy(matrix.toarray()).double()
    except (TypeError, ValueError):
        return None


def _find_stored(place: Place) -> Iterator[Finding]:
    """Find stored records: in attributes of estimators, in search trees, in tables, or by name."""
    value, rows, where, name = place.value, rows_of(place.value), place.path, place.name[:40]
    # The name of an array alone is weak evidence that it holds records. So we ignore names in optimizer state
    # and in averaged weights.
    searched_path = where[-60:] if rows and not place.section else ""
    if isinstance(value, InertObject) and TREES.search(value.class_name) and rows:
        what = f"records in the {value.class_name} of {place.owner}"
        reason = "the tree holds every training record that it was built from"
        yield Finding(STORED, "high", what, where, reason, KEEP_NONE, count=rows)
    elif (
        isinstance(value, InertObject) and FRAMES.match(value.name) and value.class_name in _TABLES
    ):
        what = f"a {value.class_name} of {value.name.split('.')[0]}"
        reason = "the file contains a table or picture of data"
        remedy = "Remove the data from the file. Save only the fitted numbers."
        records = _records(value) if value.class_name == FRAME else None
        count = None if records is None else len(records)
        yield Finding(STORED, "high", what, where, reason, remedy, count=count)
    elif rows and place.owner and place.name in RECORDS:
        owner_classes = RECORDS[place.name]
        if not owner_classes or place.owner in owner_classes:
            what = f"training records in {place.owner}.{place.name}"
            reason = "the rows of this array are the training records that were passed to fit"
            yield Finding(STORED, "high", what, where, reason, KEEP_NONE, count=rows)
    # A DataFrame has its own finding, so we report no finding for its columns.
    elif RECORD_NAMES.search(searched_path) and place.owner != FRAME_PART:
        what, remedy = f"an array named {name}", "Do not save this array with the model."
        yield Finding(STORED, "high", what, where, NAMED, remedy, count=rows)
    elif PROTOTYPES.search(searched_path):
        reason = "prototypes and memory banks are records, or features of records"
        remedy = "Save prototypes only if predictions need them."
        yield Finding(STORED, "medium", f"prototypes in {name}", where, reason, remedy, count=rows)


_TABLES = {"DataFrame", "Series", "Table", "Image", "Dataset", "PngImageFile", "JpegImageFile"}


def _find_vocabularies(place: Place) -> Iterator[Finding]:
    """Find vocabularies and lists of categories."""
    value, name, where = place.value, place.name, place.path
    is_vocabulary = name in ("vocabulary_", "vocab", "token2id", "item2id", "user2id", "word2idx")
    if is_vocabulary and isinstance(value, dict) and value:
        what = f"a vocabulary in {place.owner or 'the file'}"
        reason = "a vocabulary lists every word, user or item in the training data by name"
        remedy = "Drop rare words (min_df), or hash all words (HashingVectorizer)."
        yield Finding(STORED, "medium", what, where, reason, remedy, count=len(value))
    if name in ("categories_", "classes_") and isinstance(value, Block):
        first_categories = value.objects[:1000] if isinstance(value.objects, list) else []
        if value.kind != "text" and not any(
            isinstance(category, str) for category in first_categories
        ):
            return
        kind_and_severity = (STORED, "medium") if value.numel > MAX_LABELS else (STATISTICS, "low")
        what = f"values of a column in {place.owner}.{name}"
        reason = "this list holds the exact values of one column in the training records"
        remedy = "Group rare values (min_frequency), or encode the values before fitting."
        yield Finding(*kind_and_severity, what, where, reason, remedy, count=value.numel)


def _find_optimizer_state(place: Place) -> Iterator[Finding]:
    """Find optimizer state: mean gradients (first moments), mean squared gradients, and averaged weights."""
    value, name, where = place.value, place.leaf, place.path
    if not isinstance(value, Block) or not value.numel:
        return
    # Outside of the optimizer state of torch and scikit-learn, only three names show that a tensor is a
    # moment.
    is_state = place.section == "state" or name in {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    remedy = DROP_SKLEARN if place.owner in OPTIMIZERS else DROP_STATE
    if is_state and place.section != "step" and value.kind.startswith(("float", "bfloat")):
        if name in FIRST_MOMENTS:
            what = f"first moments ({name})"
            reason = (
                "first moments are a weighted sum of the last gradients, from which attacks reconstruct "
                "more training samples than from the weights alone"
            )
            yield Finding(STATE, "high", what, where, reason, remedy, count=value.numel)
        elif name in SECOND_MOMENTS or value.shape:
            what = f"second moments and other state ({name})"
            reason = "the state holds squared gradients of the last steps, element by element"
            yield Finding(STATE, "medium", what, where, reason, remedy, count=value.numel)
    elif place.section == "average":
        what = "averaged copies of the weights"
        reason = "averaged weights minus the last weights are a sum of the last training steps"
        remedy = "Release only one copy: the averaged weights or the last weights."
        yield Finding(STATE, "medium", what, where, reason, remedy, count=value.numel)


def _find_initial_weights(place: Place) -> Iterator[Finding]:
    """Find what reveals the weights before training: confirmed initial weights, seeds and random states."""
    value, name, where = place.value, place.name, place.path
    if isinstance(value, InertObject) and value.class_name in NETWORKS:
        if (proof := find_initial_weights(value)) is not None:
            what, where = (
                f"the initial weights of {value.class_name}",
                join_path(where, proof.attribute),
            )
            reason = f"{proof.evidence}: the weight update W - W0 is a sum over training samples"
            yield Finding(START, "high", what, where, reason, proof.remedy, count=proof.value_count)
    elif type(value) is int and (SEEDS.match(name) or (name == "random_state" and place.owner)):
        what = f"a seed ({place.owner + '.' if place.owner else ''}{name})"
        reason = "with the training code, a seed reproduces the initial weights and the order of the batches"
        remedy = "Do not publish the seed of a model that was trained on private data."
        yield Finding(START, "low", what, where, reason, remedy)
    elif isinstance(value, Block) and SEEDS.match(name):
        what = f"the state of a random generator ({name})"
        reason = "the state reveals the random numbers that were drawn before and after saving"
        yield Finding(START, "low", what, where, reason, DROP_STATE)


def _find_statistics(place: Place) -> Iterator[Finding]:
    """Find statistics of the training data, such as means, scales and counts, and loss curves."""
    value, name, where = place.value, place.leaf, place.path
    if (
        name in STATISTIC_NAMES
        and not place.section
        and isinstance(value, Block | list | int)
        and value
    ):
        owner = place.owner or name
        owner = "normalization layers" if name.startswith(("running_", "num_")) else owner
        what = f"moments of the data in {owner}"
        remedy = "Predictions need these values. If they are computed from few records, round them."
        reason = "the values are means, scales or counts of the training data or of its features"
        if name in ("loss_curve_", "validation_scores_"):
            what = "a loss curve"
            remedy = f"Before saving, delete the attribute {name} of the model."
            reason = "the curve shows the course of training, epoch by epoch"
        count = value.numel if isinstance(value, Block) else None
        yield Finding(STATISTICS, "low", what, where, reason, remedy, count=count)


def _find_tree_models(release: Release) -> Iterator[Finding]:
    """Find models made of trees, whose leaves, roots and seeds reveal training records."""
    inner: set[int] = set()
    for place in walk(release.content):
        if not isinstance(place.value, InertObject):
            continue
        tree_model = read_tree_model(place.value, inner)
        if tree_model is None:
            continue
        where = place.path or name_of(release)
        recovered = [*_recover(place.value, where)]
        yield from recovered or _by_structure(tree_model, where)
        if tree_model.may_contain_memory:
            yield _uninitialized_memory(tree_model, where)
    if release.kind in KINDS_OF_TREES:
        try:
            for read_model in read_forests(release):
                yield from _describe_forest(read_model.name, read_model.forest, "the trees")
        except CheckpointError:  # the trees are damaged, or residuum does not read their kind
            return


def _recover(model: InertObject, where: str) -> Iterator[Finding]:
    """Yield findings about the training table that follow from a tree model.

    There are no findings if residuum does not read this model, or if the model is too large for a scan.
    """
    read_trees = READERS.get(model.class_name)
    try:
        if read_trees is None:
            forests = [*find_boosted_forests(model)]
        else:
            forest = read_trees(model)
            forests = [] if forest is None else [(model.class_name, forest)]
    except CheckpointError:
        return
    for name, forest in forests:
        yield from _describe_forest(name, forest, where)


def _describe_forest(name: str, forest: Forest, where: str) -> Iterator[Finding]:
    """Yield findings about the training table that follow from the trees of a forest."""
    for trees in describe_trees(name, forest):
        kind, severity = (STORED, "high") if trees.reveals_records else (STATISTICS, "medium")
        remedy = ADVICE if trees.reveals_records else LIMIT_LEAVES
        yield Finding(kind, severity, trees.what, where, trees.reason, remedy, count=trees.count)


def _by_structure(model: TreeModel, where: str) -> Iterator[Finding]:
    """Yield findings from the numbers of leaves and seeds of a tree model whose table is not recovered."""
    if model.stores_targets:
        reason = (
            f"{model.single_leaves} of {model.leaves} leaves hold a single training record. Each stores "
            "the target of that record exactly, and its bounds enclose the record's columns"
        )
        what = f"training targets in the leaves of {model.name}"
        yield Finding(STORED, "high", what, where, reason, ADVICE, count=model.single_leaves)
    if model.determines_targets:
        reason = (
            f"{model.trees} trees store the seeds of their bootstrap samples of {model.records} records. "
            "The value in the root of each tree is a linear equation for the targets or labels. There "
            "are at least as many trees as records, so these equations determine all targets or labels. "
            "The depth of the trees does not matter"
        )
        what = f"targets that follow from the seeds of {model.name}"
        yield Finding(STORED, "high", what, where, reason, ADVICE, count=model.records)
    if not (model.stores_targets or model.determines_targets):
        reason = (
            "thresholds lie between two values of training records, and leaves count their records"
            if model.is_direct
            else "thresholds lie between two values of training records. Leaves store residuals, "
            "gradients or depths, and no targets"
        )
        what = f"decision trees of {model.name}"
        yield Finding(STATISTICS, "medium", what, where, reason, LIMIT_LEAVES)


def _uninitialized_memory(model: TreeModel, where: str) -> Finding:
    memory = (
        f"{model.memory} unused bytes of this file are not zero"
        if model.memory
        else "all unused bytes of this file are zero"
    )
    reason = (
        f"the file was written by scikit-learn {model.version}. Before 1.3.2 tree files could "
        f"contain uninitialized memory, which may include training data; {memory}"
    )
    severity = "high" if model.memory else "low"
    what = f"uninitialized memory in {model.name}"
    return Finding(
        STATISTICS, severity, what, where, reason, SAVE_AGAIN, count=model.memory or None
    )


def name_of(release: Release) -> str:
    """Return the class name of the object in a file, or "" if the content of the file is not an object."""
    return release.content.class_name if isinstance(release.content, InertObject) else ""


def _find_paths(place: Place) -> Iterator[Finding]:
    """Find texts that look like file names, except the names of base models and architecture strings."""
    text = place.value
    if isinstance(text, str) and 4 <= len(text) <= 1000 and PATH.match(text):
        if place.name in ("base_model_name_or_path", "architecture"):
            return
        example = repr(text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}")
        reason = f"names of folders and files such as {example} tell what the model was trained on"
        remedy = "Remove the names before release: residuum strip FILE --out CLEAN."
        yield Finding(PATHS, "medium", "names of files", place.path, reason, remedy)


RULES: dict[type, tuple[Callable[[Place], Iterator[Finding]], ...]] = {
    InertObject: (_find_stored, _find_vocabularies, _find_initial_weights, _find_statistics),
    Block: (
        _find_stored,
        _find_vocabularies,
        _find_optimizer_state,
        _find_initial_weights,
        _find_statistics,
    ),
    dict: (_find_vocabularies,),
    list: (_find_statistics,),
    int: (_find_initial_weights, _find_statistics),
    str: (_find_paths,),
}


def _find_code(release: Release) -> Iterator[Finding]:
    """Find the code that loading a pickle would run, and classes of other packages that the pickle names."""
    for action in release.unsafe[:MAX_NAMED]:
        reason = (
            "loading a pickle runs the functions that it calls; this function is not known to be "
            "harmless"
        )
        remedy = "Do not load this file. Ask its author for the weights as safetensors."
        if release.kind == "torch":
            remedy = (
                "Do not load this file. residuum strip FILE --out CLEAN writes only its weights."
            )
        yield Finding(CODE, "high", f"loading this file would {action}", PROGRAM, reason, remedy)
    actions = set(release.unsafe)
    if names := [name for name in release.foreign if f"call {name}" not in actions]:
        omitted_note = f" and {len(names) - 5} more" if len(names) > 5 else ""
        reason = (
            f"loading this file imports {', '.join(names[:5])}{omitted_note} and runs the code of these "
            "packages"
        )
        remedy = "Load this file only with packages that you trust, or release only the weights."
        what = "classes and functions of other packages"
        yield Finding(CLASSES, "low", what, PROGRAM, reason, remedy, count=len(names))


def _find_adapters(release: Release) -> Iterator[Finding]:
    if not (pairs := find_adapter_pairs(release.content)):
        return
    ranks = sorted({min(a.shape) for a, _ in pairs.values() if a.shape})
    reason = (
        f"{len(pairs)} layers of rank {', '.join(map(str, ranks[:4]))}: with the base model, the adapter "
        "gives the change of each layer, which is a sum over training samples"
    )
    remedy = (
        "Merge the adapter into the base and round the weights, or train with differential privacy."
    )
    where, count = (
        next(iter(pairs))[:MAX_PATH_LENGTH],
        sum(a.numel + b.numel for a, b in pairs.values()),
    )
    yield Finding(ADAPTER, "medium", "a low-rank adapter", where, reason, remedy, len(pairs), count)
