"""Small networks to audit, trained once per test process: a leaky one, a tight one, an untrained one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from residuum.datasets import load_dataset
from residuum.io.checkpoints import save_checkpoint
from residuum.networks import Architecture
from residuum.networks.network import Network
from residuum.records import Knowledge, Split
from residuum.stationarity import parameters
from residuum.training import TrainingConfig, initialize, make_release, train

LEAKY_ARCH, LEAKY_SAMPLES = "mlp:64-100-100-1", 40
TIGHT_ARCH, TIGHT_SAMPLES = "mlp:64-30-1", 20


@lru_cache(maxsize=1)
def leaky() -> tuple[Network, Split]:
    """A three-layer network near its 40 digits. An attack of a second recovers several."""
    split = load_dataset("digits", LEAKY_SAMPLES, seed=0, holdout=400)
    state = train(LEAKY_ARCH, split.train, TrainingConfig(steps=800))
    return make_release(state, LEAKY_ARCH, split.train, "binary"), split


@lru_cache(maxsize=1)
def tight() -> tuple[Network, Split]:
    """A two-layer network whose first layer the attack explains without finding its digits."""
    split = load_dataset("digits", TIGHT_SAMPLES, seed=10, holdout=400)
    state = train(TIGHT_ARCH, split.train, TrainingConfig(steps=1000))
    return make_release(state, TIGHT_ARCH, split.train, "binary"), split


@lru_cache(maxsize=1)
def untrained() -> tuple[Network, Split]:
    """The leaky network's architecture with random weights, and the same digits."""
    checkpoint, split = leaky()
    model = initialize(Architecture.parse(LEAKY_ARCH), TrainingConfig(init="default"))
    return checkpoint.replace(theta=parameters(model)), split


VICTIMS = {"leaky": leaky, "tight": tight, "untrained": untrained}


def knowledge(split: Split) -> Knowledge:
    """What the attacker knows in tests: range, mean and sample count."""
    return Knowledge(
        value_range=(0.0, 1.0),
        mean=split.train.mean,
        sample_count=len(split.train),
        provenance={"mean": "train", "sample_count": "train"},
    )


def write(folder: Path, name: str) -> list[str]:
    """Files of a victim, and the arguments of ``residuum audit`` that name them."""
    checkpoint, split = VICTIMS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    model, train_file, test_file = (
        folder / f for f in ("model.safetensors", "train.npz", "test.npz")
    )
    save_checkpoint(checkpoint, model)
    split.train.to_npz(train_file)
    split.holdout.to_npz(test_file)
    return [
        "audit",
        str(model),
        "--data",
        str(train_file),
        "--holdout",
        str(test_file),
        "--value-range",
        "0,1",
        "--mean",
        "train",
        "--sample-count",
        str(len(split.train)),
    ]
