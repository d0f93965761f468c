"""Figures 1 to 14 of Shen et al. 2026, in kind: each case is run with and without splitting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from residuum.records import Split
from residuum.reproduce.context import Context
from residuum.reproduce.images import as_bytes, prefixed
from residuum.reproduce.outcome import Array, Outcome, Row
from residuum.reproduce.published import PUBLISHED
from residuum.reproduce.shen2026.cases import Case, Prepared
from residuum.reproduce.shen2026.comparison import Traced, quality, run_case, threshold
from residuum.reproduce.shen2026.paired import TOP, bootstrap, top_kept, top_rule

SHOWN, FOLLOWED = 30, 3
TINY_NOTE = (
    "tiny: every case is one exact cubic network of 6 samples attacked from fewer candidates; distances "
    "are between unit vectors up to sign, all that such a network determines"
)
CURVES_NOTE = (
    "chance: two restarts without splitting that differ in the seed alone, judged by the same rule"
)


def cases(context: Context, runs: tuple[Case, ...]) -> Outcome:
    """Every case: counts, and all that its pictures are drawn from."""
    rows: list[Row] = []
    arrays: dict[str, Array] = {}
    said: dict[str, Any] = {}
    for case in runs:
        ready, arms = run_case(context, case)
        found = compared(case, ready, arms)
        rows += case_rows(case, arms, found)
        arrays |= prefixed(case.name, pictures(case, ready, arms, found))
        said[case.name] = {
            "n": len(ready.split.train),
            "data": ready.split.train.name,
            "metric": found["metric"],
            "threshold": found["threshold"],
            "every": ready.every,
            "candidates": [int(arms["none"].counts[0]), int(arms["split"].counts[-1])],
        }
    notes = (CURVES_NOTE, *((TINY_NOTE,) if context.scale.name == "tiny" else ()))
    return Outcome(tuple(rows), arrays, {"cases": said}, notes)


def compared(case: Case, ready: Prepared, arms: dict[str, Traced]) -> dict[str, Any]:
    """Per sample and lower is better: without splitting, with it, and the second restart without."""
    metric, split = case.metric, ready.split
    sign = 1.0 if ready.exact or metric == "l2" else -1.0

    def of(x: torch.Tensor, held: bool = False) -> Array:
        data = _first(split) if held else split.train
        values: Array = sign * quality(x, data, metric, ready.exact).numpy()
        return values

    return {
        "metric": "distance" if ready.exact else metric,
        "sign": sign,
        "threshold": sign * threshold(case, ready),
        "before": of(arms["none"].final),
        "after": of(arms["split"].final),
        "control": of(arms["none"].other),
        "before_held": of(arms["none"].final, True),
        "after_held": of(arms["split"].final, True),
    }


def case_rows(case: Case, arms: dict[str, Traced], found: dict[str, Any]) -> list[Row]:
    """The top-25 rule, paired differences, counts and losses, each with its control."""
    before, after, bar, sign = (found[k] for k in ("before", "after", "threshold", "sign"))
    improved, of = top_rule(after, before, bar)
    chance, of_chance = top_rule(found["control"], before, bar)
    gain = bootstrap(before - after)
    held = bootstrap(found["before_held"] - found["after_held"])
    name, metric = case.name, found["metric"]
    return [
        Row(
            f"{name}: best {TOP}, improved by splitting",
            f"{improved} of {of}",
            PUBLISHED["shen2026"]["top25_improved"],
            f"{chance} of {of_chance}",
        ),
        Row(
            f"{name}: samples within the threshold, with splitting",
            int((after < bar).sum()),
            chance=int((found["after_held"] < bar).sum()),
        ),
        Row(
            f"{name}: samples within the threshold, without",
            int((before < bar).sum()),
            chance=int((found["before_held"] < bar).sum()),
        ),
        Row(
            f"{name}: mean gain in {metric} by splitting, all samples",
            gain["mean"],
            chance=held["mean"],
            note=f"95% interval {gain['low']:.3g} to {gain['high']:.3g}; chance: held-out samples",
        ),
        Row(f"{name}: mean {metric} with splitting", float(sign * after.mean())),
        Row(
            f"{name}: final loss, without and with splitting",
            [arms["none"].best_loss, arms["split"].best_loss],
        ),
        Row(
            f"{name}: candidates at the start and at the end",
            [int(arms["none"].counts[0]), len(arms["split"].final)],
        ),
    ]


def pictures(
    case: Case, ready: Prepared, arms: dict[str, Traced], found: dict[str, Any]
) -> dict[str, Array]:
    """Arrays of one case: scatter, top images, curves, stories of the samples that gained most."""
    before, after, sign = found["before"], found["after"], found["sign"]
    kept = top_kept(after, before, found["threshold"])[:SHOWN] or [int(np.argmin(after))]
    gained = np.argsort(after - before)[:FOLLOWED]
    arrays: dict[str, Array] = {
        "before": sign * before,
        "after": sign * after,
        "kept": np.array(kept),
        "followed": gained,
        "followed_true": _shown(ready, ready.split.train.x[gained]),
        "top_true": _shown(ready, ready.split.train.x[kept]),
    }
    for arm, trace in arms.items():
        arrays |= {
            f"{arm}/steps": trace.steps.numpy(),
            f"{arm}/loss": trace.loss.numpy(),
            f"{arm}/counts": trace.counts.numpy(),
            f"{arm}/top": _shown(ready, trace.frames[-1][kept]),
            f"{arm}/best25": trace.distance.sort(dim=1).values[:, :TOP].mean(1).numpy(),
            f"{arm}/followed": trace.distance[:, gained].numpy(),
            f"{arm}/frame_steps": trace.frame_steps.numpy(),
            **{f"{arm}/story{k}": _shown(ready, trace.frames[:, i]) for k, i in enumerate(gained)},
        }
    return arrays


def _shown(ready: Prepared, images: torch.Tensor) -> Array:
    mean = ready.split.train.mean
    shape = ready.split.train.shape
    images = images.double().reshape(-1, *shape)
    return as_bytes(images if mean is None else images + mean.double())


def _first(split: Split) -> Any:
    """As many held-out samples as training samples."""
    n = len(split.train)
    return split.holdout.replace(x=split.holdout.x[:n], y=split.holdout.y[:n])
