"""Find clusters and classes with a single training record. The stored center is then the record itself.

================  ===================  =======================================================================
estimator         center               a cluster has a single record if
================  ===================  =======================================================================
KMeans            cluster_centers_     one of the labels_ of the training records names it. MeanShift and
                                       MiniBatchKMeans average other records too, so their centers can differ
Birch             centroids            ``n_samples_`` of the subcluster is 1
GaussianMixture   means_               its covariance is ``reg_covar`` times the identity matrix
GaussianNB        theta_               ``class_count_`` is 1
================  ===================  =======================================================================

Other centers are means of several records. Without the training data, the center of a cluster of unknown size
cannot be told from a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from residuum.errors import CheckpointError
from residuum.io.inert import Block, InertObject
from residuum.io.tree import Place, join_path
from residuum.scanning.finding import STORED, Finding
from residuum.scanning.stored_rules import StoredArray
from residuum.scanning.survey import Survey

MEANS = ("KMeans", "BisectingKMeans")  # the center of a cluster is the mean of its records
NEAR_MEANS = ("MiniBatchKMeans", "MeanShift")  # the center also depends on other records
MAX_LABELS = 1 << 26  # largest number of cluster labels of training records that are counted
EPSILON = (
    1e-9  # largest relative difference of a covariance from ``reg_covar``, which sums up rounding
)
REMEDY = "Use fewer clusters, so that every cluster has several records, or remove small clusters."
LARGER_THRESHOLD = "Use a larger threshold, so that every subcluster has several records."


def find_single_records(place: Place, survey: Survey) -> Iterator[StoredArray]:
    """Find centers of clusters and classes that have a single training record.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model. This rule does not use them.

    Yields:
        The centers with their findings.
    """
    model = place.value
    if not isinstance(model, InertObject):
        return
    rule = RULES.get(model.class_name)
    if rule is None:
        return
    name, find_singles = rule
    centers = model.attributes.get(name)
    if not isinstance(centers, Block) or len(centers.shape) != 2:
        return
    try:
        single_record_rows = find_singles(model.attributes)
    except (CheckpointError, RuntimeError, ValueError, IndexError):  # the file is damaged
        return
    single_record_rows = single_record_rows[single_record_rows < centers.shape[0]]
    if not len(single_record_rows):
        return
    is_certain = model.class_name not in NEAR_MEANS
    finding_title = f"single records as centers in {model.class_name}.{name}"
    reason = (
        "each of these clusters or classes has one training record, and its center is this record"
        if is_certain
        else "each of these clusters has one training record, and its center can be this record"
    )
    finding = Finding(
        STORED,
        "high" if is_certain else "medium",
        finding_title,
        join_path(place.path, name),
        reason,
        LARGER_THRESHOLD if model.class_name == "Birch" else REMEDY,
        count=len(single_record_rows),
    )
    yield StoredArray(finding, _select_rows(centers, single_record_rows), is_certain)


def _select_rows(block: Block, rows: Tensor) -> Block:
    return Block((len(rows), *block.shape[1:]), block.kind, lambda: block.tensor()[rows])


def _count_by_labels(attributes: dict[str, object]) -> Tensor:
    labels = attributes.get("labels_")
    if not isinstance(labels, Block) or not 0 < labels.numel <= MAX_LABELS:
        return torch.zeros(0, dtype=torch.long)
    assigned = labels.tensor().flatten().long()
    return (torch.bincount(assigned[assigned >= 0]) == 1).nonzero().flatten()


def _count_by_classes(attributes: dict[str, object]) -> Tensor:
    counts = attributes.get("class_count_")
    if not isinstance(counts, Block):
        return torch.zeros(0, dtype=torch.long)
    return (counts.tensor().flatten() == 1).nonzero().flatten()


def _count_by_covariances(attributes: dict[str, object]) -> Tensor:
    covariances, floor = attributes.get("covariances_"), attributes.get("reg_covar")
    if not isinstance(covariances, Block) or not isinstance(floor, float) or floor <= 0:
        return torch.zeros(0, dtype=torch.long)
    variances = covariances.tensor().double()
    if attributes.get("covariance_type") == "full" and variances.ndim == 3:
        variances = variances.diagonal(dim1=1, dim2=2)
    if attributes.get("covariance_type") not in ("full", "diag") or variances.ndim != 2:
        return torch.zeros(0, dtype=torch.long)
    return ((variances / floor - 1).abs() < EPSILON).all(1).nonzero().flatten()


def _count_by_subclusters(attributes: dict[str, object]) -> Tensor:
    """Return for each subcluster of the clustering Birch whether it consists of a single record."""
    singles: list[int] = []
    position = 0
    leaf = attributes.get("dummy_leaf_")  # the first item of the linked list of leaves
    visited: set[int] = set()
    while isinstance(leaf, InertObject) and id(leaf) not in visited:
        visited.add(id(leaf))
        subclusters = leaf.attributes.get("subclusters_")
        for subcluster in subclusters if isinstance(subclusters, list) else ():
            if isinstance(subcluster, InertObject):
                if subcluster.attributes.get("n_samples_") == 1:
                    singles.append(position)
                position += 1
        leaf = leaf.attributes.get("next_leaf_")
    return torch.tensor(singles, dtype=torch.long)


# For each class, the attribute of its centers, and the function that finds the centers of single records.
RULES: dict[str, tuple[str, Callable[[dict[str, object]], Tensor]]] = {
    **dict.fromkeys((*MEANS, *NEAR_MEANS), ("cluster_centers_", _count_by_labels)),
    "Birch": ("subcluster_centers_", _count_by_subclusters),
    "GaussianMixture": ("means_", _count_by_covariances),
    "GaussianNB": ("theta_", _count_by_classes),
}
