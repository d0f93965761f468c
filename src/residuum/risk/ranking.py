"""Who would come back first: a score per record, the probability that an attack recovers it, and groups.

Two kinds of attack read the layer on the input, and each has its own odds, logistic in

    stationarity   log(1 - heard), log(own part over misfit)
    unmixing       log(1 - reach_ncc^2), log(own part over misfit), log(d / n), log(n / r)

n records of d values, r clean directions of the layer (``risk.span``, ``risk.run``). Were both independent,
the probability of being recovered by at least one would be q = 1 - (1 - p)(1 - p'); they are not, so that
the score is a + b logit(q), and the probability its logistic. log(own part over misfit) and log(d / n) stand
alone where the network has no dense layer on whole samples, where its start hides the samples, or where
the clean directions fill the input space, so that every record lies in them, trained on or not.

Coefficients were fitted on networks of the pool ``tune`` of ``benchmarks/exposure.py`` and on nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residuum.errors import DataError
from residuum.records import Dataset
from residuum.records.exposure import GroupExposure
from residuum.risk.kinks import LEVEL

FLOOR = 1e-4
FILLED = 0.9  # share of all directions from which the clean ones tell records no more apart
STATIONARITY = (-5.081, -2.230, 0.254)  # 1, log(1 - heard), log own
UNMIXING = (-9.267, -0.755, 0.361, 2.109, 2.835)  # 1, log(1 - reach^2), log own, log(d/n), log(n/r)
EITHER = (-0.486, 0.923)  # 1, logit(q)
OWN_ALONE = (-1.061, 0.814, 1.060)  # 1, log own, log(d/n)
MOST_GROUPS = 200
DRAWS, MANY = 1000, 2000  # of bootstraps; records of a group above which the mean is normal
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


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
