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

# Number of restarts in each trial of a sweep. The sweep measures how well restarts agree, so at least two
# are needed.
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

    @field_validator("drop", mode="before")
    @classmethod
    def _list_columns(cls, columns: Any) -> Any:
        return (columns,) if isinstance(columns, str) else tuple(columns)


class ExposureRequest(TableSettings):
    """Settings of :func:`residuum.exposure`."""

    surface: str = Field(
        default="auto",
        description="What an attacker would read: weights, change (trained minus initial weights) or "
        "moment (the optimizer state). 'auto' means moment if the optimizer state is known, otherwise "
        "change if the initial weights are known, otherwise weights.",
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
        description="Name of the column that holds the group of each record. The result names it.",
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
    top: int = Field(
        default=10,
        ge=0,
        description="Number of records whose images are stored in the "
        "result, those with the highest risk first.",
    )
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class DefenseRequest(Settings):
    """Settings of :func:`residuum.defend`, which tests defenses against attacks."""

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
    holdout: int | None = Field(
        default=None, description="Number of held-out samples, which the network is not trained on."
    )
    task: str = Field(
        default="auto", description="Task of the network: binary, multiclass, regression or auto."
    )
    steps: int = Field(
        default=800,
        description="Number of training steps, if the network is trained by margin maximization.",
        json_schema_extra=EXPERT,
    )
    gd_steps: int = Field(
        default=3000,
        description="Number of training steps of gradient descent, if a defense needs gradient descent.",
        json_schema_extra=EXPERT,
    )
    lr: float = Field(
        default=0.5,
        description="Learning rate of the training by gradient descent (with momentum 0.9), if a defense "
        "needs gradient descent.",
        json_schema_extra=EXPERT,
    )
    attack_steps: int = Field(
        default=800, description="Number of optimization steps in each restart of every attack."
    )
    restarts: int = Field(
        default=2, description="Number of restarts (runs from a new random start) of every attack."
    )
    releases: int = Field(
        default=16,
        ge=1,
        description="If a defense adds noise to the weights: number of noisy releases of the same network "
        "that the simulated attacker averages.",
        json_schema_extra=EXPERT,
    )
    value_range: tuple[float, float] | None = Field(
        default=None,
        description="Lowest and highest possible pixel value. The simulated attackers know this range and "
        "the mean of the training samples.",
    )
    subsets: int = Field(
        default=500,
        ge=200,
        description="Number of random subsets of held-out samples. A permutation test with these subsets "
        "shows how many samples are matched by chance.",
        json_schema_extra=EXPERT,
    )
    uniqueness: bool = Field(
        default=True,
        description="Also prove how much any other training set that fits the same weights must share "
        "with a reconstructed sample.",
    )
    seed: int = Field(
        default=0,
        description="Seed of the initial weights, of the attacks, and of the random numbers "
        "that a defense keeps secret.",
    )
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class SweepSettings(Settings):
    """Settings of a sweep (an attack run with many settings), except the attack and the ranges to search."""

    trials: int = Field(
        default=32,
        ge=1,
        le=100_003,
        description="Number of trials. Each trial runs the attack with other settings.",
    )
    sampler: str = Field(
        default="random",
        description="Sampler that chooses the settings of the trials: random, sobol or tpe.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of the settings of the trials and of every attack.",
    )
    batch: int = Field(
        default=1,
        ge=1,
        description="Number of trials (attacks with different settings) that one process runs at the same "
        "time, to use a GPU fully.",
        json_schema_extra=EXPERT,
    )
    wave: int = Field(
        default=16,
        ge=1,
        description="Number of trials whose settings are chosen together. The sampler 'tpe' waits for the "
        "results of these trials before it chooses the next settings.",
        json_schema_extra=EXPERT,
    )
    rungs: int = Field(
        default=0,
        ge=0,
        description="Number of times that the sweep stops the worst two thirds of its trials early "
        "(successive halving).",
        json_schema_extra=EXPERT,
    )
    objectives: tuple[str, ...] = Field(
        default=("residual",),
        description="What the sweep optimizes. residual: how well a trial fits the weights of the first "
        "layer. residual,agreement: also how well the restarts of a trial agree. expected: how many "
        "reconstructions are probably real (only for the attack 'unmix').",
        json_schema_extra=EXPERT,
    )
    engine: str = Field(
        default="local",
        description="Where the trials of the sweep run. local: in this "
        "process. processes: in worker processes on this machine. ray: on a Ray cluster.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        description="Number of worker processes on this machine. 0 means as many as the processor cores "
        "allow.",
    )
    cpus: int = Field(
        default=1,
        ge=1,
        description="Number of processor cores, and of threads, that each trial uses.",
        json_schema_extra=EXPERT,
    )
    gpus: float = Field(
        default=0.0,
        ge=0,
        description="Share of a GPU that each trial reserves on a Ray cluster.",
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
        description="Number of times that a trial is run again if its process or its machine dies.",
        json_schema_extra=EXPERT,
    )
    storage: str | None = Field(
        default=None,
        description="URL of a database for the results of the trials (an Optuna storage). By default, the "
        "results are written to a file in the folder of the sweep.",
        json_schema_extra=EXPERT,
    )
