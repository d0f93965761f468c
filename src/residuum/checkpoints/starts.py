"""The start of a network of scikit-learn: kept in the file, or drawn again from an integer seed.

Glorot's rule, layer after layer from one generator (``MLPClassifier._initialize``):

    W_l, b_l ~ U(-s, s),   s = sqrt(6 / (fan_in + fan_out)),  2 instead of 6 for logistic units

Without early stopping the estimator also keeps a copy of the start, under ``_best_coefs``.

A start is believed when it is proved: training moves W within the span of few samples, so most of the
start stays in W. Of two independent matrices of hd entries the cosine is 0 +- 1/sqrt(hd); the start has
one of many times that. Where W - c W0 shows fewer directions than W itself, that is said as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residuum.checkpoints.inert import Block, Thing
from residuum.checkpoints.inspection import noise_edge
from residuum.errors import CheckpointError

PROOF = 6.0  # standard deviations
MAX_VALUES = 50_000_000  # of a network whose start is drawn again
ROWS = 64
MAX_SPECTRUM = 1_000_000  # of a layer whose singular values are counted: half a second


@dataclass(frozen=True, eq=False)
class Start:
    """theta0 by our names; where it was found, why it is believed, and what to do about it."""

    theta0: dict[str, Tensor]
    where: str
    said: str
    remedy: str

    @property
    def values(self) -> int:
        """How many numbers it has."""
        return sum(t.numel() for t in self.theta0.values())


def layers_of(weights: Any, biases: Any) -> dict[str, Tensor] | None:
    """``coefs_`` and ``intercepts_`` by our names, (out, in); None where they are not there."""
    if not isinstance(weights, list) or not isinstance(biases, list):
        return None
    blocks = [w for w in weights if isinstance(w, Block)]
    others = [b for b in biases if isinstance(b, Block)]
    if not blocks or len(blocks) != len(others) or sum(b.numel for b in blocks) > MAX_VALUES:
        return None
    found: dict[str, Tensor] = {}
    for l, (weight, bias) in enumerate(zip(blocks, others, strict=True)):
        if len(weight.shape) != 2 or bias.shape != weight.shape[1:]:
            return None
        found[f"layers.{l}.weight"] = weight.tensor().T.contiguous()
        found[f"layers.{l}.bias"] = bias.tensor()
    return found


def drawn(shapes: list[tuple[int, int]], seed: int, activation: str) -> dict[str, Tensor]:
    """The start that scikit-learn draws for layers (out, in) from an integer ``random_state``."""
    random, found = np.random.RandomState(seed), {}
    for l, (fan_out, fan_in) in enumerate(shapes):
        bound = math.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
        weight = random.uniform(-bound, bound, (fan_in, fan_out))
        found[f"layers.{l}.weight"] = torch.from_numpy(weight.T.copy())
        found[f"layers.{l}.bias"] = torch.from_numpy(random.uniform(-bound, bound, fan_out))
    return found


def proved_start(estimator: Thing) -> Start | None:
    """The start of a fitted MLP in a pickle, where one is at hand and the weights bear it out."""
    said = estimator.attributes
    try:
        theta = layers_of(said.get("coefs_"), said.get("intercepts_"))
        kept = layers_of(said.get("_best_coefs"), said.get("_best_intercepts"))
    except CheckpointError:
        return None
    if theta is None:
        return None
    shapes = [tuple(t.shape) for t in theta.values() if t.ndim == 2]
    seed, activation = said.get("random_state"), said.get("activation")
    tries = list[tuple[str, str, dict[str, Tensor], str]]()
    if type(seed) is int and 0 <= seed < 2**32 and isinstance(activation, str):
        again = drawn(shapes, seed, activation)  # type: ignore[arg-type]
        remedy = "Fit with random_state=None; before saving: model.random_state = None."
        tries.append(("random_state", "drawn again from random_state", again, remedy))
    if kept is not None and not said.get("early_stopping"):
        remedy = "Before saving: del model._best_coefs, model._best_intercepts."
        tries.append(("_best_coefs", "kept in _best_coefs", kept, remedy))
    for where, how, start, remedy in tries:
        if (proof := bears_out(theta, start)) is not None:
            return Start(start, where, f"{how}, {proof}", remedy)
    return None


def bears_out(theta: dict[str, Tensor], start: dict[str, Tensor]) -> str | None:
    """Why ``start`` is that of ``theta``, None where it is not or where they are equal."""
    now, then = theta["layers.0.weight"], start["layers.0.weight"].to(theta["layers.0.weight"])
    if now.shape != then.shape or not bool(now.isfinite().all()) or torch.equal(now, then):
        return None
    inner, squares = _inner(now, then), _inner(then, then)
    cosine = inner / max((_inner(now, now) * squares) ** 0.5, 1e-30)
    deviations = cosine * math.sqrt(now.numel())
    if not deviations > PROOF:
        return None
    text = f"cosine {cosine:.2f} with the weights ({deviations:.0f} standard deviations)"
    kept = inner / max(squares, 1e-30)
    if min(now.shape) > 2 and now.numel() <= MAX_SPECTRUM:
        before = noise_edge(_spectrum(now), *now.shape)[0]
        after = noise_edge(_spectrum(now - kept * then), *now.shape)[0]
        text += f"; W - {kept:.2f} W0 shows {after} directions, W shows {before}"
    return text


def _inner(a: Tensor, b: Tensor) -> float:
    """<a, b> in float64, a few rows at a time: a scan has little memory."""
    parts = zip(a.split(ROWS), b.split(ROWS), strict=True)
    return sum(float((x.double() * y.double()).sum()) for x, y in parts)


def _spectrum(weight: Tensor) -> Tensor:
    """Singular values, largest first, from the smaller Gram matrix, likewise."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for part in tall.split(ROWS):
        gram += part.double().T @ part.double()
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()
