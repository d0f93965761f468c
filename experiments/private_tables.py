"""Tables for the experiments on forests: training rows with targets, and held-out rows that no tree saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """A training table and its held-out rows.

    Attributes:
        x: (records, columns) training values, rounded to float32 as trees see them.
        y: (records,) targets or labels.
        holdout: (held-out rows, columns) rows from the same source that are not in the training table.
        holdout_y: (held-out rows,) their targets or labels.
    """

    x: Floats
    y: Floats
    holdout: Floats
    holdout_y: Floats

    @property
    def ranges(self) -> tuple[Floats, Floats]:
        """Smallest and largest value of each column of the training table."""
        return np.nanmin(self.x, 0), np.nanmax(self.x, 0)


def make_table(name: str, records: int, seed: int) -> Table:
    """Draw a table.

    Args:
        name: Name of a source in ``SOURCES``.
        records: Number of training records.
        seed: Seed of the draw.

    Returns:
        The table. Columns that are constant in the training rows are left out.
    """
    rng = np.random.default_rng([seed, records])
    x, y = SOURCES[name](records + max(100, records // 5), rng)
    x = np.asarray(x, dtype=np.float32).astype(np.float64)
    order = rng.permutation(len(x))
    train, held_out = order[:records], order[records:]
    varies = np.nanmax(x[train], 0) > np.nanmin(x[train], 0)
    y = np.asarray(y, float)
    return Table(x[train][:, varies], y[train], x[held_out][:, varies], y[held_out])


def with_missing(table: Table, share: float, seed: int) -> Table:
    """Return a table in which a random share of the training values is missing."""
    rng = np.random.default_rng([seed, 7])
    x = np.where(rng.random(table.x.shape) < share, np.nan, table.x)
    return replace(table, x=x)


def _bundled(name: str) -> Callable[[int, np.random.Generator], tuple[Floats, Floats]]:
    def load(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        from sklearn import datasets

        return getattr(datasets, f"load_{name}")(return_X_y=True)

    return load


def _generated(
    name: str, **options: float
) -> Callable[[int, np.random.Generator], tuple[Floats, Floats]]:
    def generate(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        from sklearn import datasets

        seed = int(rng.integers(2**31))
        return getattr(datasets, f"make_{name}")(records, random_state=seed, **options)

    return generate


def _mixed(
    decimals: int,
) -> Callable[[int, np.random.Generator], tuple[Floats, Floats]]:
    """A table with continuous, rounded, integer, binary and repeated values, as in a register of persons."""

    def generate(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        age = rng.integers(18, 90, records)
        income = np.round(rng.lognormal(10, 0.6, records), -2)
        height = np.round(rng.normal(170, 10, records), 1)
        weight = np.round(rng.normal(75, 14, records), 1)
        children = rng.poisson(1.3, records)
        smoker, urban = rng.integers(0, 2, (2, records))
        region = rng.integers(0, 6, records)
        score, distance = rng.normal(size=records), rng.exponential(size=records)
        rooms = rng.choice([2.0, 2.5, 3.5, 4.5], records)
        columns = [
            age,
            income,
            height,
            weight,
            children,
            smoker,
            urban,
            region,
            score,
            distance,
            rooms,
        ]
        x = np.stack([np.asarray(column, dtype=float) for column in columns], 1)
        y = (
            0.4 * age
            + income / 4000
            + 0.1 * (weight - height)
            + 6 * smoker * (age > 50)
            + 3 * np.sin(2 * score)
            + 2 * distance
            + rooms
            - children
            + rng.normal(0, 2, records)
        )
        return x, np.round(y, decimals)

    return generate


def _cancer_radius(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Breast cancer without its first column, mean radius, which is the target."""
    from sklearn.datasets import load_breast_cancer

    x, _ = load_breast_cancer(return_X_y=True)
    return x[:, 1:], x[:, 0]


def _digits_sum(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Digit images as a table. The target is a noisy linear function of the pixels."""
    from sklearn.datasets import load_digits

    x, _ = load_digits(return_X_y=True)
    return x[:, 1:], x @ rng.normal(size=x.shape[1]) + rng.normal(0, 5, len(x))


def _binary_digits(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x > 8).astype(float), y


def _housing(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A synthetic table of houses: coordinates with two decimals, rounded prices, and counts."""
    latitude = np.round(rng.uniform(46, 48, records), 2)
    longitude = np.round(rng.uniform(6, 10, records), 2)
    rooms, floor = rng.choice([1.5, 2.5, 3.5, 4.5, 5.5], records), rng.poisson(2, records)
    area = np.round(18 * rooms + rng.normal(0, 9, records))
    year = rng.integers(1890, 2024, records)
    tax, noise = rng.normal(100, 15, records), rng.normal(0, 15_000, records)
    price = 4000 * area + 60_000 * (longitude > 8.5) + 500 * (year - 1950) + noise
    x = np.stack([latitude, longitude, rooms, floor, area, year, tax], 1)
    return x, np.round(price, -2)


def _with_column_as_target(
    name: str, column: int
) -> Callable[[int, np.random.Generator], tuple[Floats, Floats]]:
    """A bundled table whose target is one of its columns."""

    def load(records: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        x, _ = _bundled(name)(records, rng)
        return np.delete(x, column, 1), x[:, column]

    return load


SOURCES: dict[str, Callable[[int, np.random.Generator], tuple[Floats, Floats]]] = {
    "diabetes": _bundled("diabetes"),
    "cancer": _bundled("breast_cancer"),
    "iris": _bundled("iris"),
    "wine": _bundled("wine"),
    "friedman1": _generated("friedman1", noise=1.0),
    "friedman1-20": _generated("friedman1", n_features=20, noise=1.0),
    "friedman2": _generated("friedman2", noise=1.0),
    "regression": _generated("regression", n_features=30, noise=5.0),
    "mixed": _mixed(2),
    "mixed-4": _mixed(4),
    "cancer-radius": _cancer_radius,
    "digits-sum": _digits_sum,
    "digits-binary": _binary_digits,
    "housing": _housing,
    "swiss-roll": _generated("swiss_roll", noise=0.5),
    "friedman3": _generated("friedman3", noise=0.1),
    "wine-alcohol": _with_column_as_target("wine", 0),
    "cancer-area": _with_column_as_target("breast_cancer", 3),
}
