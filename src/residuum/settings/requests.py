"""Settings of the public functions ``exposure``, ``defend`` and ``sweep``.

The functions check their keywords with these models, and the command line generates its options from the
models. The models are not in the modules of the functions, because these modules import torch. Importing
torch takes seconds, and ``--help`` must be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from residuum.settings.base import EXPERT, Settings

# Number of restarts in each trial of a sweep. The agreement between restarts needs at least two restarts.
TRIAL_RESTARTS = 2


class TableSettings(Settings):
    """The roles of the columns, if the samples are a table."""

    label: str = Field(
        default="",
        description="Column of a table that holds the labels. By default the column named label, target, "
        "class or y, or else the last column.",
    )
    drop: Sequence[str] = Field(
        default=(),
        description="Columns of a table that are not inputs of the model. The search for stored texts still "
        "uses them.",
    )
    sensitive: Sequence[str] = Field(
        default=(),
        description="Columns of a table, by name or number (counted from 0), for which we test whether an "
        "attacker can infer a missing value. By default all columns.",
    )

    @field_validator("drop", "sensitive", mode="before")
    @classmethod
    def _list_columns(cls, columns: Any) -> Any:
        if isinstance(columns, str | int):
            return (str(columns),)
        return tuple(str(c) if isinstance(c, int) else c for c in columns)


class ExposureRequest(TableSettings):
    """Settings of :func:`residuum.exposure`."""

    surface: str = Field(
        default="auto",
        description="Which tensors the attacker uses: weights (the trained weights), change (trained "
        "weights minus initial weights) or moment (the optimizer state). 'auto' chooses 'moment' if the "
        "optimizer state is known. Otherwise it chooses 'change' if the initial weights are known, and "
        "else 'weights'.",
    )
    task: str = Field(
        default="auto", description="Task of the network: binary, multiclass, regression or auto."
    )
    arch: str | None = Field(
        default=None,
        description="Architecture of the network, such as mlp:784-128-10, if the model file does not "
        "state its architecture.",
        json_schema_extra=EXPERT,
    )
    model_code: str | None = Field(
        default=None,
        description="Function that makes the network, as package.module:function, if --arch cannot "
        "describe the network. Residuum runs this function, so you must also pass --trust-code.",
        json_schema_extra=EXPERT,
    )
    grouped_by: str = Field(
        default="",
        description="Name of the column that holds the group of each record, such as a hospital. The "
        "result shows the name of the column.",
    )
    confidence: float = Field(
        default=0.95,
        ge=0.5,
        lt=1,
        description="Confidence of the lower bound on epsilon, the privacy loss of the training.",
        json_schema_extra=EXPERT,
    )
    delta: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Delta of (epsilon, delta)-differential privacy. The lower bound on epsilon holds "
        "for this delta. 0 means pure differential privacy.",
        json_schema_extra=EXPERT,
    )
    attributes: bool = Field(
        default=False,
        description="Also test for which records an attacker who knows the other columns can infer a missing "
        "value. The test needs a table and held-out records.",
    )
    top: int = Field(
        default=10,
        ge=0,
        description="Number of records with the highest risk that are shown with their images.",
    )
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class DefenseRequest(Settings):
    """Settings of :func:`residuum.defend`."""

    arch: str | None = Field(
        default=None,
        description="Architecture of the network. By default an MLP with two hidden layers of 100 neurons.",
    )
    n: int | None = Field(
        default=None,
        description="Number of training samples, the same number for each label. By default all samples "
        "are used, or half of the samples if held-out samples come from the same file.",
    )
    data_root: Path | None = Field(
        default=None,
        description="Folder of downloaded datasets. By default the folder in the environment variable "
        "RESIDUUM_DATA.",
    )
    data_seed: int | None = Field(
        default=None,
        description="Seed that selects the training samples. By default the first n samples are used.",
    )
    holdout: int | None = Field(default=None, description="Number of held-out samples.")
    task: str = Field(
        default="auto", description="Task of the network: binary, multiclass, regression or auto."
    )
    steps: int = Field(
        default=800,
        description="Number of training steps with the loss that maximizes the margin of the classifier.",
        json_schema_extra=EXPERT,
    )
    gd_steps: int = Field(
        default=3000,
        description="Number of training steps for defenses that train with gradient descent.",
        json_schema_extra=EXPERT,
    )
    lr: float = Field(
        default=0.5,
        description="Learning rate for defenses that train with gradient descent and momentum 0.9.",
        json_schema_extra=EXPERT,
    )
    attack_steps: int = Field(default=800, description="Number of steps of every attack.")
    restarts: int = Field(default=2, description="Number of restarts of every attack.")
    releases: int = Field(
        default=16,
        ge=1,
        description="For defenses that add noise to the weights: number of published copies with "
        "independent noise. The attacker averages these copies.",
        json_schema_extra=EXPERT,
    )
    value_range: tuple[float, float] | None = Field(
        default=None,
        description="Lowest and highest pixel value. Attackers know this range and the mean of the training "
        "samples.",
    )
    subsets: int = Field(
        default=500,
        ge=200,
        description="Number of random subsets of the held-out samples. The permutation test counts "
        "matches with each subset to find the number of matches expected by chance.",
        json_schema_extra=EXPERT,
    )
    uniqueness: bool = Field(
        default=True,
        description="Also compute a certificate of uniqueness: how much of each reconstruction is the "
        "same for all training sets that give these weights.",
    )
    seed: int = Field(
        default=0,
        description="Seed of all random numbers: the initial weights, the attacks, and the "
        "secret keys of defenses.",
    )
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class SweepSettings(Settings):
    """Settings of a sweep, without the attack and the search space of the attack's settings."""

    trials: int = Field(
        default=32,
        ge=1,
        le=100_003,
        description="Number of trials of the sweep. Each trial runs the attack with other settings.",
    )
    sampler: str = Field(
        default="random",
        description="Sampler that chooses the settings of the trials: random, sobol or tpe.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of all random numbers: the settings of the trials, and the attacks.",
    )
    batch: int = Field(
        default=1,
        ge=1,
        description="Number of trials that run at the same time in one process, so that a GPU is used fully.",
        json_schema_extra=EXPERT,
    )
    wave: int = Field(
        default=16,
        ge=1,
        description="Number of trials whose settings are drawn together. The sampler 'tpe' then uses the "
        "results of these trials to draw the next settings.",
        json_schema_extra=EXPERT,
    )
    rungs: int = Field(
        default=0,
        ge=0,
        description="Number of rounds of successive halving. In each round, all trials pause, and the "
        "worst two thirds of the trials are stopped.",
        json_schema_extra=EXPERT,
    )
    objectives: tuple[str, ...] = Field(
        default=("residual",),
        description="What the sweep optimizes. 'residual' is the error of the attack's fit to the first "
        "layer. 'residual,agreement' also optimizes how well the restarts agree, and gives a Pareto "
        "front. For the attack 'unmix', pass 'expected': the expected number of correct reconstructions.",
        json_schema_extra=EXPERT,
    )
    engine: str = Field(
        default="local",
        description="Where trials run: local (in this process), processes (on this machine) or ray (a "
        "cluster).",
    )
    workers: int = Field(
        default=0,
        ge=0,
        description="Number of worker processes on this machine. 0 means as many as the cores allow.",
    )
    cpus: int = Field(
        default=1,
        ge=1,
        description="Number of CPU cores, and of threads, that each trial uses.",
        json_schema_extra=EXPERT,
    )
    gpus: float = Field(
        default=0.0,
        ge=0,
        description="Share of a GPU that each trial reserves on a Ray cluster, such as 0.5.",
        json_schema_extra=EXPERT,
    )
    address: str = Field(
        default="",
        description="Address of a Ray cluster, such as 'auto'. By default, a cluster is started on this "
        "machine.",
        json_schema_extra=EXPERT,
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How many times a trial is run again if its process or machine dies.",
        json_schema_extra=EXPERT,
    )
    storage: str | None = Field(
        default=None,
        description="URL of an Optuna storage. By default, a journal file in the folder of the sweep.",
        json_schema_extra=EXPERT,
    )
