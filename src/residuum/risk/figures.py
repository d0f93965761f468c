"""The figures of a record: what the weights hold of it, how many kinks pass through it, its odds.

Row space. Gradient descent from a small or known start makes the rows of that layer mixtures of samples,
W - c W0 = C X = U S V^T, of which r directions stand out of the noise. Of weights r counts all above the
noise edge: unmixing looks at those before a cliff in the spectrum, but its clusters of neurons have cliffs
of their own, elsewhere. Of a change or a moment, whose rest is no noise, the cliff is where samples end.

    reach      |V_r x| / |x|        cosine that a candidate in the span of the r clean directions can have
                                    with x at most: what any attack that stays in that span can reach
    reach_ncc  the same for the normalised cross-correlation: x and the directions are centred, channel by
               channel; the mean over channels of |P x_c| / |x_c|
    heard      sum_k (v_k . x)^2 / |x|^2  S_k^2 / (S_k^2 + (t S_1)^2),  t = 1e-2
               the same square with weak directions counted less: an attack fits strong ones first
    dual       |NCC(x^, x)|,  x^ = V diag(S / (S^2 + (e S_1)^2)) U^T delta(x),  e = 5e-3
               delta(x): the backward signal of the record. For a training sample that is near the dual
               vector z of x (z . x_k = 1 for its own, 0 for all others), for others it is not

Kinks. Training moves the switching hyperplanes of ReLU neurons onto training samples. The statistic is
the number of neurons of the first two hidden layers whose pre-activation is zero but for

    |w_j . a + b_j|  <=  1e-4 |(w_j, b_j)| |(a, 1)|        a: the input of the layer at x

Neurons are dependent, so no distribution is assumed: a record's p-value is its rank among N held-out
records, p = (1 + number of those with at least its count) / (N + 1). If the record is exchangeable with them,
P(p <= t) <= t. P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023,
"Testing for outliers with conformal p-values"), under which Benjamini and Hochberg's rule controls the
false discovery rate.

Odds. Two kinds of attack read the layer on the input, and each has its own, logistic in

    stationarity   log(1 - heard), log(own part over misfit)
    unmixing       log(1 - reach_ncc^2), log(own part over misfit), log(d / n), log(n / r)

n records of d values. Were both independent, the probability of being recovered by at least one would be
q = 1 - (1 - p)(1 - p'); they are not, so that the score is a + b logit(q), and the probability its
logistic. log(own part over misfit) and log(d / n) stand alone where the network has no dense layer on whole
samples, where its start hides the samples, or where the clean directions fill the input space, so that every
record lies in them, trained on or not. Coefficients were fitted on networks of the pool ``tune`` of
``benchmarks/exposure.py`` and on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from residuum.attacks.unmix import ROUNDING, Layer
from residuum.checkpoints.inspection import noise_edge
from residuum.errors import DataError
from residuum.networks import MLP, ReLU
from residuum.records import Dataset
from residuum.records.exposure import GroupExposure
from residuum.risk.gradients import blocks
from residuum.similarity import standardise

SOFT, RIDGE = 1e-2, 5e-3  # t and e above
TOLERANCE, LAYERS = 1e-4, 2  # of a kink, and hidden layers that are looked at
LEVEL = 0.05  # false discovery rate at which kinks call a record
FLOOR = 1e-4  # below it logarithms tell rounding apart, not records
FILLED = 0.9  # share of all directions from which the clean ones tell records no more apart
STATIONARITY = (-5.081, -2.230, 0.254)  # 1, log(1 - heard), log own
UNMIXING = (-9.267, -0.755, 0.361, 2.109, 2.835)  # 1, log(1 - reach^2), log own, log(d/n), log(n/r)
EITHER = (-0.486, 0.923)  # 1, logit(q)
OWN_ALONE = (-1.061, 0.814, 1.060)  # 1, log own, log(d/n)
MOST_GROUPS = 200  # more names are those of records, not of groups
DRAWS, MANY = 1000, 2000  # of bootstraps; records of a group above which the mean is normal
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


@dataclass(frozen=True, eq=False)
class Span:
    """A layer taken apart, the shape of samples, and r, the number of its clean directions."""

    layer: Layer
    shape: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, rows: Tensor, shape: tuple[int, ...], noise: bool) -> Span:
        """Of rows (h, d); noise: whether that of a start is in them."""
        layer = Layer.of(rows)
        above = noise_edge(layer.S.cpu(), *rows.shape)[0]
        sound = int((ROUNDING * layer.S[0] < layer.S).sum())
        return cls(layer, shape, min(above, sound) if noise else layer.rank)

    def reach(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape); 0 of a sample that is zero."""
        flat = x.flatten(1)
        V = self.layer.V[: self.rank].to(flat)
        size = flat.norm(dim=1).clamp(min=1e-300)
        return ((flat @ V.T).norm(dim=1) / size).clamp(max=1)

    def reach_ncc(self, x: Tensor) -> Tensor:
        """(n,) likewise; a channel that is constant correlates with nothing and adds 0."""
        channels = self.shape[0] if len(self.shape) == 3 else 1
        V = self.layer.V[: self.rank].to(x).reshape(self.rank, channels, -1)
        parts = standardise(x.reshape(len(x), *self.shape)).reshape(len(x), channels, -1)
        total = x.new_zeros(len(x))
        for c in range(channels):
            centred = V[:, c] - V[:, c].mean(1, keepdim=True)
            _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
            basis = basis[sigma > 1e-6 * sigma.max().clamp(min=1e-300)]
            # A channel of a standardised sample has length 1/sqrt(c), and their correlations are averaged.
            total += (parts[:, c] @ basis.T).norm(dim=1) / channels**0.5
        return total.clamp(max=1)

    def heard(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape)."""
        flat, S = x.flatten(1), self.layer.S.to(x)
        weight = S.square() / (S.square() + (SOFT * S[0]) ** 2)
        energy = flat.square().sum(1).clamp(min=1e-300)
        V = self.layer.V.to(flat)
        parts = [(flat[some] @ V.T).square() @ weight for some in blocks(len(flat), len(V))]
        return (torch.cat(parts) / energy).clamp(max=1)

    def dual(self, x: Tensor, signals: Tensor) -> Tensor:
        """(n,) of samples and their backward signals (n, h)."""
        S, U, V = (part.to(x) for part in (self.layer.S, self.layer.U, self.layer.V))
        inverse = S / (S.square() + (RIDGE * S[0]) ** 2)
        found = []
        for some in blocks(len(x), x[0].numel()):
            estimate = ((signals[some] @ U) * inverse) @ V
            a, b = (standardise(part.reshape(-1, *self.shape)) for part in (estimate, x[some]))
            found.append((a * b).sum(1).abs().clamp(max=1))
        return torch.cat(found)


def has_kinks(chain: MLP | None) -> bool:
    """Whether the network is a chain of ReLU layers."""
    return chain is not None and chain.hidden > 0 and isinstance(chain.activation, ReLU | nn.ReLU)


@torch.no_grad()
def kinks(chain: MLP, x: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """(n, layers) switches of the first hidden layers that pass through each record."""
    layers = chain.linears[: min(LAYERS, chain.hidden)]
    width = sum(layer.in_features + layer.out_features for layer in chain.linears)
    lengths = []
    for layer in layers:
        squares = layer.weight.square().sum(1)
        lengths.append((squares if layer.bias is None else squares + layer.bias.square()).sqrt())
    found = []
    for some in blocks(len(x), width):
        trace, counts = chain.trace(x[some]), []
        for l, layer in enumerate(layers):
            size = trace.inputs[l].square().sum(1)
            size = (size if layer.bias is None else size + 1).sqrt()
            scale = size[:, None] * lengths[l]
            near = (trace.pre[l].abs() <= tolerance * scale) & (scale > 0)
            counts.append(near.sum(1))
        found.append(torch.stack(counts, 1))
    return torch.cat(found)


def ranked(statistic: Tensor, held_out: Tensor) -> Tensor:
    """(n,) p-values: ranks of records among held-out ones, large values being evidence."""
    order = held_out.double().sort().values
    below = torch.searchsorted(order, statistic.double().contiguous())  # held-out records below it
    return (1 + len(order) - below).double() / (len(order) + 1)


def discoveries(p: Tensor, level: float = LEVEL) -> Tensor:
    """(n,) which of the p-values Benjamini and Hochberg call at a false discovery rate of ``level``."""
    return adjusted(p) <= level


def adjusted(p: Tensor) -> Tensor:
    """(n,) least level at which each would be called: min over k >= rank of n p_(k) / k."""
    order = p.argsort()
    steps = p[order] * len(p) / torch.arange(1, len(p) + 1, dtype=p.dtype, device=p.device)
    least = steps.flip(0).cummin(0).values.flip(0).clamp(max=1)
    found = torch.empty_like(p)
    found[order] = least
    return found


def score(
    own: Tensor, heard: Tensor | None, reach: Tensor | None, values: int, rank: int | None
) -> Tensor:
    """(n,) log odds of being recovered.

    own: over misfit; values: d; heard, reach, rank: None without a row space.
    """
    n = len(own)
    part, wide = (own.double() + FLOOR).log(), math.log(values / n)
    if heard is None or reach is None or rank is None or rank >= FILLED * values:
        return _sum(OWN_ALONE, part, wide)
    missed = (1 - heard.double() + FLOOR).log()
    outside = (1 - reach.double().square() + FLOOR).log()
    fitted = torch.sigmoid(_sum(STATIONARITY, missed, part))
    unmixed = torch.sigmoid(_sum(UNMIXING, outside, part, wide, math.log(n / max(rank, 1))))
    either = 1 - (1 - fitted) * (1 - unmixed)
    return _sum(EITHER, torch.logit(either, eps=1e-12))


def _sum(coefficients: tuple[float, ...], *parts: Tensor | float) -> Tensor:
    total = torch.tensor(coefficients[0], dtype=torch.float64)
    for coefficient, part in zip(coefficients[1:], parts, strict=True):
        total = total + coefficient * part
    return total


def named_groups(
    data: Dataset, task: str, groups: tuple[str, ...], grouped_by: str
) -> tuple[tuple[str, ...], str]:
    """The group of every record: as given, by class, or none for a regression; and by what."""
    if groups:
        if len(groups) != len(data):
            raise DataError(
                f"Groups name one for every record; got {len(groups)} for {len(data)}.",
                "Give as many as there are records.",
            )
        if len(set(groups)) > MOST_GROUPS:
            raise DataError(
                f"Groups may have {MOST_GROUPS} different names; got {len(set(groups))}.",
                "Name a column with fewer values.",
            )
        return groups, grouped_by or "group"
    if task == "regression":
        return (), ""
    named = data.classes if task == "multiclass" else ()
    return tuple(
        named[int(y)] if 0 <= int(y) < len(named) else f"{float(y):g}" for y in data.y.tolist()
    ), "class"


def grouped(
    names: tuple[str, ...], probability: Tensor, q: Tensor | None
) -> tuple[GroupExposure, ...]:
    """Every group with its mean probability and interval, most exposed first."""
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    found = []
    for name, mine in members.items():
        own = probability[mine]
        called = None if q is None else int((q[mine] <= LEVEL).sum())
        found.append(
            GroupExposure(
                name, len(mine), float(own.sum()), float(own.mean()), mean_interval(own), called
            )
        )
    return tuple(sorted(found, key=lambda one: -one.probability))


def mean_interval(values: Tensor, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap of the mean over records, from the same draws every time; of many normal."""
    n = len(values)
    if n > MANY:
        half = 1.96 * float(values.std()) / math.sqrt(n)
        return float(values.mean()) - half, float(values.mean()) + half
    generator = torch.Generator().manual_seed(0)
    means = values[torch.randint(n, (DRAWS, n), generator=generator)].mean(1)
    low, high = means.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).to(means)).tolist()
    return low, high
