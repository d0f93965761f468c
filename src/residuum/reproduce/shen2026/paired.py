"""Paired comparisons of attacks on one victim: per-sample values, bootstrap, the top-25 rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from residuum.evaluation.matching import greedy
from residuum.similarity import l2, ncc

THRESHOLD = 2.5  # L2 below which a sample counts as reconstructed (Loo et al. 2024)
TOP = 25
Array = np.ndarray[Any, Any]
BOOTSTRAPS = 10_000


def per_sample(runs: list[Tensor], samples: Tensor) -> dict[str, Any]:
    """Per seed and sample: nearest candidate by L2 and NCC, and the one-to-one L2 (null: none)."""
    distances = [l2(run, samples) for run in runs]
    pairs = [greedy(d, False).value for d in distances]
    return {
        "l2": [d.amin(0).tolist() for d in distances],
        "ncc": [ncc(run, samples).amax(0).tolist() for run in runs],
        "l2_one_to_one": [[float(v) if np.isfinite(v) else None for v in p] for p in pairs],
        "below_threshold_one_to_one": [int((p < THRESHOLD).sum()) for p in pairs],
    }


def compare(arm: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Paired differences of an arm to no growth; L2: negative is better, NCC: positive."""
    found: dict[str, Any] = {}
    for which in ("train", "held_out"):
        for metric in ("l2", "ncc"):
            a, b = (np.array(side[which][metric]) for side in (arm, base))
            difference = (a - b).mean(0)
            found[f"{which}_{metric}_difference"] = bootstrap(difference)
            better = a < b if metric == "l2" else a > b
            found[f"{which}_{metric}_share_better"] = float(better.mean())
    tops = [
        top_rule(np.array(arm["train"]["l2"][s]), np.array(base["train"]["l2"][s]))
        for s in range(len(base["train"]["l2"]))
    ]
    found["top25"] = {"improved": [t[0] for t in tops], "of": [t[1] for t in tops]}
    return found


def control(base: dict[str, Any]) -> dict[str, Any]:
    """The top-25 rule and the paired difference between restarts that differ in the seed alone."""
    values = [np.array(v) for v in base["train"]["l2"]]
    pairs = [(i, j) for i in range(len(values)) for j in range(len(values)) if i != j]
    tops = [top_rule(values[i], values[j]) for i, j in pairs]
    neighbours = [bootstrap(values[i] - values[j]) for i, j in pairs[:: max(1, len(pairs) // 5)]]
    return {
        "top25": {"improved": [t[0] for t in tops], "of": [t[1] for t in tops]},
        "l2_difference": neighbours,
    }


def top_rule(after: Array, before: Array, threshold: float = THRESHOLD) -> tuple[int, int]:
    """(improved, kept): samples within the threshold before or after, the best 25 of them.

    Lower is better; negate values where higher is.
    """
    kept = top_kept(after, before, threshold)
    return int((after[kept] < before[kept]).sum()), len(kept)


def top_kept(after: Array, before: Array, threshold: float = THRESHOLD) -> list[int]:
    """The samples the rule looks at, best first."""
    best = np.minimum(after, before)
    return [int(i) for i in np.argsort(best) if best[i] < threshold][:TOP]


def bootstrap(difference: Array, seed: int = 0) -> dict[str, float]:
    """Mean over samples and its percentile interval; samples are drawn again, all of them."""
    rng = np.random.default_rng(seed)
    draws = difference[rng.integers(0, len(difference), (BOOTSTRAPS, len(difference)))].mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": float(difference.mean()), "low": float(low), "high": float(high)}
