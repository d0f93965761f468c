"""Settings of the verbs ``exposure``, ``defend`` and ``sweep``.

The verbs check their keywords with these models, and the command line generates its options from the models.
The models are not in the modules of the verbs, because these modules import torch, and help texts must be
fast.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from residuum.settings.base import EXPERT, Settings

# Restarts in each trial of a sweep. To measure agreement between restarts, a trial needs at least 2.
TRIAL_RESTARTS = 2


class ExposureRequest(Settings):
    """Settings of :func:`residuum.exposure`."""

    surface: str = Field(
        default="auto",
        description="Attack surface: weights, change (the weight update) or moment (the optimizer state). "
        "auto is the last of these three that is known.",
    )
    task: str = Field(
        default="auto", description="Task of the network: binary, multiclass, regression or auto."
    )
    arch: str | None = Field(
        default=None,
        description="Architecture of the network, if the file does not state it.",
        json_schema_extra=EXPERT,
    )
    grouped_by: str = Field(
        default="", description="Name of the groups of records, such as the name of a column."
    )
    confidence: float = Field(
        default=0.95,
        ge=0.5,
        lt=1,
        description="Confidence of the lower bound on epsilon.",
        json_schema_extra=EXPERT,
    )
    delta: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Delta of the lower bound on epsilon; 0 for pure differential privacy.",
        json_schema_extra=EXPERT,
    )
    top: int = Field(default=10, ge=0, description="Number of records to show with their images.")
    device: str = Field(default="cpu", description="Where to compute: cpu or cuda.")


class DefenseRequest(Settings):
    """Settings of :func:`residuum.defend`."""

    arch: str | None = Field(
        default=None,
        description="Architecture of the network; by default two hidden layers of 100 neurons.",
    )
    n: int | None = Field(
        default=None,
        description="Number of training samples, the same for each label. By default all samples, or half "
        "of them if the held-out samples come from the same file.",
    )
    data_root: Path | None = Field(
        default=None,
        description="Folder of downloaded datasets; by default the environment variable RESIDUUM_DATA.",
    )
    data_seed: int | None = Field(
        default=None, description="Seed that selects the training samples; by default the first n."
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
        description="Number of noisy releases that the adaptive attacker averages.",
        json_schema_extra=EXPERT,
    )
    value_range: tuple[float, float] | None = Field(
        default=None,
        description="Pixel range that attackers know, together with the training mean.",
    )
    subsets: int = Field(
        default=500,
        ge=200,
        description="Number of held-out subsets in the permutation test.",
        json_schema_extra=EXPERT,
    )
    uniqueness: bool = Field(
        default=True,
        description="Certify how much of a sample is equal in all training sets that explain the weights.",
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
        description="How the settings of a trial are chosen: random, sobol or tpe.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of the trials and of every attack."
    )
    batch: int = Field(
        default=1,
        ge=1,
        description="Number of trials that run together in one program, to fill a GPU.",
        json_schema_extra=EXPERT,
    )
    wave: int = Field(
        default=16,
        ge=1,
        description="Number of trials whose settings a sampler draws before it learns from their results.",
        json_schema_extra=EXPERT,
    )
    rungs: int = Field(
        default=0,
        ge=0,
        description="Number of pauses of successive halving. Each pause ends two thirds of the trials.",
        json_schema_extra=EXPERT,
    )
    objectives: tuple[str, ...] = Field(
        default=("residual",),
        description="What the sweep optimizes: residual, or residual and agreement for a Pareto front. "
        "For unmix: expected.",
        json_schema_extra=EXPERT,
    )
    engine: str = Field(default="local", description="Where trials run: local, processes or ray.")
    workers: int = Field(
        default=0,
        ge=0,
        description="Number of worker processes on this machine; 0 for as many as the cores allow.",
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
        description="Address of a Ray cluster, such as auto. By default, a cluster is started on this "
        "machine.",
        json_schema_extra=EXPERT,
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="How often a trial is repeated if its process or machine dies.",
        json_schema_extra=EXPERT,
    )
    storage: str | None = Field(
        default=None,
        description="URL of an Optuna storage. By default, a journal file in the folder of the sweep.",
        json_schema_extra=EXPERT,
    )
