"""Settings of attacks, as one pydantic model per kind of attack.

A class of ``residuum.attacks`` inherits the model of its settings, so that ``KKT(steps=3000)`` is an attack
with 3000 steps. The command line imports only the models, because importing the attacks takes seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from residuum.settings.base import Settings

if TYPE_CHECKING:
    import torch

FAST_PRECISIONS = ("tf32", "bf16")  # number formats that are float32 with faster matrix products
# Default learning rate of the multipliers (weights of the candidates), if no sparse prior for images is
# used.
LR_LAM = 0.01
# For some settings, the attack may choose another value that suits the data, so their default is None.
# These are the values that it uses otherwise.
FALLBACKS = {"lr_lam": LR_LAM}
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
PER_RUN = (*NUMBERS, "priors")  # settings that can have another value in each restart of an attack
PRIOR_NAMES = (  # names of the built-in priors, which are the keys of ``PRIORS``
    *("value-box", "haim2022-box", "haim2022-text-box", "loo2024-box", "multiplier-floor"),
    *("total-variation", "high-frequency", "sparse-gradients", "columns"),
    "none",
)


class AttackSettings(Settings):
    """Settings that every attack has."""

    device: str = Field(default="cpu", description="Where the attack runs: cpu or cuda.")
    seed: int = Field(default=0, ge=0, description="Seed of all random numbers.")
    seconds: float = Field(
        default=math.inf,
        gt=0,
        allow_inf_nan=True,
        description="Stop the attack after this many seconds of wall-clock time.",
    )

    def to_entry(self) -> dict[str, Any]:
        """Return the name of the attack and the settings that were set, as an entry for an audit.

        An audit has a list of such entries. Settings with the value None are left out, because TOML has no
        such value. The default of a missing setting applies.
        """
        entry_keys = {"attack", *self.model_fields_set}
        return {k: v for k, v in self.to_json().items() if k in entry_keys and v is not None}


class SearchSettings(AttackSettings):
    """Settings of attacks that optimize candidates (guesses of training samples)."""

    candidates: int = Field(
        default=0,
        ge=0,
        description="Number of candidates (guesses of training samples) in each restart. 0 means twice "
        "the number of training samples, or half the number of neurons of the first layer if the number "
        "of samples is not known.",
    )
    steps: int = Field(
        default=3000,
        gt=0,
        description="Number of optimization steps in each restart. A "
        "restart is one run from a new random start.",
    )
    lr_x: float = Field(
        default=0.01,
        gt=0,
        description="Learning rate of the candidates (guesses of training samples).",
    )
    sigma: float = Field(
        default=0.1,
        gt=0,
        description="Standard deviation of the random candidates (guesses of training "
        "samples) with which the search begins.",
    )
    dtype: Literal["auto", "tf32", "bf16", "float32", "float64"] = Field(
        default="auto",
        description="Number format of the attack. 'tf32' and 'bf16' mean float32 numbers whose matrix "
        "products are computed faster and less precisely. 'auto' means tf32 on a GPU and float64 on the "
        "CPU.",
    )

    @property
    def precision(self) -> str:
        """Name of the number format of the attack: if the setting is "auto", tf32 on a GPU, else float64."""
        if self.dtype != "auto":
            return self.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """Data type of PyTorch in which the attack stores reconstructed samples and weights."""
        import torch

        return (
            torch.float32 if self.precision in FAST_PRECISIONS else getattr(torch, self.precision)
        )


class RestartSettings(SearchSettings):
    """Settings of attacks that run several restarts (runs from different random starts)."""

    restarts: int = Field(
        default=4,
        gt=0,
        description="Number of independent runs of the attack, each from a new random start.",
    )
    lr_decay: float = Field(
        default=0.1,
        ge=0,
        description="Learning rate of the last step, divided by the learning rate of the first step.",
    )


class StationaritySettings(RestartSettings):
    """Settings of attacks that search for samples that solve a stationarity equation.

    A stationarity equation says that the weights are a sum of gradients at the training samples, weighted by
    multipliers.
    """

    optimizer: Literal["adam", "sgd"] = Field(
        default="adam",
        description="Optimizer that updates the candidates (guesses of training samples) "
        "and their multipliers (weights).",
    )
    momentum: float = Field(
        default=0.9, description="Momentum of the optimizer, if the optimizer is 'sgd'."
    )
    lr_lam: float | None = Field(
        default=None,
        ge=0,
        description=f"Learning rate of the multipliers (weights of the candidates). The default is "
        f"{LR_LAM:g}, or 0.003 if a sparse prior (a penalty for images) is used.",
    )
    lam_init: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Lowest and highest initial multiplier (weight of a candidate), in units of "
        "lam_scale. If lam_distribution is 'normal', the two numbers are the mean and the standard "
        "deviation.",
    )
    lam_distribution: Literal["uniform", "normal"] = Field(
        default="uniform",
        description="Distribution of the initial multipliers (weights of the candidates).",
    )
    lam_scale: Literal["auto", "mean", "one"] = Field(
        default="auto",
        description="Unit of the multipliers (weights of the candidates). one: 1. mean: 1/m for m "
        "candidates, as in the code of Haim et al. auto: the weighted sum of gradients is as large at the "
        "first step as the weights that it must fit.",
    )
    lam_min: float = Field(
        default=0.0,
        description="Smallest allowed multiplier (weight of a candidate), in units of lam_scale.",
    )
    lam_every: int = Field(
        default=0,
        ge=0,
        description="Interval in steps at which the multipliers (weights of the candidates) are set to "
        "their best values for the current candidates. 0 means never.",
    )
    surrogate: Literal["sigmoid", "softplus", "none"] = Field(
        default="sigmoid",
        description="Smooth function (surrogate) that replaces the derivative of the ReLU during the "
        "search.",
    )
    sharpness: float = Field(
        default=150.0,
        gt=0,
        description="Sharpness, at the last step, of the smooth function (surrogate) that replaces the "
        "derivative of the ReLU.",
    )
    sharpness_from: float = Field(
        default=10.0,
        description="Sharpness, at the first step, of the smooth function (surrogate) that replaces the "
        "derivative of the ReLU. Used only if anneal is 'geometric'.",
    )
    anneal: Literal["none", "geometric", "loo2024"] = Field(
        default="geometric",
        description="How the smooth function (surrogate) that replaces the derivative of the ReLU gets "
        "sharper during the search.",
    )
    normalize: bool = Field(
        default=True,
        description="Divide the squared error of each layer's equation by the squared norm of the layer's "
        "weights, so that all layers count equally.",
    )
    layers: Literal["auto", "all", "first"] = Field(
        default="auto",
        description="Layers whose weights the attack fits. 'auto' means the first layer of an MLP, "
        "because its other layers hardly change in training, and all layers of any other network.",
    )
    priors: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] | None = Field(
        default=None,
        description="Names and weights of priors, which are penalties on the candidates (guesses of "
        "training samples). By default, a sparse prior is used if the first layer shows that the samples "
        "are images. Known priors: "
        f"{', '.join(PRIOR_NAMES)}.",
    )
    constraint: Literal["project", "penalty"] = Field(
        default="project",
        description="How the candidates are kept in the known value range, and their multipliers at or "
        "above lam_min. project: after every step, values outside the range are moved to the nearest "
        "allowed value. penalty: values outside the range are only penalized.",
    )
    polish: float = Field(
        default=0.05,
        description="Share of the steps that use full float32 precision, at the end of the search, if "
        "dtype is 'tf32' or 'bf16'.",
    )
    compile: bool = Field(
        default=False,
        description="Speed up the attack on a GPU by fusing elementwise operations with "
        "torch.compile.",
    )
    split: Literal["none", "curvature"] = Field(
        default="none",
        description="Whether a candidate (guess of a training sample) can be split into two candidates "
        "during the search (Shen et al. 2026). curvature: a candidate is split along a direction in which "
        "the loss curves downwards.",
    )
    split_trigger: Literal["period", "stagnation", "gradient"] = Field(
        default="stagnation",
        description="When candidates are split in two. period: every split_every steps. stagnation: if "
        "the loss decreases by less than the share split_tolerance within split_every steps. gradient: if "
        "the norm of the gradient is at most split_tolerance, and the last split is at least split_every "
        "steps ago.",
    )
    split_every: int = Field(
        default=300,
        gt=0,
        description="Number of optimization steps after which candidates may be split in two again. The "
        "setting split_trigger describes when they are split.",
    )
    split_tolerance: float = Field(
        default=0.1,
        description="Candidates are split in two if a number is below this limit. If split_trigger is "
        "'stagnation', the number is the relative decrease of the loss. If split_trigger is 'gradient', "
        "the number is the norm of the gradient.",
    )
    split_threshold: float = Field(
        default=0.01,
        ge=0,
        description="A candidate (a guess of a training sample) is replaced by two candidates only if the "
        "loss curves downward between them by more than this number.",
    )
    split_relative: bool = Field(
        default=True,
        description="Scale split_threshold (the limit for splits of candidates) to the loss and the size "
        "of the candidates, so that the same threshold suits all networks.",
    )
    split_cap: float = Field(
        default=0.1,
        ge=0,
        description="Largest share of the candidates that are split in two at the same step. At least one "
        "candidate can always be split.",
    )
    split_limit: int = Field(
        default=0,
        ge=0,
        description="Largest number of candidates that splitting candidates in two may produce. 0 means "
        "four times the initial number.",
    )
    split_eta: float = Field(
        default=0.0,
        ge=0,
        description="Largest distance by which the two halves of a split candidate are moved apart. 0 "
        "means half the median norm of the candidates.",
    )
    split_zero: float = Field(
        default=1e-6,
        description="Stop splitting candidates if their relative squared error in fitting the weights is "
        "at most this number.",
    )
    split_merge: bool = Field(
        default=True,
        description="Before candidates are split in two, remove candidates with multiplier (weight) zero "
        "and merge similar candidates.",
    )
    split_eps: float = Field(
        default=1e-3,
        description="Tolerance eps of the check whether the search ended at a minimum of the loss. At a "
        "minimum, the norm of the gradient is at most eps, and no curvature is below -sqrt(eps).",
    )


class KKTSettings(StationaritySettings):
    """Settings of the attack on the KKT equation of margin maximization (Haim et al. 2022)."""

    rivals: Literal["tied", "best"] = Field(
        default="tied",
        description="For networks with several classes: which wrong classes of a sample get a multiplier "
        "(a term) in the equation of the attack. best: only the wrong class with the largest output. "
        "tied: every wrong class that shares the largest output.",
    )


class NTKSettings(StationaritySettings):
    """Settings of the attack on the weight update (Loo et al. 2024)."""

    gradients: Literal["theta", "theta0", "both"] = Field(
        default="theta",
        description="Weights at which the attack computes the gradients of the network: the trained "
        "weights (theta), the initial weights (theta0), or both.",
    )


class UnmixSettings(AttackSettings):
    """Settings of the unmixing attack, which separates the rows of the first layer into samples.

    By default, the attack compares runs with several values of the settings ``rank`` and ``strength``. If you
    set ``rank`` or ``strength``, the runs differ only in their random numbers.
    """

    domain: Literal["auto", "differences", "series", "coordinates"] = Field(
        default="auto",
        description="Transform that makes most values of a training sample close to zero, such as "
        "differences of neighboring pixels. 'auto' chooses the transform by the shape of the samples.",
    )
    rank: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Number of samples that a run tries to recover, as a share of the rank of the first "
        "layer's weight matrix. 0 means that several shares are tried.",
    )
    strength: float = Field(
        default=0.0,
        ge=0,
        description="Parameter a of the function log cosh(a y), which measures how sparse a recovered "
        "sample y is. 0 means that several values are tried.",
    )
    starts: int = Field(
        default=0,
        ge=0,
        description="Number of random starting points from which a run searches. 0 means as many as the "
        "time limit allows.",
    )
    restarts: int = Field(
        default=4,
        gt=0,
        description="Number of independent runs of the attack, each from a new random start. Used only if "
        "rank or strength is not 0.",
    )


class ModelInversionSettings(SearchSettings):
    """Settings of model inversion, a simple attack for comparison that maximizes a class output."""

    steps: int = Field(
        default=200,
        gt=0,
        description="Number of gradient steps of the search for one training sample.",
    )


class ForestSettings(AttackSettings):
    """Settings of the attack that recovers the training table of a random forest."""

    rows: bool = Field(
        default=True,
        description="For classification forests: reconstruct all columns of the training table, not only the "
        "labels. The search takes at most 60 seconds and needs the package ortools (the extra 'trees' of "
        "residuum).",
    )


# Settings of the attacks of this package, by the name of the attack.
MODELS: dict[str, type[AttackSettings]] = {
    "auto": StationaritySettings,
    "kkt": KKTSettings,
    "binary-kkt": KKTSettings,
    "multiclass-kkt": KKTSettings,
    "weight-decay": StationaritySettings,
    "ntk": NTKSettings,
    "moment": StationaritySettings,
    "unmix": UnmixSettings,
    "unmix-moment": UnmixSettings,
    "trunk": AttackSettings,
    "trunk-moment": AttackSettings,
    "invert": RestartSettings,
    "invert-moment": RestartSettings,
    "geiping2020": RestartSettings,
    "geiping2020-moment": RestartSettings,
    "forest": ForestSettings,
    "corners": AttackSettings,
    "polynomial": AttackSettings,
    "model-inversion": ModelInversionSettings,
    "first-layer-weights": AttackSettings,
}
