"""One trained network on images, attacked and scored: what most figures and tables are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.attacks import PRESETS, AttackConfig
from residuum.checkpoints import build_model
from residuum.evaluation import score
from residuum.networks import Architecture
from residuum.records import Knowledge, Scores, Split
from residuum.reproduce.context import Context
from residuum.reproduce.outcome import Array
from residuum.reproduce.victims import Victim, attacked, figures_of, victim
from residuum.training import TrainingConfig

SHOWN = 45  # images of a published grid
SUBSETS = 300
OURS = AttackConfig(steps=8000, restarts=2)
RELEASED = {  # the released runs of Haim et al. 2022 by dataset; their candidates are pooled
    "cifar10": ("haim2022-cifar-b9dfyspx", "haim2022-cifar-k60fvjdy"),
    "mnist": ("haim2022-mnist-kcf9bhbi", "haim2022-mnist-rbijxft7"),
}


@dataclass(frozen=True)
class ImageRun:
    """A victim and its attack at the paper's size.

    training: what differs from training to the margin; published_steps: gradient steps of the paper
    where it is trained as published; box: whether value range and mean are granted; initial: whether
    the initial weights are; metric: what matches are ranked by.
    """

    name: str
    data: str
    n: int
    hidden: tuple[int, ...] = (1000, 1000)
    bias: str = "first"
    task: str = "binary"
    training: dict[str, Any] = field(default_factory=dict)
    attack: AttackConfig = OURS
    box: bool = False
    initial: bool = False
    metric: str = "ssim3"

    @property
    def metrics(self) -> tuple[str, ...]:
        """All that are computed; NCC decides."""
        return tuple(dict.fromkeys(("ncc", "ssim3", self.metric)))


@dataclass(frozen=True)
class Performed:
    """A run at some scale: data, victim, candidates and scores by the name of the attack."""

    run: ImageRun
    split: Split
    victim: Victim
    candidates: dict[str, Tensor]
    scores: dict[str, Scores]
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """The attack shown where there is room for one: residuum's own."""
        return "residuum" if "residuum" in self.scores else next(iter(self.scores))


def trained(context: Context, run: ImageRun) -> tuple[Split, Victim]:
    """The data and the victim of a run."""
    scale = context.scale
    split = scale.split(run.data, run.n, context.root, context.seed, run.task)
    outputs = 10 if run.task == "multiclass" else 1
    widths = (split.train.x[0].numel(), *scale.hidden(run.hidden), outputs)
    arch = "mlp:" + "-".join(map(str, widths))
    arch += f",bias={run.bias}" if run.bias != "first" else ""
    return split, victim(context, arch, split.train, training_of(context, run), run.task)


def training_of(context: Context, run: ImageRun) -> TrainingConfig:
    """Settings of the training at this scale."""
    scale, changes = context.scale, dict(run.training)
    if changes.get("method", "margin") == "margin":
        changes["steps"] = scale.training
    else:
        changes["steps"] = min(changes.get("steps", scale.descent), scale.descent)
        changes["lr"] = changes.get("lr", 0.01) * scale.rate
    if changes.get("batch"):
        changes["batch"] = max(4, changes["batch"] * scale.n(run.n) // run.n)
    return TrainingConfig(**{"dtype": "float32", "seed": context.seed, **changes})


def perform(context: Context, run: ImageRun, attacks: Sequence[str] = ("residuum",)) -> Performed:
    """Train or load, attack, score. attacks: residuum, published, model-inversion, weights."""
    split, net = trained(context, run)
    known = knowledge_of(run, split, net)
    candidates, scores, seconds = {}, {}, {}
    for name in attacks:
        found = [attacked(context, net.checkpoint, known, c) for c in settings(context, run, name)]
        x = torch.cat([one.x for one in found]).double()
        candidates[name], seconds[name] = x, sum(one.seconds for one in found)
        scores[name] = scored(x, split, net, run.metrics)
    return Performed(run, split, net, candidates, scores, seconds)


def knowledge_of(run: ImageRun, split: Split, net: Victim) -> Knowledge:
    """What the attacker of a run is granted."""
    return Knowledge(
        shape=split.train.shape,
        value_range=(0.0, 1.0) if run.box else None,
        mean=split.train.mean if run.box else None,
        theta0=net.theta0 if run.initial else None,
    )


def settings(context: Context, run: ImageRun, name: str) -> list[AttackConfig]:
    """The attacks whose candidates are pooled under a name, at this scale."""
    scale, n = context.scale, context.scale.n(run.n)
    if name == "residuum":
        m = run.attack.candidates if n == run.n and run.attack.candidates else 2 * n
        return [
            replace(
                run.attack,
                candidates=m,
                steps=scale.attack_steps(run.attack.steps),
                seed=context.seed,
                restarts=min(run.attack.restarts, scale.restarts),
                dtype=context.fast,
            )
        ]
    if name == "published":
        return [
            replace(
                PRESETS[preset],
                candidates=2 * n,
                steps=scale.attack_steps(50_000),
                dtype=context.fast,
            )
            for preset in RELEASED[run.data]
        ]
    count = max(50, round(1000 * scale.width))
    preset = {"weights": "first-layer-weights"}.get(name, name)
    return [replace(PRESETS[preset], candidates=count, dtype="float32", seed=context.seed)]


def scored(x: Tensor, split: Split, net: Victim, metrics: Sequence[str]) -> Scores:
    """Against the held-out control, with the margins that a scatter plot needs."""
    with torch.no_grad():
        outputs = build_model(net.checkpoint).double()(split.train.x.double())
    return score(
        x,
        split.train,
        split.holdout,
        metrics=metrics,
        outputs=outputs,
        subsets=SUBSETS,
    )


def counts(scores: Scores, metric: str) -> dict[str, Any]:
    """The figures of one metric that tables print, held-out counts beside."""
    found = scores.metrics[metric]
    return {
        "recovered": found.recovered,
        "threshold": found.threshold_null99,
        "expected_by_chance": found.expected_by_chance,
        "p_value": found.p_value,
        "above": found.above_published_threshold,
        "above_holdout": found.above_published_threshold_holdout,
        "best": found.best,
        "top10_mean": found.top10_mean,
        "median": found.median,
    }


def losses(done: Performed) -> dict[str, float]:
    """Train and test loss and accuracy of the victim."""
    loss = done.run.training.get("loss", "")
    parts = (("train", done.split.train), ("test", done.split.holdout))
    return {
        f"{name}_{what}": value
        for name, data in parts
        for what, value in figures_of(done.victim.checkpoint, data, loss).items()
    }


def details(done: Performed) -> dict[str, Any]:
    """Everything a table or a reader may want of one run, as plain values."""
    arch = Architecture.parse(done.victim.checkpoint.arch)
    return {
        "data": done.split.train.name,
        "metric": done.run.metric,
        "n": len(done.split.train),
        "held_out": len(done.split.holdout),
        "arch": str(arch),
        "victim": done.victim.summary,
        **losses(done),
        "attacks": {
            name: {
                "candidates": len(done.candidates[name]),
                "seconds": done.seconds[name],
                **{metric: counts(scores, metric) for metric in scores.metrics},
            }
            for name, scores in done.scores.items()
        },
    }


def shown(
    done: Performed, name: str, metric: str | None = None, count: int = SHOWN
) -> dict[str, Array]:
    """Best matches of every sample, best first: found, true, score; images with the mean added."""
    metric = metric or done.run.metric
    scores, train = done.scores[name], done.split.train
    sign = -1.0 if scores.metrics[metric].higher_is_better else 1.0
    matches = [(row.index, row.matches[metric]) for row in scores.per_sample]
    best = sorted(
        (sign * match.nearest, index, match.nearest_candidate)
        for index, match in matches
        if match.nearest is not None and match.nearest_candidate is not None
    )[:count]
    mean = 0.0 if train.mean is None else train.mean.double()
    found = done.candidates[name].reshape(-1, *train.shape)[[c for _, _, c in best]]
    return {
        "found": as_bytes(found + mean),
        "true": as_bytes(train.x[[i for _, i, _ in best]].double() + mean),
        "score": np.array([sign * value for value, _, _ in best], dtype=np.float32),
    }


def against_output(done: Performed, name: str, metric: str | None = None) -> dict[str, Array]:
    """Score and network output of every training sample, and whether it was recovered."""
    metric, scores = metric or done.run.metric, done.scores[name]
    with torch.no_grad():
        outputs = build_model(done.victim.checkpoint).double()(done.split.train.x.double())
    rows = scores.per_sample
    return {
        "output": outputs[:, 0].float().numpy(),
        "score": np.array([_or_nan(row.matches[metric].nearest) for row in rows], dtype=np.float32),
        "recovered": np.array([bool(row.recovered) for row in rows]),
        "margin": np.array([_or_nan(row.margin) for row in rows], dtype=np.float32),
    }


def prefixed(name: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """Arrays of one part of a figure, under its name."""
    return {f"{name}/{key}": value for key, value in arrays.items()}


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def as_bytes(images: Tensor) -> Array:
    """Images as bytes, each stretched to its own range as published figures are."""
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    stretched = (flat - low) / (high - low).clamp(min=1e-12)
    array: Array = (255 * stretched).round().to(torch.uint8).reshape(images.shape).numpy()
    return array
