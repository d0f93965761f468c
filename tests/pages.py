"""Report pages for tests: real digits as pictures, made-up attacks around them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from residuum.report.page import (
    CERTIFIED,
    INCONCLUSIVE,
    LEAK,
    NO_LEAK_FOUND,
    AttackRow,
    Control,
    Figure,
    Granted,
    Item,
    MetricRow,
    Page,
    Residuals,
    Verdict,
)

HOSTILE = (
    "<script>document.title='pwned'</script>",
    "\"'><img src=x onerror=document.title='pwned'>",
    "cat\u202egnp.exe\u2066\u200f",
    "</style></script><!--",
    "{{ 7*7 }} ${7*7}",
    "שלום 123 مرحبا",
    "line\nbreak\x00\x1b[31m\ud800",
)
SUBSETS = 40


def ncc(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


@cache
def digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    kept = np.random.default_rng(seed).permutation(len(images))[:count]
    return images[kept].reshape(-1, 1, 8, 8) / 16, labels[kept]


def samples(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Digits where they fit, enlarged where they are smaller; random vectors otherwise."""
    rng = np.random.default_rng(seed)
    small, labels = digits(count, seed)
    if len(shape) != 3:
        return rng.normal(size=(count, *shape)), labels
    side = shape[-1]
    rows = np.arange(side) * 8 // side
    image = small[:, :, rows][:, :, :, rows].repeat(shape[0], 1)
    tint = rng.uniform(0.3, 1, size=(count, shape[0], 1, 1)) if shape[0] > 1 else 1.0
    return image * tint, labels


def page(
    count: int = 60,
    shape: tuple[int, ...] = (1, 8, 8),
    outcome: str = LEAK,
    names: tuple[str, ...] = (),
    seed: int = 0,
    **changes: Any,
) -> Page:
    """A report of an attack that got a third of the samples, or none without a leak.

    names: hostile ones, wherever text goes; changes: other fields of the page.
    """
    rng = np.random.default_rng(seed)
    x, labels = samples(count, shape, seed)
    got = (np.arange(count) % 3 == 0) & (outcome == LEAK)
    noise = np.where(got, 0.25, 2.2).reshape(-1, *[1] * len(shape))
    found = (x + noise * rng.normal(size=x.shape) * x.std()) if count else x
    scores = np.array([ncc(a, b) for a, b in zip(found, x, strict=True)])
    null = rng.normal(0.42, 0.1, size=SUBSETS * max(count, 1)).clip(-1, 0.98)
    threshold = float(np.quantile(null, 0.99))
    order = np.argsort(-scores)
    called = [names[i % len(names)] if names else f"digit {labels[i]}" for i in range(count)]
    items = tuple(
        _item(i, found[i], x[i], called[i], scores[i], bool(scores[i] > threshold), rng)
        for i in order
    )
    recovered = int((scores > threshold).sum())
    control = Control("ncc", scores, null, threshold, SUBSETS, outputs=rng.normal(0, 1.2, count),
                      labels=tuple(f"label {'+' if v % 2 else '-'}1" for v in labels))  # fmt: skip
    given: dict[str, Any] = {
        "subject": names[0] if names else "digits-mlp.safetensors",
        "verdict": Verdict(outcome, count, recovered, 0.6, (max(recovered - 6.2, 0), recovered + 7.4),
                           0.002 if outcome == LEAK else 0.41, "ncc", _reasons(outcome)),
        "created": "2026-03-04 09:30 UTC", "description": "mlp:64-1000-1000-1, binary classifier",
        "shape": shape, "items": items, "control": control if count else None,
        **_around(names),
    }  # fmt: skip
    return Page(**given | changes)


def without_data(count: int = 24) -> Page:
    """Candidates alone: no match, no control."""
    full = page(count)
    items = tuple(
        Item(number=k, found=item.found, confidence=item.confidence, support=item.support,
             restarts=item.restarts, multiplier=item.multiplier, attack=item.attack,
             certificate=item.certificate, determined_energy=item.determined_energy,
             determined_at_least=item.determined_at_least)
        for k, item in enumerate(full.items)
    )  # fmt: skip
    verdict = Verdict(INCONCLUSIVE, reasons=("No held-out control was given.",))
    return page(0, items=items, verdict=verdict, metrics=(), shape=(1, 8, 8))


def _reasons(outcome: str) -> tuple[str, ...]:
    return {
        LEAK: ("The count exceeds chance by a permutation test at 1%.",
               "Two attacks were run; binary-kkt brought back the matches."),
        NO_LEAK_FOUND: ("The attack converged: its first-layer residual is 0.004, limit 0.1.",),
        INCONCLUSIVE: ("The first-layer residual is 0.93, above its limit of 0.1.",),
    }[outcome]  # fmt: skip


def _item(i: int, found: np.ndarray, sample: np.ndarray, label: str, score: float, recovered: bool,
          rng: np.random.Generator) -> Item:  # fmt: skip
    energy = float(rng.uniform(0.2, 1))
    status = CERTIFIED[0 if energy > 0.8 else 1 if energy > 0.4 else 2]
    known = i % 2 == 0
    return Item(
        number=int(i), found=found, nearest=sample, label=label, attack="binary-kkt",
        scores={"ncc": score, "l2": float(np.linalg.norm(found - sample)), "ssim3": score**2},
        recovered=recovered, margin=float(rng.gamma(2)), output=float(rng.normal()),
        confidence=float(np.clip(score + rng.normal(0, 0.08), 0, 1)), support=int(rng.integers(1, 9)),
        restarts=8, multiplier=float(rng.gamma(1)), determined_energy=energy if known else None,
        determined_at_least=energy - 0.02 if known else None,
        radius=float(rng.gamma(1)) if known else None, certificate=status if known else "",
        ambiguity=rng.uniform(0, 1 - energy, sample.shape) if known else None,
    )  # fmt: skip


def _around(names: tuple[str, ...]) -> dict[str, Any]:
    """Everything but the samples."""
    layer = names or ("layers.0.weight", "layers.1.weight", "layers.2.weight")
    steps = np.arange(0, 20001, 100)
    decay = np.exp(-steps / 4000)
    noise = np.random.default_rng(5).lognormal(0, 0.2, size=(4, len(steps)))
    curves = {name: (0.004 + decay * 0.9 if k == 0 else 1 - 0.1 * k + 0 * decay) * noise
              for k, name in enumerate(layer[:3])}  # fmt: skip
    return {
        "metrics": (
            MetricRow("ncc", "normalised cross-correlation, one-to-one", True, 20, 0.6, 0.002,
                      0.655, None, None, None, 0.991),
            MetricRow("ssim3", "structural similarity, mean added", False, 17, 0.5, 0.002, 0.41,
                      0.4, 19, 2, 0.98),
            MetricRow("l2", "Euclidean distance", False, 16, 0.6, 0.0005, 1.2, best=0.3,
                      higher_is_better=False),
        ),
        "residuals": (Residuals("binary-kkt", steps, curves, 0.1),),
        "knowledge": (
            Granted("shape", "(1, 8, 8)", "user"), Granted("value range", "0 to 1", "user"),
            Granted("mean", names[2 % len(names)] if names else "64 values", "train"),
        ),
        "attacks": (
            AttackRow("binary-kkt", True, "homogeneous of order 3: training to zero loss leads to a "
                      "KKT point", 8, "finished", 480, 0.0041, 41.2),
            AttackRow("first-layer-weights", True, "baseline", 1, "finished", 1000, None, 0.1),
            AttackRow("multiclass-kkt", False, "needs two or more outputs; this network has 1"),
            AttackRow("ntk", False, "needs the initial weights; grant them with --init"),
        ),
        "certificate": (
            Figure("residual", 0.0312, "distance to a KKT point, share of the weights' norm"),
            Figure("margin", 1.0, "least output of a training sample with the right sign"),
            Figure("directions of the first layer", 12, "above the noise edge"),
            Figure("status", "approximate KKT point"),
        ),
        "assumptions": ("The network was trained to zero training error without early stopping.",
                        "Held-out samples come from the distribution of the training set."),
        "limitations": ("Only the attacks listed here were run, inside a budget of 10 minutes.",
                        "A stronger prior on images could bring back more."),
        "settings": {"budget": "10min", "seed": 0, "attack": {"steps": 20000, "restarts": 8,
                     "prior": None, "value_range": (0, 1)}, "path": names[1] if names else "runs/a"},
        "environment": {"python": "3.11.9", "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
                        "device": "x86_64", "threads": 2},
        "hashes": {"checkpoint": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                   "data": "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752"},
    }  # fmt: skip
