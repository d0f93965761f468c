"""``rs.alternatives``: other training sets that explain the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from residuum.errors import require_known
from residuum.io.checkpoints import as_network
from residuum.networks.network import Network
from residuum.records import Dataset, write_atomic, write_json
from residuum.records.inputs import write_npz
from residuum.records.rundir import refuse_foreign
from residuum.report.figures import alternatives_figure
from residuum.theory import alternatives as kinds
from residuum.theory.directions import DIRECTIONS
from residuum.theory.kkt_sets import KKTSet, Watcher
from residuum.verbs.attacking import write_figures

SUMMARY, SAMPLES, PICTURE = "alternatives.json", "alternative.npz", "alternatives.png"
# Default distance by which samples move, as a share of the largest distance at which the same neurons stay
# active.
SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Alternatives:
    """An alternative training set, together with the true training set.

    Attributes:
        true_set: The true training samples with their multipliers.
        alternative: The alternative training set.
        direction: Name of the rule that chose the direction in which each sample moved, such as "softest".
        arch: Architecture of the network.
    """

    true_set: KKTSet
    alternative: kinds.Alternative
    direction: str
    arch: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``alternatives.json``, with measurements of both training sets."""
        before, alternative, after = self.true_set, self.alternative, self.alternative.after
        # A budget is the largest distance that a sample can move before its activation pattern changes.
        finite_budgets = alternative.budgets[alternative.budgets.isfinite()]
        return {
            "residual_before": before.residual,
            "residual_after": after.residual,
            "min_distance": after.distance(before),
            "on_margin": after.is_on_margin,
            "stationary_set": after.is_stationary_set,
            "full_kkt_set": after.is_full_kkt_set,
            "n_before": len(before),
            "n_after": len(after),
            "kind": alternative.kind,
            "direction": None if alternative.kind == "merge" else self.direction,
            "in_use": len(alternative.before),
            "changed": alternative.changed,
            "exact_kkt_point": before.is_exact,
            "margin_before": before.margin,
            "margin_after": after.margin,
            "delta_before": before.delta,
            "delta_after": after.delta,
            "budget_median": float(finite_budgets.median()) if len(finite_budgets) else None,
            "budgets_unlimited": int(alternative.budgets.isinf().sum()),
            "blocked": [vars(sample) for sample in alternative.blocked],
        }


def alternatives(
    model: Network | nn.Module | str | Path,
    data: Dataset,
    *,
    distance: float | None = None,
    share: float | None = None,
    merge: bool = False,
    direction: str = "softest",
    task: str = "auto",
    arch: str | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
) -> Alternatives:
    """Construct another training set that an attack on the weights cannot tell from the true one.

    Args:
        model: The network, or the file of its weights.
        data: The true training samples.
        distance: Move every sample at least this far from all true samples.
        share: Split every sample into two samples that move in opposite directions. ``share`` is the distance
            of the move, as a share of the largest distance that keeps the activation pattern. By default,
            samples are split with a share of 0.9.
        merge: Merge samples that have the same label and the same activation pattern.
        direction: Name of the rule that chooses the direction in which each sample moves, such as "softest".
        task: "binary", "multiclass", "regression", or "auto" to use the task of the network.
        arch: Architecture of the network, if the file of the weights does not hold the architecture.
        out: Folder for the alternative training set and its picture.
        watch: Function that receives the number of finished samples and the number of all samples.

    Returns:
        The alternative training set, together with the true training set.

    Example:
        >>> split = rs.load_dataset("digits", 20)
        >>> rs.alternatives("runs/m", split.train, distance=10).to_json()["residual_after"]
    """
    require_known(direction, DIRECTIONS, "There is no direction")
    if out is not None:
        refuse_foreign(Path(out), "alternatives", {SUMMARY})
    network = as_network(model, arch)
    task = network.task if task == "auto" and network.task else task
    true_set = KKTSet.from_samples(network.module, data.x, data.y, task=task)
    if merge:
        alternative = kinds.build_merged_alternative(true_set)
    elif distance is not None:
        alternative = kinds.build_far_alternative(true_set, distance, direction, watch)
    else:
        share = SHARE if share is None else share
        alternative = kinds.build_budget_alternative(true_set, share, direction, watch)
    alternative_sets = Alternatives(true_set, alternative, direction, network.arch)
    if out is not None:
        _write(Path(out), data, alternative_sets)
    return alternative_sets


def _write(out: Path, samples: Dataset, result: Alternatives) -> None:
    """Write the alternative training set and its picture, and then the summary."""
    alternative, after = result.alternative, result.alternative.after
    labels = after.y
    if result.true_set.task == "binary" and bool((samples.y >= 0).all()):
        labels = (
            labels + 1
        ) / 2  # convert the labels -1 and 1 to the labels 0 and 1 of the given samples
    # With several classes, each sample has a multiplier for each wrong class. The array ``u`` holds minus
    # these multipliers.
    multipliers = -after.u[:, 0].clamp(max=0) if result.true_set.task == "multiclass" else after.lam
    arrays = {
        "x": after.x.numpy(),
        "y": labels.to(samples.y.dtype).numpy(),
        "lam": multipliers.numpy(),
    }
    if samples.mean is not None:
        arrays["mean"] = samples.mean.numpy()
    write_atomic(out / ".gitignore", "*\n")
    write_npz(out / SAMPLES, arrays)
    figure = alternatives_figure(alternative.before.x, after.x, alternative.parents, samples.mean)
    write_figures(out, {PICTURE: figure})
    write_json(out / SUMMARY, result.to_json())
