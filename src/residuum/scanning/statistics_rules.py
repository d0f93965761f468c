"""Find statistics of the training data, such as means, scales and counts, and loss curves."""

from __future__ import annotations

from collections.abc import Iterator

from residuum.io.inert import Block
from residuum.io.tree import Place
from residuum.scanning.finding import STATISTICS, Finding

STATISTIC_NAMES = {
    "mean_", "scale_", "var_", "data_min_", "data_max_", "data_range_", "center_",
    "statistics_", "n_samples_seen_", "class_count_", "class_prior_", "theta_", "means_",
    "covariance_", "location_", "centroids_", "cluster_centers_", "idf_", "loss_curve_",
    "validation_scores_", "prototypes", "running_mean", "running_var", "num_batches_tracked", "priors_",
}  # fmt: skip


def find_statistics(place: Place) -> Iterator[Finding]:
    """Find statistics of the training data, such as means, scales and counts, and loss curves."""
    value, name, where = place.value, place.leaf, place.path
    # The nodes of Birch hold the subclusters again, and another rule reports the subclusters.
    if (
        name in STATISTIC_NAMES
        and place.owner not in ("_CFNode", "_CFSubcluster")
        and not place.section
        and isinstance(value, Block | list | int)
        and value
    ):
        owner = place.owner or name
        owner = "normalization layers" if name.startswith(("running_", "num_")) else owner
        finding_title = f"moments of the data in {owner}"
        remedy = "Predictions need these values. If they are computed from few records, round them."
        reason = "the values are means, scales or counts of the training data or of its features"
        if name in ("loss_curve_", "validation_scores_"):
            finding_title = "a loss curve"
            remedy = f"Before saving, delete the attribute {name} of the model."
            reason = "the curve shows the course of training, epoch by epoch"
        value_count = value.numel if isinstance(value, Block) else None
        yield Finding(STATISTICS, "low", finding_title, where, reason, remedy, count=value_count)
