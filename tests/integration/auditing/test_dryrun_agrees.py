"""A dry run and an audit agree about what applies: every attack on 15 artifacts."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.svm import SVC
from torch import nn

import residuum as rs
from residuum.attacks import every_attack
from residuum.attacks.trees.forest import NAME as FOREST
from residuum.auditing.applicability import PLANNED, TRIED
from residuum.auditing.dryrun import dry_run
from residuum.auditing.stored_records import NAME

TRAIN, HOLDOUT = 16, 120


@dataclass
class Artifact:
    """What is audited, its samples, and what the attacker knows."""

    model: Any
    shape: tuple[int, ...]
    classes: int = 2
    knowledge: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def samples(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(count, *self.shape, generator=generator, dtype=torch.float64)
        if not self.classes:
            return x, x.flatten(1).sum(1)
        return x, torch.arange(count) % self.classes


def dense(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 6),
        nn.ReLU(),
        nn.Linear(6, outputs),
    )


def with_optimizer(folder: Path) -> Artifact:
    model = dense(12, 10, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 12)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "training.pt")
    return Artifact(folder / "training.pt", (12,))


def saved(model: nn.Module, path: Path, shape: tuple[int, ...], **more: Any) -> Artifact:
    torch.save(model.state_dict(), path)
    return Artifact(path, shape, **more)


def with_initial_weights(folder: Path, *, only_head: bool) -> Artifact:
    """A network whose initial weights are known; with ``only_head`` its first layer was frozen."""
    first, second = rs.checkpoint_from_module(dense(12, 10, 8, 1)), dense(12, 10, 8, 1)
    with torch.no_grad():
        for i, parameter in enumerate(second.parameters()):
            if not (only_head and i < 2):
                parameter += 0.1 * torch.randn_like(parameter)
    trained = rs.checkpoint_from_module(second)
    path = rs.save_checkpoint(trained, folder / "trained.safetensors")
    return Artifact(path, (12,), knowledge={"theta0": first.theta})


def mixtures(folder: Path) -> Artifact:
    """A dense network whose first layer mixes a few sparse images, as training from a small start does."""
    model = dense(64, 20, 1)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(5, 64, generator=generator) * (torch.rand(5, 64, generator=generator) > 0.7)
    with torch.no_grad():
        model[0].weight.copy_(torch.rand(20, 5, generator=generator) @ images)
    return saved(model, folder / "m.pt", (1, 8, 8), knowledge={"shape": (1, 8, 8)})


def backbone(_: Path) -> Artifact:
    """A convolutional backbone whose dense layer mixes the features of half as many images as neurons."""
    model, images = convolutional(), torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        features = model[:3](images)
        model[3].weight.copy_(torch.rand(6, 3) @ features)
    moment = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    moment["3.weight"] = model[3].weight.detach().clone()
    return Artifact(model, (1, 8, 8), knowledge={"shape": (1, 8, 8), "moment": moment})


def convolutional_with(*fact_names: str) -> Artifact:
    """A convolutional network whose initial weights or optimizer state the attacker knows."""
    model, images = convolutional(), torch.rand(4, 1, 8, 8)
    initial = rs.checkpoint_from_module(convolutional(), input_shape=(1, 8, 8)).theta
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    known_values = {"theta0": initial, "moment": rs.read_moment(optimizer, model)}
    return Artifact(model, (1, 8, 8), knowledge={name: known_values[name] for name in fact_names})


def fitted(estimator: Any, folder: Path, classes: int = 2) -> Artifact:
    x, y = Artifact(None, (6,), classes).samples(TRAIN, 0)
    path = folder / "model.pkl"
    with np.errstate(all="ignore"):
        path.write_bytes(pickle.dumps(estimator.fit(x.numpy(), y.numpy())))
    return Artifact(path, (6,), classes)


def live(estimator: Any) -> Artifact:
    x, y = Artifact(None, (6,)).samples(TRAIN, 0)
    return Artifact(estimator.fit(x.numpy(), y.numpy()), (6,))


ARTIFACTS: dict[str, Callable[[Path], Artifact]] = {
    "dense .pt": lambda f: saved(dense(12, 10, 1), f / "m.pt", (12,)),
    "dense, images": lambda f: saved(
        dense(64, 20, 1), f / "m.pt", (1, 8, 8), knowledge={"value_range": (0, 1)}
    ),
    "dense, three classes": lambda f: saved(dense(12, 10, 3), f / "m.pt", (12,), classes=3),
    "dense, regression": lambda f: saved(
        dense(12, 10, 1), f / "m.pt", (12,), classes=0, options={"task": "regression"}
    ),
    "one layer": lambda f: saved(nn.Sequential(nn.Linear(12, 1)), f / "m.pt", (12,)),
    "safetensors": lambda f: Artifact(
        rs.save_checkpoint(rs.checkpoint_from_module(dense(12, 9, 1)), f / "m.safetensors"), (12,)
    ),
    "optimizer state": with_optimizer,
    "initial weights": lambda f: with_initial_weights(f, only_head=False),
    "frozen layers": lambda f: with_initial_weights(f, only_head=True),
    "live convolutions": lambda _: Artifact(convolutional(), (1, 8, 8)),
    "live convolutions, classes": lambda _: Artifact(convolutional(3), (1, 8, 8), classes=3),
    "mixtures of images": mixtures,
    "table with a range": lambda f: saved(
        dense(6, 20, 1), f / "m.pt", (6,), knowledge={"value_range": (0, 1)}
    ),
    "backbone and head": backbone,
    "convolutions, initial weights": lambda _: convolutional_with("theta0"),
    "convolutions, optimizer state": lambda _: convolutional_with("moment"),
    "convolutions, published baselines": lambda _: replace(
        convolutional_with("theta0", "moment"),
        options={"attacks": ["geiping2020", "geiping2020-moment"]},
    ),
    "polynomial": lambda _: Artifact(
        rs.Network(
            {
                "weight": torch.randn(5, 4, dtype=torch.float64),
                "coefficient": torch.randn(5, dtype=torch.float64),
            },
            "polynomial:4-5-1,coefficients=0/0/0/1",
        ),
        (4,),
    ),
    "scikit-learn classifier": lambda f: fitted(
        MLPClassifier(hidden_layer_sizes=(8,), max_iter=3, random_state=0), f
    ),
    "scikit-learn regressor": lambda f: fitted(
        MLPRegressor(hidden_layer_sizes=(8,), max_iter=3, random_state=0), f, classes=0
    ),
    "nearest neighbors": lambda f: fitted(KNeighborsClassifier(3), f),
    "support vectors": lambda f: fitted(SVC(), f),
    "random forest": lambda f: fitted(RandomForestRegressor(20, random_state=0), f, classes=0),
    "logistic regression": lambda f: fitted(LogisticRegression(), f),
    "live random forest": lambda _: live(RandomForestClassifier(20, random_state=0)),
    "live logistic regression": lambda _: live(LogisticRegression()),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_dry_run_and_an_audit_agree_about_every_attack(name: str, tmp_path: Path) -> None:
    artifact = ARTIFACTS[name](tmp_path)
    inputs = {
        "data": artifact.samples(TRAIN, 0),
        "holdout": artifact.samples(HOLDOUT, 1),
        "knowledge": artifact.knowledge,
        **artifact.options,
    }
    settings = {"steps": 2, "effort": "quick", "subsets": 200}
    plan = dry_run(artifact.model, **inputs, **settings)
    assert not plan.obstacles
    attacks = every_attack()
    other_rows = {NAME, FOREST, "losses"}
    rows = {row.what: row for row in plan.applies if row.what in {*attacks, *other_rows}}
    result = rs.audit(artifact.model, **inputs, **settings)
    done = {row.what: row for row in result.applies if row.what in {*attacks, *other_rows}}
    # A baseline that does not apply has no row in an audit.
    assert done.keys() >= {
        n
        for n in rows
        if n in other_rows or not attacks[n].is_baseline or rows[n].status == PLANNED
    }
    assert {n for n in rows if rows[n].status == PLANNED} <= done.keys() <= rows.keys()
    for attack, row in done.items():
        if "there is no such point" in row.reason:  # it was run, and only running it shows that
            assert rows[attack].status == PLANNED
            continue
        assert (row.status == TRIED) == (rows[attack].status == PLANNED), (attack, row.reason)
        if row.status != TRIED:
            assert row.reason == rows[attack].reason


def test_there_are_15_artifacts_and_every_attack_is_tried_on_one(tmp_path: Path) -> None:
    assert len(ARTIFACTS) >= 15
    tried = set()
    for name, make in ARTIFACTS.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        artifact = make(folder)
        inputs = {"data": artifact.samples(TRAIN, 0), "knowledge": artifact.knowledge}
        plan = dry_run(artifact.model, **inputs, **artifact.options, steps=1)
        tried |= {row.what for row in plan.applies if row.status == PLANNED}
    assert tried == {*every_attack(), NAME, FOREST}
