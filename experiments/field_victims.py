"""Networks of the field's table (victims): the same images, weights and files from the same seeds.

Networks of a row share no image if the data set is large enough. Otherwise their facts say how many they
share.
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
from experiments import convnets, tabular
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
    """A network with its samples and with what attackers know.

    Attributes:
        network: A checkpoint, a live module, or the path of a file.
        x: Training samples as the network receives them.
        held: Held-out samples as the network receives them.
        mean: Mean of the training samples.
        training: Loss, steps and seed.
        knowledge_of_all: What every attacker knows.
        start: Initial weights, known to some attackers.
        moment: Optimizer state, known to some attackers.
        span: (d,) ranges of the columns of a table, None for images.
    """

    network: Network | nn.Module | Path
    x: Tensor
    held: Tensor
    mean: Tensor | None
    training: dict[str, Any]
    knowledge_of_all: Knowledge
    start: dict[str, Tensor] | None = None
    moment: dict[str, Tensor] | None = None
    span: Tensor | None = None

    def knowledge(self, grants: str) -> Knowledge:
        """Return what every attacker knows, with the initial weights or the optimizer state for some."""
        extra = {"start": {"theta0": self.start}, "moment": {"moment": self.moment}}
        more = extra.get(grants, {})
        if isinstance(self.network, Path):  # what a file holds, an attack reads from it
            more = {}
        return self.knowledge_of_all.replace(**more, provenance={})


def load_victim(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Load network k of a row. If there is no file, train it."""

    def make() -> Victim:
        start = time.time()
        victim = MAKERS[row.kind](row, k, seeds, root, device, path)
        victim.training.update(seed=seeds[k], seconds=time.time() - start, sha256=sha256(victim))
        return victim

    return from_file(path, make)


def from_file(path: Path, make: Callable[[], T]) -> T:
    """Load a file that this script wrote. If there is none, or a damaged one, write it."""
    if path.exists():
        try:
            return torch.load(path, weights_only=False, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            path.unlink()
    partial_path = path.with_suffix(f".part-{os.getpid()}")
    torch.save(make(), partial_path)
    os.replace(partial_path, path)
    return torch.load(path, weights_only=False, map_location="cpu")


def sha256(victim: Victim) -> str:
    """Return a hash of weights and images."""
    network = victim.network
    if isinstance(network, Path):
        network = rs.load_checkpoint(network)
    theta = network.theta if isinstance(network, Network) else dict(network.state_dict())
    return digest(*(theta[name].float() for name in sorted(theta)), victim.x.float())


def images(row: Row, k: int, seed: int, root: str) -> tuple[Dataset, Tensor, int]:
    """Return training samples of network k, held-out samples, and how many samples another network has.

    The networks of a row share one draw of samples and take turns. If too few samples are left, they start
    again at the first.
    """
    held = None if row.data in ("digits", "photos") else HELD_OUT
    options: dict[str, Any] = {"seed": seed, "root": root, "task": row.task, "center": False}
    try:
        split = load_dataset(row.data, row.n * row.victims, holdout=held, **options)
    except DataError:
        split = load_dataset(row.data, holdout=held, **options)
    pool, labels = split.train, split.train.y.unique()
    per_label, rows, repeats = row.n // len(labels), [], 0
    for label in labels:
        of_label = (pool.y == label).nonzero().flatten()
        places = k * per_label + torch.arange(per_label)
        repeats += max(0, row.victims * per_label - len(of_label)) if row.victims > 1 else 0
        rows.append(of_label[places % len(of_label)])
    chosen = torch.cat(rows).sort().values
    mean = pool.x[chosen].mean(0)
    samples = Dataset(pool.x[chosen] - mean, pool.y[chosen], mean, pool.name, pool.classes)
    return samples, split.holdout.x - mean, repeats


def layered(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Train a chain of dense layers with ``residuum.training``."""
    samples, held, repeats = images(row, k, seeds[0], root)
    outputs = len(samples.classes) if row.task == "multiclass" else 1
    bias = ",bias=all" if row.task == "regression" else ""
    arch = f"mlp:{samples.x[0].numel()}-{row.hidden}-{outputs}{bias}"
    config = row.training.changed(seed=seeds[k])
    state = train(arch, samples, config, device=device)
    shape = tuple(samples.x.shape[1:])
    box = {"value_range": (0.0, 1.0), "mean": samples.mean.float()} if row.boxed else {}
    return Victim(
        network=Network(dict(state.theta), arch, shape, task=row.task),
        x=samples.x.float(),
        held=held.float(),
        mean=samples.mean.float(),
        training={"status": state.status, "shared": repeats, **state.history[-1]},
        knowledge_of_all=Knowledge(shape=shape, sample_count=row.n, **box),
        start=dict(state.theta0),
        moment=dict(state.buffers) if row.training.momentum else None,
    )


def pickled(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Save an MLPClassifier with its defaults by joblib."""
    import joblib
    from sklearn.neural_network import MLPClassifier

    samples, held, repeats = images(row, k, seeds[0], root)
    x, y = samples.x.flatten(1).float().numpy(), samples.y.numpy()
    widths = tuple(map(int, row.hidden.split("-")))
    most = min(1000, 10 * row.training.steps)
    model = MLPClassifier(widths, random_state=seeds[k] % 2**32, max_iter=most).fit(x, y)
    file = path.with_suffix(".joblib")
    joblib.dump(model, file)
    return Victim(
        network=file,
        x=samples.x.float(),
        held=held.float(),
        mean=samples.mean.float(),
        training={"loss": float(model.loss_), "epochs": model.n_iter_, "shared": repeats},
        knowledge_of_all=Knowledge(shape=tuple(samples.x.shape[1:]), sample_count=row.n),
    )


def convolved(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Train conv 32 - pool - conv 64 - pool - dense 128 - 10 by SGD with momentum in batches of 10."""
    convnet = convnets.train_victim(convnets.Row("cnn", row.data, row.n), seeds[k], root, device)
    return Victim(
        network=convnet.model,
        x=convnet.x,
        held=convnet.held.x.float(),
        mean=convnet.held.mean,
        training=dict(convnet.training),
        knowledge_of_all=Knowledge(shape=tuple(convnet.x.shape[1:]), sample_count=row.n),
        start=convnet.start,
        moment=convnet.moment,
    )


def uniform_table(row: Row, k: int, seeds: list[int], root: str, device: str, path: Path) -> Victim:
    """Train on uniform rows with random labels to the margin, from small initial weights."""
    table = tabular.make_victim(tabular.Row(row.data, 5, row.n, row.hidden, ()), seeds[k])
    rows = torch.cat([table.x, table.unseen])
    return Victim(
        network=table.network,
        x=table.x.float(),
        held=table.unseen.float(),
        mean=table.knowledge.mean,
        training=dict(table.training),
        knowledge_of_all=table.knowledge.replace(sample_count=row.n, provenance={}),
        span=(rows.amax(0) - rows.amin(0)).float(),
    )


MAKERS = {"mlp": layered, "sklearn": pickled, "convnet": convolved, "table": uniform_table}
