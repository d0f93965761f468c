"""What in a release can give training data away, found by looking: no attack, no data, no code run.

Each rule looks at one place of the tree that :mod:`.releases` brings and says what it is, why it
matters and what to do. Places of one kind and class are one finding.

================  ====================================================  =============================
kind              what                                                  what it tells
================  ====================================================  =============================
code              calls of functions that are not known to be harmless  the file is not safe to load
stored            records, their values, or targets of single records   records
optimizer-state   momentum, Adam's moments, averaged copies             sums of the last gradients
start             the weights before training, or the seed of them      W - W0, a sum over samples
statistics        means, scales, counts, trees, loss curves             moments of the data
touched-rows      rows of an embedding that training moved              tokens, users, items
adapter           low-rank changes of a base                            the change, without noise
paths             names of files and folders                            what it was trained on
classes           classes and functions of other packages               whose code loading runs
================  ====================================================  =============================

What of it an attack can use is handed to it (:func:`add_stored_knowledge`): a mean of the last gradients,
weight decay taken out (``optimizer_state.read_moment``); of a scikit-learn network the start, proved by the
weights (:mod:`.estimators`). The state of a torch optimizer is kept by the number of each parameter, in
the order in which the optimizer was given them, or by name. Numbers are matched with the tensors of the
state dict in their order where all shapes agree, fewer with the last ones (a head), otherwise shape by shape.
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
from residuum.io.estimators import NETWORKS, find_initial_weights
from residuum.io.inert import Block, InertObject, make_key
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.release import Release
from residuum.io.release_weights import find_weights
from residuum.io.tree import MAX_PATH_LENGTH, OPTIMIZERS, Place, join_path, walk
from residuum.io.trees import LIMIT_TREES, SAVE_AGAIN, WHAT_PROTECTS, read_tree_model
from residuum.records import Record
from residuum.records.inputs import is_size
from residuum.records.published import Count, SchemaRule

STORED, STATE, START, STATISTICS = "stored", "optimizer-state", "start", "statistics"
TOUCHED, ADAPTER, PATHS = "touched-rows", "adapter", "paths"
CODE, CLASSES = "code", "classes"
PROGRAM = "the pickle"  # where code is: in the instructions, not at a value
KINDS = (CODE, STORED, STATE, START, TOUCHED, ADAPTER, STATISTICS, PATHS, CLASSES)
Kind = Annotated[str, SchemaRule(enum=[*KINDS])]
SEVERITIES = ("high", "medium", "low")
MAX_NAMED = 20  # calls that are listed one by one: a hostile file may make any number
MOST_DENSE = 1 << 24  # values of a sparse array that is compared
FEW_VALUES = 50  # of one column: up to here they are a list of labels, above it records' values


@dataclass(frozen=True, eq=False)
class Finding(Record):
    """One surface of a file.

    what: in a few words.
    where: the first place.
    places: how many there are.
    count: records, rows, words or numbers there.
    rows: of a table, those that were touched.
    kind: a key of ``KINDS``.
    severity: high, medium or low.
    reason: what it tells whom.
    remedy: what to do before the release.
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


# Of scikit-learn: attribute -> classes that it belongs to, () for any.
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
ELSEWHERE = re.compile(
    r"(^|[._])(x_?train|train_?x|train(ing)?_(data|images|samples|inputs|set)|raw_data|"
    r"replay_buffer|exemplars?|support_set|dataset)([._]|$)",
    re.IGNORECASE,
)
PROTOTYPES = re.compile(r"(^|[._])(prototypes?|memory_bank|queue)([._]|$)", re.IGNORECASE)
TREES = re.compile(r"(KDTree|BallTree)(32|64)?$")
FRAME, FRAME_PART = "DataFrame", "_unpickle_block"  # of pandas: a table, and columns of one type
FRAMES = re.compile(r"^(pandas|polars|pyarrow|PIL|datasets)\.")
MEASURED = {
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


NAMED = "its name says that it holds training data"
DROP_STATE = "Drop it before release: residuum strip FILE --out CLEAN."
KEEP_NONE = "Release an estimator that keeps no records, or predictions alone."
DROP_SKLEARN = (
    "Before saving, delete the attribute _optimizer of the network. Predictions do not need it."
)


def findings(release: Release) -> list[Finding]:
    """Every surface of a file, the gravest first."""
    found: dict[tuple[str, ...], tuple[Finding, int, int]] = {}
    for one in _hits(release):
        kind = (one.kind, one.severity, one.what)
        first, places, count = found.get(kind, (one, 0, 0))
        found[kind] = (first, places + one.places, count + (one.count or 0))
    merged = []
    for first, places, count in found.values():
        said = {name: printable(getattr(first, name)) for name in ("what", "where", "reason")}
        merged.append(first.replace(places=places, count=count or None, **said))
    can_strip = _has_weights(release)
    return sorted((one if can_strip else _without_strip(one, release) for one in merged), key=rank)


def _has_weights(release: Release) -> bool:
    """Return True if ``residuum strip`` can write the weights of this file alone."""
    try:
        return bool(find_weights(release))
    except CheckpointError:
        return False


def _without_strip(finding: Finding, release: Release) -> Finding:
    """Return the finding with advice that works on a file which ``residuum strip`` cannot change."""
    if "residuum strip" not in finding.remedy:
        return finding
    remedy = "Remove it from the object before you save it again."
    if release.kind == "torch" and not isinstance(release.content, InertObject):
        remedy = "Delete this file from the release. It is not needed to use the model."
    return finding.replace(remedy=remedy)


def printable(text: str) -> str:
    """Names out of a file as they can be shown: no control character reaches a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def rank(one: Finding) -> tuple[int, int]:
    """The gravest first, then by kind."""
    return SEVERITIES.index(one.severity), KINDS.index(one.kind)


def _hits(release: Release) -> Iterator[Finding]:
    metadata = {make_key(key): value for key, value in release.metadata.items()}
    config = {k: v for k, v in release.config.items() if k in ADAPTER_TEXTS}
    yield from _adapters(release)
    yield from _trees(release)
    yield from _code(release)
    for place in walk({"": release.content, "metadata": metadata, "adapter_config": config}):
        for look in LOOKS.get(type(place.value), ()):
            yield from look(place)


ADAPTER_TEXTS = ("base_model_name_or_path", "dataset", "data_path", "output_dir", "train_file")


def rows_of(value: Any) -> int | None:
    """Records in an array, dense or sparse, or in a tree; None where it is none."""
    if isinstance(value, Block):
        return value.shape[0] if len(value.shape) > 1 and value.shape[0] > 1 else None
    if isinstance(value, InertObject):
        shape = value.attributes.get("_shape")
        if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
            return shape[0]
        return rows_of(_tree_data(value))
    return None


def _tree_data(tree: InertObject) -> Block | None:
    """The trees of scikit-learn: data first."""
    parts = tree.state if isinstance(tree.state, tuple) else ()
    return next((part for part in parts if isinstance(part, Block) and rows_of(part)), None)


@dataclass(frozen=True, eq=False)
class Kept:
    """Records stored outright: what was found, and the records (N, d) where they can be read.

    certain: what wrote the file puts records there; else its name alone says so.
    """

    finding: Finding
    records: Tensor | None
    certain: bool


def records_in(release: Release) -> list[Kept]:
    """Every place whose rows are training records."""
    return [
        Kept(one, _records(place.value), one.reason != NAMED)
        for place in walk(release.content)
        for one in _stored(place)
        if one.severity == "high"
    ]


def _records(value: Any) -> Tensor | None:
    """(N, d) numbers of an array, a sparse array or a tree; None where there are none to compare."""
    try:
        if isinstance(value, InertObject) and value.class_name == FRAME:
            return _frame_rows(value)
        if isinstance(value, InertObject) and "_shape" in value.attributes:
            return _dense(value)
        block = _tree_data(value) if isinstance(value, InertObject) else value
        if not isinstance(block, Block) or block.read is None:
            return None
        found = block.tensor().flatten(1)
    except CheckpointError:  # damaged: that they are there is to be said all the same
        return None
    if found.is_complex() or not found.numel():
        return None
    return found if found.is_floating_point() else found.double()


def _frame_rows(frame: InertObject) -> Tensor | None:
    """Return the numeric columns of a DataFrame as rows, (N, d); None if there are none to read.

    pandas stores columns of one type together, as (columns, rows), with their places in the table.
    """
    manager = frame.attributes.get("_mgr")
    parts = (manager.state, manager.arguments) if isinstance(manager, InertObject) else ()
    columns: dict[int, Tensor] = {}
    for part in parts:
        blocks = part[0] if isinstance(part, tuple) and part else ()
        for block in blocks if isinstance(blocks, tuple | list) else ():
            if isinstance(block, InertObject) and len(block.arguments) >= 2:
                values, places = block.arguments[:2]
                if isinstance(values, Block) and values.read and len(values.shape) == 2:
                    numbers = values.tensor()
                    columns |= dict(zip(_places(places), numbers.double(), strict=False))
    rows = [columns[place] for place in sorted(columns)]
    return torch.stack(rows, 1) if rows and len({len(row) for row in rows}) == 1 else None


def _places(places: Any) -> list[int]:
    """Return the numbers of columns that a slice or an array of pandas names."""
    if isinstance(places, Block) and places.read:
        return places.tensor().flatten().tolist()
    ends = places.arguments if isinstance(places, InertObject) else ()
    if (
        len(ends) == 3
        and all(type(end) is int and abs(end) < MOST_DENSE for end in ends)
        and ends[2]
    ):
        return list(range(*ends))
    return []


def _dense(sparse: InertObject) -> Tensor | None:
    """Of scipy's compressed rows or columns; None for other kinds and where it would not fit memory."""
    from scipy.sparse import csc_matrix, csr_matrix

    make = {"csr": csr_matrix, "csc": csc_matrix}.get(sparse.class_name[:3])
    own, shape = sparse.attributes, sparse.attributes["_shape"]
    parts = [own.get(name) for name in ("data", "indices", "indptr")]
    arrays = [part.tensor().numpy() for part in parts if isinstance(part, Block) and part.read]
    sizes = isinstance(shape, tuple) and len(shape) == 2 and all(map(is_size, shape))
    if make is None or len(arrays) < 3 or not sizes or not 0 < shape[0] * shape[1] <= MOST_DENSE:
        return None
    try:
        found = make(tuple(arrays), shape)
        found.check_format(full_check=True)  # numbers of rows and columns are a stranger's
        return torch.from_numpy(found.toarray()).double()
    except (TypeError, ValueError):
        return None


def _stored(place: Place) -> Iterator[Finding]:
    """Records outright: by the attribute of a known estimator, by its trees, as a table, or by a telling
    name.

    Names alone are weak, so that arrays count by them only outside of estimators and optimizers.
    """
    value, rows, at, name = place.value, rows_of(place.value), place.path, place.name[:40]
    elsewhere = at[-60:] if rows and not place.section else ""
    if isinstance(value, InertObject) and TREES.search(value.class_name) and rows:
        what = f"records in the {value.class_name} of {place.owner}"
        why = "the tree holds every training record it was built on"
        yield Finding(STORED, "high", what, at, why, KEEP_NONE, count=rows)
    elif (
        isinstance(value, InertObject) and FRAMES.match(value.name) and value.class_name in _TABLES
    ):
        what = f"a {value.class_name} of {value.name.split('.')[0]}"
        why = "a table or picture of data is part of the file"
        remedy = "Leave it out: keep the fitted numbers alone."
        records = _records(value) if value.class_name == FRAME else None
        count = None if records is None else len(records)
        yield Finding(STORED, "high", what, at, why, remedy, count=count)
    elif rows and place.owner and place.name in RECORDS:
        owners = RECORDS[place.name]
        if not owners or place.owner in owners:
            what = f"training records in {place.owner}.{place.name}"
            why = "its rows are training records, as they were given to fit"
            yield Finding(STORED, "high", what, at, why, KEEP_NONE, count=rows)
    elif ELSEWHERE.search(elsewhere) and place.owner != FRAME_PART:  # counted as a table before
        what, remedy = f"an array named {name}", "Leave it out of what is saved."
        yield Finding(STORED, "high", what, at, NAMED, remedy, count=rows)
    elif PROTOTYPES.search(elsewhere):
        why = "prototypes and memory banks are records, or features of records"
        remedy = "Leave it out unless predictions need it."
        yield Finding(STORED, "medium", f"prototypes in {name}", at, why, remedy, count=rows)


_TABLES = {"DataFrame", "Series", "Table", "Image", "Dataset", "PngImageFile", "JpegImageFile"}


def _words(place: Place) -> Iterator[Finding]:
    """Vocabularies and category lists."""
    value, name, at = place.value, place.name, place.path
    vocabulary = name in ("vocabulary_", "vocab", "token2id", "item2id", "user2id", "word2idx")
    if vocabulary and isinstance(value, dict) and value:
        what = f"a vocabulary in {place.owner or 'the file'}"
        why = "every word, user or item that training saw, by name"
        remedy = "Drop rare words (min_df), or hash them (HashingVectorizer)."
        yield Finding(STORED, "medium", what, at, why, remedy, count=len(value))
    if name in ("categories_", "classes_") and isinstance(value, Block):
        first = value.objects[:1000] if isinstance(value.objects, list) else []
        if value.kind != "text" and not any(isinstance(one, str) for one in first):
            return
        kind = (STORED, "medium") if value.numel > FEW_VALUES else (STATISTICS, "low")
        what = f"values of a column in {place.owner}.{name}"
        why = "the values that training records had in this column, word for word"
        remedy = "Group rare values (min_frequency), or encode them before fitting."
        yield Finding(*kind, what, at, why, remedy, count=value.numel)


def _state(place: Place) -> Iterator[Finding]:
    """What an optimizer kept: first moments give samples back, second moments and averages less.

    By the names that torch and scikit-learn use, wherever they stand: trainers wrap them in many ways.
    """
    value, name, at = place.value, place.leaf, place.path
    if not isinstance(value, Block) or not value.numel:
        return
    known = place.section == "state" or name in {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    remedy = DROP_SKLEARN if place.owner in OPTIMIZERS else DROP_STATE
    if known and place.section != "step" and value.kind.startswith(("float", "bfloat")):
        if name in FIRST_MOMENTS:
            what = f"first moments ({name})"
            why = (
                "a weighted sum of the last gradients: training samples come back from it where the "
                "weights alone give few"
            )
            yield Finding(STATE, "high", what, at, why, remedy, count=value.numel)
        elif name in SECOND_MOMENTS or value.shape:
            what = f"second moments and other state ({name})"
            why = "squared gradients of the last steps, element by element"
            yield Finding(STATE, "medium", what, at, why, remedy, count=value.numel)
    elif place.section == "average":
        what = "averaged copies of the weights"
        why = "the difference to the weights is a sum of the last steps"
        remedy = "Release one copy: the averaged weights, or the last ones."
        yield Finding(STATE, "medium", what, at, why, remedy, count=value.numel)


def _start(place: Place) -> Iterator[Finding]:
    """Whatever gives the weights before training away: a start that the weights bear out, seeds,
    generators.
    """
    value, name, at = place.value, place.name, place.path
    if isinstance(value, InertObject) and value.class_name in NETWORKS:
        if (proof := find_initial_weights(value)) is not None:
            what, at = f"the start of {value.class_name}", join_path(at, proof.attribute)
            why = f"{proof.evidence}: W - W0 is a sum over training samples"
            yield Finding(START, "high", what, at, why, proof.remedy, count=proof.value_count)
    elif type(value) is int and (SEEDS.match(name) or (name == "random_state" and place.owner)):
        what = f"a seed ({place.owner + '.' if place.owner else ''}{name})"
        why = "whoever has the code can draw the start and the order of the batches again"
        remedy = "Do not publish seeds of what was trained on private data."
        yield Finding(START, "low", what, at, why, remedy)
    elif isinstance(value, Block) and SEEDS.match(name):
        what = f"the state of a random generator ({name})"
        why = "it tells the draws that were made before and after"
        yield Finding(START, "low", what, at, why, DROP_STATE)


def _statistics(place: Place) -> Iterator[Finding]:
    """Moments of the data that predictions need, and loss curves that nobody needs."""
    value, name, at = place.value, place.leaf, place.path
    if name in MEASURED and not place.section and isinstance(value, Block | list | int) and value:
        of = place.owner or name
        of = "normalization layers" if name.startswith(("running_", "num_")) else of
        what, remedy = (
            f"moments of the data in {of}",
            "Needed for predictions; of few records, round it.",
        )
        why = "means, scales or counts of the training data, or of features of them"
        if name in ("loss_curve_", "validation_scores_"):
            what, remedy = (
                "a loss curve",
                f"Before saving, delete the attribute {name} of the model.",
            )
            why = "how training went, epoch by epoch"
        count = value.numel if isinstance(value, Block) else None
        yield Finding(STATISTICS, "low", what, at, why, remedy, count=count)


def _trees(release: Release) -> Iterator[Finding]:
    """Models made of trees: what their leaves, roots and seeds reveal of the training records."""
    inner: set[int] = set()
    for place in walk(release.content):
        if not isinstance(place.value, InertObject):
            continue
        model = read_tree_model(place.value, inner)
        if model is None:
            continue
        name, at = model.name, place.path or name_of(release)
        if model.stores_targets:
            why = (
                f"{model.single_leaves} of {model.leaves} leaves hold a single training record. Each stores "
                "the target of that record exactly, and its bounds enclose the record's columns"
            )
            what, count = f"training targets in the leaves of {name}", model.single_leaves
            yield Finding(STORED, "high", what, at, why, WHAT_PROTECTS, count=count)
        if model.determines_targets:
            why = (
                f"{model.trees} trees store the seeds of their bootstrap samples of {model.records} records. "
                "The roots of at least as many trees as records are linear equations for all targets or "
                "labels, whatever the depth"
            )
            what = f"targets that follow from the seeds of {name}"
            yield Finding(STORED, "high", what, at, why, WHAT_PROTECTS, count=model.records)
        if not (model.stores_targets or model.determines_targets):
            why = (
                "thresholds lie between two values of training records, and leaves count their records"
                if model.is_direct
                else "thresholds lie between two values of training records. Leaves store residuals, "
                "gradients or depths, and no targets"
            )
            yield Finding(STATISTICS, "medium", f"decision trees of {name}", at, why, LIMIT_TREES)
        if model.may_contain_memory:
            seen = (
                f"{model.memory} such bytes are not zero here"
                if model.memory
                else "none was seen here"
            )
            why = (
                f"the file was written by scikit-learn {model.version}. Before 1.3.2 tree files could "
                f"contain uninitialized memory, which may include training data; {seen}"
            )
            severity = "high" if model.memory else "low"
            what = f"uninitialized memory in {name}"
            yield Finding(
                STATISTICS, severity, what, at, why, SAVE_AGAIN, count=model.memory or None
            )


def name_of(release: Release) -> str:
    """Return the class of what the file holds, for findings about the whole of it."""
    return release.content.class_name if isinstance(release.content, InertObject) else ""


def _paths(place: Place) -> Iterator[Finding]:
    """Texts that look like files, but for those whose place says that they name a public base."""
    text = place.value
    if isinstance(text, str) and 4 <= len(text) <= 1000 and PATH.match(text):
        if place.name in ("base_model_name_or_path", "architecture"):
            return
        shown = repr(text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}")
        why = f"such as {shown}: folders and file names tell what it was trained on"
        remedy = "Drop them before release: residuum strip FILE --out CLEAN."
        yield Finding(PATHS, "medium", "names of files", place.path, why, remedy)


LOOKS: dict[type, tuple[Callable[[Place], Iterator[Finding]], ...]] = {
    InertObject: (_stored, _words, _start, _statistics),
    Block: (_stored, _words, _state, _start, _statistics),
    dict: (_words,),
    list: (_statistics,),
    int: (_start, _statistics),
    str: (_paths,),
}


def _code(release: Release) -> Iterator[Finding]:
    """Yield what loading a pickle would run, and whose classes it names."""
    for deed in release.unsafe[:MAX_NAMED]:
        reason = (
            "a pickle runs what it calls as soon as it is loaded, and this is no known constructor"
        )
        remedy = "Do not load it. Ask its author for the weights as safetensors."
        if release.kind == "torch":
            remedy = "Do not load it. residuum strip FILE --out CLEAN writes its weights alone."
        yield Finding(CODE, "high", f"loading this file would {deed}", PROGRAM, reason, remedy)
    deeds = set(release.unsafe)
    if names := [name for name in release.foreign if f"call {name}" not in deeds]:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        reason = f"loading this file imports {', '.join(names[:5])}{more} and runs the code of these packages"
        remedy = "Load it only with packages that you trust, or release the weights alone."
        what = "classes and functions of other packages"
        yield Finding(CLASSES, "low", what, PROGRAM, reason, remedy, count=len(names))


def _adapters(release: Release) -> Iterator[Finding]:
    if not (pairs := find_adapter_pairs(release.content)):
        return
    ranks = sorted({min(a.shape) for a, _ in pairs.values() if a.shape})
    why = (
        f"{len(pairs)} layers of rank {', '.join(map(str, ranks[:4]))}: with its base this is the "
        "change of each layer, which is a sum over training samples"
    )
    remedy = "Merge and round it, or train the adapter with differential privacy."
    at, count = (
        next(iter(pairs))[:MAX_PATH_LENGTH],
        sum(a.numel + b.numel for a, b in pairs.values()),
    )
    yield Finding(ADAPTER, "medium", "a low-rank adapter", at, why, remedy, len(pairs), count)
