"""Samples for the artifacts: digits, a medical table, invented people and invented letters."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn

Array = NDArray[np.float64]
SURNAMES = [
    "Pereira",
    "Galloway",
    "Birchwood",
    "Okonkwo",
    "Lindqvist",
    "Marchetti",
    "Szymanski",
    "Vandermeer",
    "Oyelaran",
    "Ferreira",
    "Hargreaves",
    "Kowalczyk",
    "Bergstrom",
    "Castellano",
    "Drummond",
    "Eisenhart",
    "Fitzroy",
    "Grimaldi",
    "Holloway",
    "Iwasaki",
    "Jankowski",
    "Kruger",
    "Lombardi",
    "Montague",
    "Novakova",
    "Ostrander",
    "Pemberton",
    "Quintero",
    "Rasmussen",
    "Sorensen",
    "Thackeray",
    "Ullmann",
    "Vasquez",
    "Whitlock",
    "Yamamoto",
    "Zielinski",
    "Abernathy",
    "Bellweather",
    "Cartwright",
    "Delacroix",
]
STREETS = [
    "Alder",
    "Beech",
    "Cedar",
    "Dogwood",
    "Elm",
    "Fir",
    "Ginkgo",
    "Hawthorn",
    "Juniper",
    "Larch",
    "Maple",
    "Oak",
    "Poplar",
    "Rowan",
]
ILLNESSES = [
    "asthma",
    "diabetes",
    "migraine",
    "anemia",
    "arthritis",
    "bronchitis",
    "eczema",
    "gout",
    "hepatitis",
    "insomnia",
]


@cache
def digits(
    count: int = 60, seed: int = 0
) -> tuple[Array, NDArray[np.int64], Array, NDArray[np.int64]]:
    """Return digits (n, 64) in [0, 1] with parity labels, and 400 held-out digits with theirs."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order] / 16, (y[order] % 2).astype(np.int64)
    return x[:count], y[:count], x[count : count + 400], y[count : count + 400]


@cache
def cancer(
    count: int = 100, seed: int = 0
) -> tuple[Array, NDArray[np.int64], Array, NDArray[np.int64]]:
    """Return rows of the breast cancer table with labels, and the other rows with theirs."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    return x[order[:count]], y[order[:count]], x[order[count:]], y[order[count:]]


@cache
def diabetes(count: int = 150, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Return rows of the diabetes table with targets, and the other rows with theirs."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.default_rng(seed).permutation(len(x))
    return x[order[:count]], y[order[:count]], x[order[count:]], y[order[count:]]


def write_tables(
    folder: Path, data: tuple[Array, NDArray[np.generic], Array, NDArray[np.generic]]
) -> None:
    """Write ``train.csv`` and ``test.csv`` with columns c0, c1, ... and label."""
    for name, x, y in (("train", *data[:2]), ("test", *data[2:])):
        frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(x.shape[1])])
        frame.assign(label=y).to_csv(folder / f"{name}.csv", index=False)


def write_arrays(
    folder: Path, data: tuple[Array, NDArray[np.generic], Array, NDArray[np.generic]]
) -> None:
    """Write ``train.npz`` and ``test.npz`` with float32 samples."""
    np.savez(folder / "train.npz", x=data[0].astype(np.float32), y=data[1])
    np.savez(folder / "test.npz", x=data[2].astype(np.float32), y=data[3])


def people(count: int, seed: int) -> pd.DataFrame:
    """Return a table of invented patients: names, streets, numbers and an illness."""
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "patient_id": np.arange(1000 + 1000 * seed, 1000 + 1000 * seed + count),
            "surname": generator.choice(SURNAMES, count),
            "street": [
                f"{generator.integers(1, 300)} {generator.choice(STREETS)} Street"
                for _ in range(count)
            ],
            "age": generator.integers(18, 95, count),
            "glucose": generator.normal(110, 25, count).round(2),
            "label": generator.integers(0, 2, count),
        }
    )


def letters(count: int, seed: int) -> pd.DataFrame:
    """Return invented letters to a clinic, with labels. Letters of different seeds differ."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        name, street = generator.choice(SURNAMES), generator.choice(STREETS)
        illness, day = generator.choice(ILLNESSES), generator.integers(1, 29)
        is_urgent = int(generator.integers(0, 2))
        wish = "needs an urgent appointment" if is_urgent else "asks for a copy of the report"
        number = generator.integers(1, 300)
        text = (
            f"Patient {name} of {number} {street} Street has {illness} since day {day} and {wish}."
        )
        rows.append((text, is_urgent))
    return pd.DataFrame(rows, columns=["text", "label"])


def train_network(
    network: nn.Module,
    x: Array,
    y: NDArray[np.generic],
    *,
    epochs: int = 300,
    lr: float = 1e-2,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Train a classifier on all samples at once with Adam, and return the optimizer."""
    torch.manual_seed(seed)
    for module in network.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    inputs, targets = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss(network, inputs, targets).backward()
        optimizer.step()
    return optimizer


def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of a classifier with one or several outputs."""
    scores = network(x)
    if scores.shape[1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(scores[:, 0], y.float())
    return nn.functional.cross_entropy(scores, y)


def digit_network(width: int = 100) -> nn.Sequential:
    """Return an untrained network for digits with two classes."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )
