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
        description="What an attacker would read: weights, change (the weight update) or moment (the "
        "optimizer state). 'auto' means 'moment' if the optimizer state is known, or else 'change' if the "
        "initial weights are known, or else 'weights'.",
    )
    task: str = Field(
        default="auto", description="Task of the network: binary, multiclass, regression or auto."
    )
    arch: str | None = Field(
        default=None,
        description="Architecture of the network, if the file does not state it.",
        json_schema_extra=EXPERT,
    )
    model_code: str | None = Field(
        default=None,
        description="Code that makes the network, as package.module:factory, if --arch cannot describe it. "
        "The code is run, so it needs --trust-code.",
        json_schema_extra=EXPERT,
    )
    grouped_by: str = Field(
        default="",
        description="Name of the column with the group of each record. The name is shown in the result.",
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
        description="Delta of (epsilon, delta)-differential privacy, for the lower bound on epsilon. 0 means "
        "pure differential privacy.",
        json_schema_extra=EXPERT,
    )
    attributes: bool = Field(
        default=False,
        description="Also test for which records an attacker who knows the other columns can infer a missing "
        "value. The test needs a table and held-out records.",
    )
    top: int = Field(default=10, ge=0, description="Number of records to show with their images.")
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class DefenseRequest(Settings):
    """Settings of :func:`residuum.defend`."""

    arch: str | None = Field(
        default=None,
        description="Architecture of the network. By default an MLP with two hidden layers of 100 neurons.",
    )
    n: int | None = Field(
        default=None,
        description="Number of training samples. Every label gets the same number of samples. By default all "
        "samples, or half of them if the held-out samples come from the same file.",
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
        description="Number of training steps of margin maximization.",
        json_schema_extra=EXPERT,
    )
    gd_steps: int = Field(
        default=3000,
        description="Number of training steps of gradient descent, if a defense needs gradient descent.",
        json_schema_extra=EXPERT,
    )
    lr: float = Field(
        default=0.5,
        description="Learning rate of gradient descent with momentum 0.9, if a defense needs gradient "
        "descent.",
        json_schema_extra=EXPERT,
    )
    attack_steps: int = Field(default=800, description="Number of steps of every attack.")
    restarts: int = Field(default=2, description="Number of restarts of every attack.")
    releases: int = Field(
        default=16,
        ge=1,
        description="Number of releases with independent noise that an attacker averages, if a defense adds "
        "noise to the weights.",
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
        description="Number of random held-out subsets in the permutation test, which compares recovered "
        "samples with chance.",
        json_schema_extra=EXPERT,
    )
    uniqueness: bool = Field(
        default=True,
        description="Compute how much of a sample every other training set that fits the weights must share.",
    )
    seed: int = Field(
        default=0, description="Seed of the initial weights, the attacks and the secrets."
    )
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class SweepSettings(Settings):
    """Settings of a sweep, without the attack and the search space of the attack's settings."""

    trials: int = Field(
        default=32,
        ge=1,
        le=100_003,
        description="Number of trials, each with other settings of the attack.",
    )
    sampler: str = Field(
        default="random",
        description="Sampler that chooses the settings of the trials: random, sobol or tpe.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of the trials and of every attack."
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
        description="Number of times that a sweep pauses all trials and stops the worst two thirds of the "
        "trials (successive halving).",
        json_schema_extra=EXPERT,
    )
    objectives: tuple[str, ...] = Field(
        default=("residual",),
        description="What the sweep optimizes: residual (of the first layer), or residual,agreement (also "
        "the agreement of the restarts) for a Pareto front. For the attack 'unmix': expected (number of "
        "reconstructions that are expected to be real).",
        json_schema_extra=EXPERT,
    )
    engine: str = Field(default="local", description="Where trials run: local, processes or ray.")
    workers: int = Field(
        default=0,
        ge=0,
        description="Number of worker processes on this machine. 0 means as many as the cores allow.",
    )
    cpus: int = Field(
        default=1,
        ge=1,
        description="Number of cores and threads of a trial.",
        json_schema_extra=EXPERT,
    )
    gpus: float = Field(
        default=0.0,
        ge=0,
        description="Share of a GPU that a Ray trial reserves.",
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
