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
SHARE = 0.9  # of a sample's budget


@dataclass(frozen=True, eq=False)
class Alternatives:
    """given: the true samples as a KKT set; found: the alternative; direction: how it was searched."""

    given: KKTSet
    found: kinds.Alternative
    direction: str
    arch: str

    def to_json(self) -> dict[str, Any]:
        """The published form; distances and residuals measured, not derived."""
        given, found, after = self.given, self.found, self.found.after
        limited = found.budgets[found.budgets.isfinite()]
        return {
            "residual_before": given.residual,
            "residual_after": after.residual,
            "min_distance": after.distance(given),
            "on_margin": after.is_on_margin,
            "stationary_set": after.is_stationary_set,
            "full_kkt_set": after.is_full_kkt_set,
            "n_before": len(given),
            "n_after": len(after),
            "kind": found.kind,
            "direction": None if found.kind == "merge" else self.direction,
            "in_use": len(found.before),
            "changed": found.changed,
            "exact_kkt_point": given.is_exact,
            "margin_before": given.margin,
            "margin_after": after.margin,
            "delta_before": given.delta,
            "delta_after": after.delta,
            "budget_median": float(limited.median()) if len(limited) else None,
            "budgets_unlimited": int(found.budgets.isinf().sum()),
            "blocked": [vars(one) for one in found.blocked],
        }


def alternatives(
    model: Network | nn.Module | str | Path,
    data: Dataset,
    *,
    far: float | None = None,
    share: float | None = None,
    merge: bool = False,
    direction: str = "softest",
    task: str = "auto",
    arch: str | None = None,
    out: str | Path | None = None,
    watch: Watcher | None = None,
) -> Alternatives:
    """Another training set that an attack on the weights cannot tell from the true one, ``data``.

    far: every sample moves at least this far from all of them.
    share: every sample is split by this share of its budget (the default, 0.9).
    merge: samples of one label and pattern are merged.
    direction: how a sample's direction is found.
    out: folder for the set and its picture.
    """
    require_known(direction, DIRECTIONS, "No direction")
    if out is not None:
        refuse_foreign(Path(out), "alternatives", {SUMMARY})
    released = as_network(model, arch)
    task = released.task if task == "auto" and released.task else task
    given = KKTSet.from_samples(released.module, data.x, data.y, task=task)
    if merge:
        found = kinds.build_merged_alternative(given)
    elif far is not None:
        found = kinds.build_far_alternative(given, far, direction, watch)
    else:
        share = SHARE if share is None else share
        found = kinds.build_budget_alternative(given, share, direction, watch)
    result = Alternatives(given, found, direction, released.arch)
    if out is not None:
        _write(Path(out), data, result)
    return result


def _write(out: Path, samples: Dataset, result: Alternatives) -> None:
    """The set, the picture, and the summary last."""
    found, after = result.found, result.found.after
    y = after.y
    if result.given.task == "binary" and bool((samples.y >= 0).all()):
        y = (y + 1) / 2  # labels as the file had them
    # Several classes: one multiplier per rival, in the column of its class, 0 in the sample's own.
    lam = -after.u[:, 0].clamp(max=0) if result.given.task == "multiclass" else after.lam
    arrays = {"x": after.x.numpy(), "y": y.to(samples.y.dtype).numpy(), "lam": lam.numpy()}
    if samples.mean is not None:
        arrays["mean"] = samples.mean.numpy()
    write_atomic(out / ".gitignore", "*\n")
    write_npz(out / SAMPLES, arrays)
    figure = alternatives_figure(found.before.x, after.x, found.parents, samples.mean)
    write_figures(out, {PICTURE: figure})
    write_json(out / SUMMARY, result.to_json())
