"""Victims of the field's table: the same images, weights and files from the same seeds.

Victims of a row share no image where the pool is large enough; what they share otherwise is among the facts.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import residuum as rs
from experiments import convnets
from experiments import tabular as tables
from experiments.field_rows import Row
from residuum.datasets import load_dataset
from residuum.errors import DataError
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.records.rundir import digest
from residuum.training import train

HELD_OUT = 2000
T = TypeVar("T")


@dataclass(frozen=True)
class Victim:
    """network: a checkpoint, a live module, or the path of a file; start and moment: granted to some attacks.

    x, held: training samples and others, as the network receives them; span: (d,) ranges of the columns of
    a table, None of images.
    """

    network: Network | nn.Module | Path
    x: Tensor
    held: Tensor
    mean: Tensor | None
    facts: dict[str, Any]
    known: Knowledge
    start: dict[str, Tensor] | None = None
    moment: dict[str, Tensor] | None = None
    span: Tensor | None = None

    def knowledge(self, grants: str) -> Knowledge:
        """What is granted to everybody, and the start or the optimizer's state to some."""
        extra = {"start": {"theta0": self.start}, "moment": {"moment": self.moment}}
        more = extra.get(grants, {})
        if isinstance(self.network, Path):  # what a file holds, an attack reads from it
            more = {}
        return self.known.replace(**more, provenance={})


def kept(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Victim k of a row, from its file or trained anew."""

    def made() -> Victim:
        start = time.time()
        victim = MAKERS[row.made](row, k, seeds, root, device, path)
        victim.facts.update(seed=seeds[k], seconds=time.time() - start, sha256=sha256(victim))
        return victim

    return from_file(path, made)


def from_file(path: Path, make: Callable[[], T]) -> T:
    """What a file of our own holds; made anew where there is none or a damaged one."""
    if path.exists():
        try:
            return torch.load(path, weights_only=False, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            path.unlink()
    part = path.with_suffix(f".part-{os.getpid()}")
    torch.save(make(), part)
    os.replace(part, path)
    return torch.load(path, weights_only=False, map_location="cpu")


def sha256(victim: Victim) -> str:
    """Of weights and images."""
    network = victim.network
    if isinstance(network, Path):
        network = rs.load_checkpoint(network)
    theta = network.theta if isinstance(network, Network) else dict(network.state_dict())
    return digest(*(theta[name].float() for name in sorted(theta)), victim.x.float())


def images(row: Row, k: int, seed: int, root: str) -> tuple[Dataset, Tensor, int]:
    """Training samples of victim k, held-out ones, and how many of the former another victim has.

    One seed draws for all victims of a row, who take turns; where too few are left they begin anew.
    """
    held = None if row.data in ("digits", "photos") else HELD_OUT
    wanted: dict[str, Any] = {"seed": seed, "root": root, "task": row.task, "center": False}
    try:
        split = load_dataset(row.data, row.n * row.victims, holdout=held, **wanted)
    except DataError:
        split = load_dataset(row.data, holdout=held, **wanted)
    whole, labels = split.train, split.train.y.unique()
    each, rows, again = row.n // len(labels), [], 0
    for label in labels:
        mine = (whole.y == label).nonzero().flatten()
        places = k * each + torch.arange(each)
        again += max(0, row.victims * each - len(mine)) if row.victims > 1 else 0
        rows.append(mine[places % len(mine)])
    taken = torch.cat(rows).sort().values
    mean = whole.x[taken].mean(0)
    own = Dataset(whole.x[taken] - mean, whole.y[taken], mean, whole.name, whole.classes)
    return own, split.holdout.x - mean, again


def layered(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """A chain of dense layers, by ``residuum.training``."""
    own, held, again = images(row, k, seeds[0], root)
    outputs = len(own.classes) if row.task == "multiclass" else 1
    bias = ",bias=all" if row.task == "regression" else ""
    arch = f"mlp:{own.x[0].numel()}-{row.hidden}-{outputs}{bias}"
    config = row.training.changed(seed=seeds[k])
    state = train(arch, own, config, device=device)
    shape = tuple(own.x.shape[1:])
    box = {"value_range": (0.0, 1.0), "mean": own.mean.float()} if row.boxed else {}
    return Victim(
        network=Network(dict(state.theta), arch, shape, task=row.task),
        x=own.x.float(),
        held=held.float(),
        mean=own.mean.float(),
        facts={"status": state.status, "shared": again, **state.history[-1]},
        known=Knowledge(shape=shape, sample_count=row.n, **box),
        start=dict(state.theta0),
        moment=dict(state.buffers) if row.training.momentum else None,
    )


def pickled(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """An MLPClassifier with its defaults, as joblib saves it."""
    import joblib
    from sklearn.neural_network import MLPClassifier

    own, held, again = images(row, k, seeds[0], root)
    x, y = own.x.flatten(1).float().numpy(), own.y.numpy()
    widths = tuple(map(int, row.hidden.split("-")))
    most = min(1000, 10 * row.training.steps)
    model = MLPClassifier(widths, random_state=seeds[k] % 2**32, max_iter=most).fit(x, y)
    file = path.with_suffix(".joblib")
    joblib.dump(model, file)
    return Victim(
        network=file,
        x=own.x.float(),
        held=held.float(),
        mean=own.mean.float(),
        facts={"loss": float(model.loss_), "epochs": model.n_iter_, "shared": again},
        known=Knowledge(shape=tuple(own.x.shape[1:]), sample_count=row.n),
    )


def convolved(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """conv 32 - pool - conv 64 - pool - dense 128 - 10, by SGD with momentum in batches of 10."""
    made = convnets.made(convnets.Row("cnn", row.data, row.n), seeds[k], root, device)
    return Victim(
        network=made.model,
        x=made.x,
        held=made.held.x.float(),
        mean=made.held.mean,
        facts=dict(made.facts),
        known=Knowledge(shape=tuple(made.x.shape[1:]), sample_count=row.n),
        start=made.start,
        moment=made.moment,
    )


def tabular(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Uniform rows with random labels, to the margin from a small start."""
    made = tables.made(tables.Row(row.data, 5, row.n, row.hidden, ()), seeds[k])
    every = torch.cat([made.x, made.others])
    return Victim(
        network=made.network,
        x=made.x.float(),
        held=made.others.float(),
        mean=made.knowledge.mean,
        facts=dict(made.facts),
        known=made.knowledge.replace(sample_count=row.n, provenance={}),
        span=(every.amax(0) - every.amin(0)).float(),
    )


MAKERS = {"mlp": layered, "sklearn": pickled, "convnet": convolved, "table": tabular}
