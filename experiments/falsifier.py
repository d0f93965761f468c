"""Does a training set exist that violates the uniqueness certificate?

    python -m experiments.falsifier

The search knows the claims of the certificate but not its method. Every set is checked from scratch:
patterns by a forward pass, value range, signs, and the sum of all gradients by automatic differentiation. A
set inside the class has the labels and patterns of the candidates and the same sum. If such a set breaks a
claim by more than 1e-6, that is a violation. There are three searches:

    random search        random directions, towards zero and along differences of candidates, as far as the
                         walls allow, with the share or more
    projected gradient   of the image's energy down and of its distance up, with projections by least distance
                         programming (Lawson and Hanson; NNLS, an active-set method)
    vertices             of the polytope of all images that can carry the weight, by linear programs

Outside the class there must be violations. Examples are an image with a new pattern, active where two
groups are (``two_groups``), and a pair of opposite labels that cancels (``canceling_pair``). Results:
``experiments/results/falsifier-cpu.json``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog, nnls
from torch import Tensor

from experiments.report import Report, only_on, run_experiment
from experiments.timing import threads
from papers.points import relu_point
from residuum.datasets import load_dataset
from residuum.networks.network import Network
from residuum.records import Uniqueness
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.uniqueness import uniqueness
from residuum.training import TrainingConfig, train

SHARES = (0.5, 0.3, 0.1, 0.02)
BEYOND = 1e-6  # what counts as a violation, of an energy share or of |x|
SAME = 1e-9  # of the target: what the sum of gradients may change
TRUST = 1 - 1e-7  # how far of the way to a wall is gone
DIRECTIONS, VERTICES, CLIMBS = 24, 4, 4
CLOSED = 1e-12  # of a wall: an image on it counts as inside, patterns are judged afterwards
Array = np.ndarray[Any, Any]
Box = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Alternative:
    """Images that replace candidates, with (k, C) multipliers times covectors ``u``."""

    replaced: Array
    x: Array
    lam: Array
    u: Array
    labels: Array


@dataclass
class Outcome:
    """The largest violation of each claim (negative: none), and how near an example came to a bound."""

    tried: int = 0
    refused: int = 0
    energy: float = -np.inf
    full: float = -np.inf
    radius: float = -np.inf
    pixel: float = -np.inf
    gaps: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """Return the largest violation of any claim."""
        return max(self.energy, self.full, self.radius, self.pixel)

    def join(self, other: Outcome) -> None:
        """Add another outcome to this one."""
        self.tried, self.refused = self.tried + other.tried, self.refused + other.refused
        for name in ("energy", "full", "radius", "pixel"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.gaps += other.gaps


class Falsifier:
    """Search for sets around the candidates of a set, within its value range."""

    def __init__(self, candidates: KKTSet, box: Box, seed: int = 0) -> None:
        keep = candidates.lam > 1e-9 * candidates.lam.max()
        self.given, self.rng = candidates, np.random.default_rng(seed)
        self.model = candidates.models[0]
        self.x = candidates.x[keep].flatten(1).numpy()
        self.u = candidates.u[keep, 0].numpy()
        self.lam, self.y = candidates.lam[keep].numpy(), candidates.y[keep].numpy()
        self.pattern = self.patterns(self.x)
        self.low, self.high = (-np.inf, np.inf) if box is None else self._ends(box)
        self.size = float(torch.cat([t.flatten() for t in candidates.target.values()]).norm())
        same = [
            (self.pattern == p).all(1) & (self.y == y)
            for p, y in zip(self.pattern, self.y, strict=True)
        ]
        self.group = np.array([int(np.argmax(s)) for s in same])
        self.margin = self.margins(self.x, self.y).min()

    def _ends(self, box: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
        low, high = (
            torch.as_tensor(e, dtype=torch.float64).expand(self.given.x.shape[1:]).flatten().numpy()
            for e in box
        )
        return np.minimum(low, self.x.min(0)), np.maximum(high, self.x.max(0))

    def shaped(self, x: Array) -> Tensor:
        """Return flat images in the shape of the network's input."""
        return torch.as_tensor(x).reshape(len(x), *self.given.x.shape[1:])

    @torch.no_grad()
    def pre(self, x: Array) -> Array:
        """Return the (n, K) pre-activations of all hidden layers."""
        return torch.cat(self.model.trace(self.shaped(x)).pre[:-1], 1).numpy()

    def patterns(self, x: Array) -> Array:
        """Return the (n, K) signs of the pre-activations."""
        return self.pre(x) > 0

    @torch.no_grad()
    def margins(self, x: Array, y: Array) -> Array:
        """Return the least margin of each sample, (n,)."""
        out = self.model(self.shaped(x)).numpy()
        if out.shape[1] == 1:
            return y * out[:, 0]
        own_output = out[np.arange(len(y)), y.astype(int)]
        out[np.arange(len(y)), y.astype(int)] = -np.inf
        return own_output - out.max(1)

    def gradient(self, x: Array, u: Array) -> Array:
        """Return the sum of the gradients of <u_i, Phi(x_i)>, (P,)."""
        theta = [p.requires_grad_(True) for p in self.model.parameters()]
        value = (self.model(self.shaped(x)) * torch.as_tensor(u)).sum()
        gradients = torch.autograd.grad(value, theta)
        return torch.cat([p.flatten() for p in gradients]).numpy()

    def cell(self, i: int) -> tuple[Array, Array]:
        """Return A and b with A x >= b for the closed cell of candidate i and the value range."""
        x = torch.as_tensor(self.x[i])

        def pre(z: Tensor) -> Tensor:
            return torch.cat(self.model.trace(z.reshape(1, *self.given.x.shape[1:])).pre[:-1], 1)[0]

        slope = torch.autograd.functional.jacobian(pre, x).numpy()
        side = np.where(self.pattern[i], 1.0, -1.0)
        a, b = side[:, None] * slope, side * (slope @ self.x[i] - pre(x).detach().numpy())
        eye, ends = np.eye(len(self.x[i])), []
        for sign, end in ((1, self.low), (-1, self.high)):
            if np.isfinite(end).all():
                ends.append((sign * eye, sign * end))
        a, b = (
            np.concatenate([a, *(e for e, _ in ends)]),
            np.concatenate([b, *(e for _, e in ends)]),
        )
        size = np.linalg.norm(a, axis=1)
        seen = size > 0
        return a[seen] / size[seen, None], b[seen] / size[seen]

    def carriers(self, i: int, share: float) -> tuple[Array, Array]:
        """Return rows of all x' that carry share lam_i: x' in K, (M - w x') / (L - w) in K."""
        a, b = self.cell(i)
        members = self.members(i)
        w, mass, moment = self._sums(members, share * self.lam[i])
        ratio = (mass - w) / w  # rows of length one
        return np.concatenate([a, -a]), np.concatenate([b, ratio * b - a @ moment / w])

    def members(self, i: int) -> Array:
        """Return the candidates that may be rearranged with i: its group, or i if rivals differ."""
        group = np.flatnonzero(self.group == self.group[i])
        shares = self.u[group] / self.lam[group, None]
        return group if np.ptp(shares, axis=0).max() < 1e-9 else np.array([i])

    def _sums(self, members: Array, w: float) -> tuple[float, float, Array]:
        return w, self.lam[members].sum(), self.lam[members] @ self.x[members]

    def set_with(self, i: int, image: Array, w: float) -> Alternative:
        """Return the set in which ``image`` carries w and a second image the remainder of the group."""
        members = self.members(i)
        _, mass, moment = self._sums(members, w)
        images = np.stack([image, (moment - w * image) / (mass - w)])
        lam = np.array([w, mass - w])
        return Alternative(
            members, images, lam, lam[:, None] * self.u[i] / self.lam[i], np.repeat(self.y[i], 2)
        )

    def in_class(self, alternative: Alternative) -> bool:
        """Check signs, labels, patterns, value range and the sum of gradients, all computed anew."""
        cells = {(p.tobytes(), float(y)) for p, y in zip(self.pattern, self.y, strict=True)}
        own_cells = zip(self.patterns(alternative.x), alternative.labels, strict=True)
        if (alternative.lam < 0).any() or any(
            (p.tobytes(), float(y)) not in cells for p, y in own_cells
        ):
            return False
        if (alternative.x < self.low - CLOSED).any() or (alternative.x > self.high + CLOSED).any():
            return False
        return self.same_sum(alternative)

    def in_cell(self, i: int, image: Array) -> bool:
        """Return True if an image has the pattern of candidate i and lies in the value range."""
        inside = (image >= self.low - CLOSED).all() and (image <= self.high + CLOSED).all()
        return bool(inside and (self.patterns(image[None])[0] == self.pattern[i]).all())

    def same_sum(self, alternative: Alternative) -> bool:
        """Return True if the whole set has the sum of gradients of the candidates."""
        x = np.concatenate([self.x[alternative.replaced], alternative.x])
        u = np.concatenate([-self.u[alternative.replaced], alternative.u])
        return bool(np.linalg.norm(self.gradient(x, u)) <= SAME * self.size)

    def images(self, i: int, a: Array, b: Array) -> Iterator[Array]:
        """Yield images with a x >= b, as far from candidate i as each method brings them."""
        x, d = self.x[i], self.x.shape[1]
        slack = np.maximum(a @ x - b, 0) + CLOSED

        def along(v: Array) -> Array:
            rate = a @ v
            steps = np.where(rate < 0, -slack / np.minimum(rate, -1e-300), np.inf)
            return x + TRUST * min(max(float(steps.min()), 0.0), 1e6) * v

        def inside(z: Array) -> Array:
            step = z - x
            reach = a @ step
            room = np.where(reach < 0, -slack / np.minimum(reach, -1e-300), np.inf).min()
            return x + TRUST * min(1.0, max(float(room), 0.0)) * step

        unit = x / max(np.linalg.norm(x), 1e-300)
        for _ in range(DIRECTIONS):
            v = self.rng.standard_normal(d)
            v = v / np.linalg.norm(v) - self.rng.choice([0.0, 1.0, 3.0]) * unit
            yield along(v / np.linalg.norm(v))
        yield along(-unit)
        for j in np.flatnonzero(self.group == self.group[i]):
            if j != i:
                yield along((self.x[j] - x) / np.linalg.norm(self.x[j] - x))
        best = x
        for rate in (0.1, 0.5, 0.5):  # gradient of |x'|^2 is 2 x': a rate of 1/2 aims at zero
            best = inside(project(a, b, best - 2 * rate * best))
            yield best
        distant = along(self.rng.standard_normal(d))
        for _ in range(CLIMBS):
            distant = inside(project(a, b, x + 3 * (distant - x)))
            yield distant
        for _ in range(VERTICES):
            for sign in (1, -1):
                c = sign * self.rng.standard_normal(d)
                if self.rng.random() < 0.5:
                    c = sign * np.eye(d)[self.rng.integers(d)]
                program = linprog(c, -a, -b, bounds=(None, None), method="highs")
                if program.status == 0:
                    yield inside(program.x)

    def attack(self, i: int, share: float, claims: dict[str, Any]) -> Outcome:
        """Try every image against the claims of candidate i: at_least, full, radius, low, high.

        If sums are not fixed, the claims are about every image of the cell, whatever its set.

        Args:
            i: Index of the candidate.
            share: Share of the weight that the image carries at least.
            claims: Claims by name.

        Returns:
            The largest violations.
        """
        x, outcome, best = self.x[i], Outcome(), 1.0
        size = float(np.linalg.norm(x))
        tries = [(image, True) for image in self.images(i, *self.carriers(i, share))]
        if not claims.get("pinned", True):
            tries += [(image, False) for image in self.images(i, *self.cell(i))]
        for image, written in tries:
            alternative = self.set_with(i, image, share * self.lam[i])
            outcome.tried += 1
            if not (self.in_class(alternative) if written else self.in_cell(i, image)):
                outcome.refused += 1
                continue
            energy = float(image @ image) / size**2
            best = min(best, energy) if written else best
            over = np.maximum(image - claims["high"], claims["low"] - image).max()
            broken = {
                "energy": claims["at_least"] - energy,
                "radius": (np.linalg.norm(image - x) - claims["radius"]) / size,
                "pixel": over / size,
            }
            if (
                written
                and self.margins(alternative.x, alternative.labels).min() >= self.margin - 1e-12
            ):
                broken["full"] = claims["full"] - energy
            for name, value in broken.items():
                setattr(outcome, name, max(getattr(outcome, name), float(value)))
        outcome.gaps.append(best - claims["at_least"])
        return outcome

    def check(self, certificate: Uniqueness, indices: range | None = None) -> Outcome:
        """Try the claims of a certificate about all candidates, or about some of them."""
        total = Outcome()
        for k in indices if indices is not None else range(len(certificate)):
            claims = {
                "at_least": float(certificate.determined_at_least[k]),
                "full": float(certificate.full_at_least[k]),
                "radius": float(certificate.radius_most[k]),
                "low": certificate.low[k].flatten().numpy(),
                "high": certificate.high[k].flatten().numpy(),
                "pinned": bool(certificate.pinned[k]),
            }
            total.join(self.attack(k, certificate.share, claims))
        return total


def project(a: Array, b: Array, point: Array) -> Array:
    """Return the nearest x with a x >= b: min |z| s.t. a z >= b - a point, by NNLS."""
    h = b - a @ point
    scale = max(float(np.abs(h).max()), 1e-300)
    system = np.concatenate([a.T, h[None] / scale])
    goal = np.zeros(len(system))
    goal[-1] = 1
    residual = system @ nnls(system, goal, maxiter=50 * system.shape[1])[0] - goal
    return point - scale * residual[:-1] / min(residual[-1], -1e-300)


def pair_bound(falsifier: Falsifier, i: int) -> float:
    """Return a weaker bound, the least energy share of equal pairs x + a and x - a."""
    a, b = falsifier.cell(i)
    x = falsifier.x[i]
    rows, ends = np.concatenate([a, -a]), np.concatenate([b - a @ x, b - a @ x])
    z = project(rows, ends, -x)
    return float((x + z) @ (x + z)) / float(x @ x)


def two_groups(falsifier: Falsifier, share: float) -> tuple[float, int, Alternative] | None:
    """Return an image outside the class, active on the neurons of two groups of one label.

    With two layers and disjoint neurons, its gradient is the sum of the gradients of images of both groups.
    Both groups thus lose w of their mass and w x' of their moment.

    Returns:
        The least energy share, the candidate that it replaces, and the set, which has the same sum.
    """
    best: tuple[float, int, Alternative] | None = None
    f = falsifier
    for i, j in itertools.permutations(sorted(set(f.group.tolist())), 2):
        if f.y[i] != f.y[j] or (f.pattern[i] & f.pattern[j]).any():
            continue
        layer = f.model.linears[0]
        weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        side = np.where(f.pattern[i] | f.pattern[j], 1.0, -1.0)
        w = share * f.lam[i]
        a, b = [side[:, None] * weight], [-side * bias]
        rests = []
        for g in (i, j):
            members = np.flatnonzero(f.group == g)
            rows, ends = f.cell(g)
            _, mass, moment = f._sums(members, w)
            a, b = [*a, -w * rows], [*b, (mass - w) * ends - rows @ moment]
            rests.append((members, mass, moment))
        start = np.zeros(f.x.shape[1])
        image = project(np.concatenate(a), np.concatenate(b) + 1e-9, start)
        images = [image] + [(moment - w * image) / (mass - w) for _, mass, moment in rests]
        lam = np.array([w] + [mass - w for _, mass, _ in rests])
        program = Alternative(
            np.concatenate([members for members, _, _ in rests]),
            np.stack(images),
            lam,
            lam[:, None] * f.y[i],
            np.repeat(f.y[i], 3),
        )
        energy = float(image @ image / (f.x[i] @ f.x[i]))
        new = (f.patterns(image[None])[0] == (f.pattern[i] | f.pattern[j])).all()
        if new and f.same_sum(program) and (best is None or energy < best[0]):
            best = energy, int(i), program
    return best


def canceling_pair(falsifier: Falsifier, i: int) -> tuple[float, Alternative]:
    """Return a pair outside the class: the least image of the cell with both labels."""
    f = falsifier
    a, b = f.cell(i)
    nearest = project(a, b, np.zeros(f.x.shape[1]))
    image = f.x[i] + TRUST * (nearest - f.x[i])
    lam = np.repeat(f.lam[i], 3)
    labels = np.array([f.y[i], f.y[i], -f.y[i]])
    pair = Alternative(
        np.array([i]), np.stack([f.x[i], image, image]), lam, (lam * labels)[:, None], labels
    )
    return float(image @ image / (f.x[i] @ f.x[i])), pair


def exact_points() -> Iterator[tuple[str, KKTSet, dict[str, Box]]]:
    """Yield twenty binary points of two to four layers and ten points of several classes."""
    from tests.cases import multiclass_point

    for seed in range(20):
        depth, groups, size = 2 + seed % 3, 2 + seed % 4, 2 + seed % 3
        point = relu_point(depth, groups, size, dim=groups + size + 2 + seed % 5, seed=seed)
        yield "relu", point.set, _boxes(point.x)
    for seed in range(10):
        classes, size = 3 + seed % 3, 2 + seed % 2
        point = multiclass_point(classes, size, dim=classes + size + 3, seed=seed)
        yield (
            "classes",
            KKTSet.from_samples(point.model, point.x, point.y, point.lam),
            _boxes(point.x),
        )


def _boxes(x: Tensor) -> dict[str, Box]:
    mean = x.mean(0)  # a granted mean: the range is that of x + mean, moved by it
    raw = x + mean
    ends = (raw.min() - 0.5, raw.max() + 0.5)
    return {
        "none": None,
        "box": (x.min() - 1, x.max() + 1),
        "mean": (ends[0] - mean, ends[1] - mean),
    }


ARCHES = ("mlp:64-100-1", "mlp:64-60-60-1", "mlp:64-40-1", "mlp:64-30-30-30-1")


def train_network(seed: int, samples: int = 20, steps: int = 1000) -> tuple[KKTSet, dict[str, Box]]:
    """Return a network trained on digits, and its samples with the best multipliers."""
    center = seed % 2 == 0
    data = load_dataset("digits", samples, seed=seed, center=center).train
    arch = ARCHES[seed // 2 % len(ARCHES)]
    state = train(arch, data, TrainingConfig(steps=steps, seed=seed))
    model = Network(state.theta, arch).copy_module().double()
    x = data.x.double()
    mean = torch.zeros_like(x[0]) if data.mean is None else data.mean.double().reshape(x[0].shape)
    boxes: dict[str, Box] = {"none": None, "mean" if center else "box": (0 - mean, 1 - mean)}
    return KKTSet.from_samples(model, x, data.y), boxes


def falsifier(device: str) -> Report:
    """Measure the largest violation, and how near the best example comes to the bound."""
    only_on(device, "cpu")
    rows: list[dict[str, Any]] = []
    gaps: dict[float, list[float]] = {0.1: [], 0.3: []}
    caught = expected = 0
    with threads(1):
        for name, candidates, boxes in exact_points():
            row, _ = _row(name, candidates, boxes, range(4))
            if name == "relu":
                expected += 1
                caught += old_bound_breaks(candidates, boxes["box"])
            rows.append(row)
        for seed in range(20):
            candidates, boxes = train_network(seed)
            row, seeds = _row("digits", candidates, boxes, range(4))
            for share in gaps:
                gaps[share] += seeds[share]
            rows.append(row)
            print(f"{len(rows)} of 50: {row}", flush=True)
    outside = two_groups(Falsifier(relu_point(2, 4, 3, 12, seed=7).set, None), 0.1)
    assert outside is not None
    distance = {share: float(np.mean(np.array(v) <= 0.05)) for share, v in gaps.items()}
    return Report(
        what="0.05 over the 80% quantile of the gap between bound and best example, trained networks, box",
        settings={"shares": SHARES, "violation": BEYOND, "samples each": 4},
        seeds=tuple(range(20)),
        figures=_summary(rows),
        ratio=min(0.05 / max(float(np.quantile(v, 0.8)), 1e-9) for v in gaps.values()),
        bar=1.0,
        checks={
            "no violation inside the class": all(row["worst"] <= BEYOND for row in rows),
            "the pair bound put back is broken on every exact point": caught == expected,
            "outside the class the bound is broken": outside[0] < 0.5 * two_group_bound(),
        },
        also={
            "share of samples within 0.05 of the bound": distance,
            "gap, quantiles 0.5 0.8 0.9 1": {
                share: [float(q) for q in np.quantile(v, (0.5, 0.8, 0.9, 1))]
                for share, v in gaps.items()
            },
            "pair bound broken": f"{caught} of {expected}",
            "two groups: energy kept, bound inside the class": [outside[0], two_group_bound()],
        },
    )


def two_group_bound() -> float:
    """Return the bound of the certificate for the candidate that :func:`two_groups` violates."""
    point = relu_point(2, 4, 3, 12, seed=7)
    bound = two_groups(Falsifier(point.set, None), 0.1)
    assert bound is not None
    return float(uniqueness(point.set).determined_at_least[bound[1]])


def old_bound_breaks(candidates: KKTSet, box: Box) -> bool:
    """Return True if a set of the class violates the bound of equal pairs at a tenth of the weight."""
    judge = Falsifier(candidates, box)
    nothing = {"full": -1.0, "radius": np.inf, "low": -np.inf, "high": np.inf}
    return any(
        judge.attack(i, 0.1, {"at_least": pair_bound(judge, i), **nothing}).energy > BEYOND
        for i in range(len(judge.x))
    )


def _row(
    name: str, candidates: KKTSet, boxes: dict[str, Box], indices: range
) -> tuple[dict[str, Any], dict[float, list[float]]]:
    """Search around the candidates of one network."""
    total = Outcome()
    gaps: dict[float, list[float]] = {share: [] for share in SHARES}
    for (kind, box), share in itertools.product(boxes.items(), SHARES):
        certificate = uniqueness(candidates, box=box, share=share, samples=indices.stop)
        judge = Falsifier(candidates, box)
        outcome = judge.check(certificate)
        if kind != "none":
            gaps[share] += outcome.gaps
        total.join(outcome)
    return {
        "case": name,
        "tried": total.tried,
        "not in the class": total.refused,
        "worst": total.worst,
        "energy": total.energy,
        "full": total.full,
        "radius": total.radius,
        "pixel": total.pixel,
    }, gaps


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each kind of case."""
    return [
        {
            "case": name,
            "networks": len(outcomes),
            **{k: sum(r[k] for r in outcomes) for k in ("tried", "not in the class")},
            **{
                k: max(r[k] for r in outcomes)
                for k in ("worst", "energy", "full", "radius", "pixel")
            },
        }
        for name in ("relu", "classes", "digits")
        if (outcomes := [row for row in rows if row["case"] == name])
    ]


if __name__ == "__main__":
    sys.exit(run_experiment("falsifier", falsifier, __doc__))
