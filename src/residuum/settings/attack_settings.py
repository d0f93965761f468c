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
LR_LAM = 0.01  # default learning rate of the multipliers, if no sparse prior for images is used
# Default values of settings whose default is None, because the attack chooses their value by the data.
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
    """Settings of attacks that optimize candidates for training samples."""

    candidates: int = Field(
        default=0,
        ge=0,
        description="Number of candidates for training samples per restart. 0 means twice the number of "
        "training samples, if this number is known, or half the number of neurons of the first layer.",
    )
    steps: int = Field(default=3000, gt=0, description="Number of steps of every restart.")
    lr_x: float = Field(default=0.01, gt=0, description="Learning rate of the candidates.")
    sigma: float = Field(
        default=0.1, gt=0, description="Standard deviation of the random initial candidates."
    )
    dtype: Literal["auto", "tf32", "bf16", "float32", "float64"] = Field(
        default="auto",
        description="Number format of the attack. 'tf32' and 'bf16' are float32 with rounded matrix "
        "products. 'auto' is tf32 on a GPU and float64 on the CPU.",
    )

    @property
    def precision(self) -> str:
        """Name of the number format of the attack. For "auto", tf32 on a GPU and float64 on the CPU."""
        if self.dtype != "auto":
            return self.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """Data type of PyTorch in which the attack stores candidates and weights."""
        import torch

        return (
            torch.float32 if self.precision in FAST_PRECISIONS else getattr(torch, self.precision)
        )


class RestartSettings(SearchSettings):
    """Settings of attacks that run several restarts."""

    restarts: int = Field(default=4, gt=0, description="Number of independent runs of the attack.")
    lr_decay: float = Field(
        default=0.1,
        ge=0,
        description="Ratio of the last to the first learning rate.",
    )


class StationaritySettings(RestartSettings):
    """Settings of attacks that minimize the residual of a stationarity equation.

    A stationarity equation says that the weights are a sum of gradients at the training samples, weighted by
    multipliers.
    """

    optimizer: Literal["adam", "sgd"] = Field(
        default="adam", description="Optimizer that updates the candidates and the multipliers."
    )
    momentum: float = Field(default=0.9, description="Momentum of the optimizer 'sgd'.")
    lr_lam: float | None = Field(
        default=None,
        ge=0,
        description=f"Learning rate of the multipliers. By default {LR_LAM:g}, or 0.003 together with a "
        "sparse prior.",
    )
    lam_init: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Lowest and highest initial multiplier, in units of the scale that lam_scale sets. "
        "If lam_distribution is 'normal', the two numbers are the mean and the standard deviation.",
    )
    lam_distribution: Literal["uniform", "normal"] = Field(
        default="uniform", description="Distribution of the initial multipliers."
    )
    lam_scale: Literal["auto", "mean", "one"] = Field(
        default="auto",
        description="Scale of the multipliers. one: 1. mean: 1/m for m candidates, as in the released code "
        "of Haim et al. auto: the scale at which the weighted sum of gradients and the weights that "
        "the sum must fit are equally large at the first step.",
    )
    lam_min: float = Field(
        default=0.0,
        description="Smallest allowed multiplier, in units of the scale that lam_scale sets.",
    )
    lam_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps after which the multipliers are fitted exactly to the current "
        "candidates. 0 means never.",
    )
    surrogate: Literal["sigmoid", "softplus", "none"] = Field(
        default="sigmoid",
        description="Surrogate: the smooth function that replaces the derivative of the ReLU in the search.",
    )
    sharpness: float = Field(
        default=150.0,
        gt=0,
        description="Sharpness of the surrogate (the smooth derivative of the ReLU) at the last step.",
    )
    sharpness_from: float = Field(
        default=10.0,
        description="Sharpness of the surrogate (the smooth derivative of the ReLU) at the first step. Used "
        "only if anneal is 'geometric'.",
    )
    anneal: Literal["none", "geometric", "loo2024"] = Field(
        default="geometric",
        description="How the sharpness of the surrogate (the smooth derivative of the ReLU) increases during "
        "the search.",
    )
    normalize: bool = Field(
        default=True,
        description="Divide the squared residual of each layer by the squared norm of the weights that it "
        "must fit in this layer.",
    )
    layers: Literal["auto", "all", "first"] = Field(
        default="auto",
        description="Layers whose residuals are minimized. 'auto' means the first layer of an MLP, and all "
        "layers of any other network. The other layers of an MLP hardly change in training.",
    )
    priors: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] | None = Field(
        default=None,
        description="Names and weights of priors, which are penalties on the candidates. By default, "
        "images get a sparse prior if the first layer shows that the samples are images. Known priors: "
        f"{', '.join(PRIOR_NAMES)}.",
    )
    constraint: Literal["project", "penalty"] = Field(
        default="project",
        description="How candidates are kept in the known value range, and multipliers at or above "
        "lam_min. project: after every step, values outside their range are moved to its bound. penalty: "
        "only priors penalize such values.",
    )
    polish: float = Field(
        default=0.05,
        description="Share of the steps, at the end of the search, that use full float32 if dtype is "
        "'tf32' or 'bf16'.",
    )
    compile: bool = Field(
        default=False, description="Fuse elementwise operations with torch.compile on a GPU."
    )
    split: Literal["none", "curvature"] = Field(
        default="none",
        description="Whether candidates are split in two during the search (Shen et al. 2026). curvature: a "
        "candidate is split along a direction in which the loss has negative curvature.",
    )
    split_trigger: Literal["period", "stagnation", "gradient"] = Field(
        default="stagnation",
        description="When candidates are split. period: every split_every steps. stagnation: if the "
        "relative decrease of the loss within split_every steps is below split_tolerance. gradient: if the "
        "norm of the gradient is at most split_tolerance, and the last split is at least split_every "
        "steps ago.",
    )
    split_every: int = Field(
        default=300,
        gt=0,
        description="Number of steps between two splits of candidates. split_trigger describes the rule.",
    )
    split_tolerance: float = Field(
        default=0.1,
        description="Limit below which candidates are split. If split_trigger is 'stagnation', the limit is "
        "for the relative decrease of the loss. If split_trigger is 'gradient', the limit is for the norm of "
        "the gradient.",
    )
    split_threshold: float = Field(
        default=0.01,
        ge=0,
        description="A candidate is split if the curvature of the loss is below minus this number when the "
        "two halves of the candidate move apart. This curvature is the smallest eigenvalue of the "
        "splitting matrix.",
    )
    split_relative: bool = Field(
        default=True,
        description="Multiply split_threshold by the loss divided by the squared median length of the "
        "candidates, so that one threshold suits networks of every scale.",
    )
    split_cap: float = Field(
        default=0.1,
        ge=0,
        description="Largest share of the candidates that are split at the same step. At least one "
        "candidate can be split.",
    )
    split_limit: int = Field(
        default=0,
        ge=0,
        description="Largest number of candidates after splits. 0 means four times the initial number.",
    )
    split_eta: float = Field(
        default=0.0,
        ge=0,
        description="Largest distance by which a split moves a candidate. 0 means half the median length of "
        "the candidates.",
    )
    split_zero: float = Field(
        default=1e-6,
        description="If the relative squared residual is at most this number, the candidates fit the "
        "weights, and no more candidates are split.",
    )
    split_merge: bool = Field(
        default=True,
        description="Drop candidates with zero multipliers and merge similar candidates before candidates "
        "are split.",
    )
    split_eps: float = Field(
        default=1e-3,
        description="Tolerance eps of the check whether a restart ended at a minimum of the loss. The check "
        "needs a gradient norm of at most eps and no curvature below -sqrt(eps).",
    )


class KKTSettings(StationaritySettings):
    """Settings of the KKT attack (Haim et al. 2022, Buzaglo et al. 2023)."""

    rivals: Literal["tied", "best"] = Field(
        default="tied",
        description="With several classes: which wrong classes of a sample have a multiplier. tied: every "
        "wrong class whose output equals the largest output of a wrong class. best: only one wrong class "
        "with the largest output.",
    )


class NTKSettings(StationaritySettings):
    """Settings of the attack on the weight update (Loo et al. 2024)."""

    gradients: Literal["theta", "theta0", "both"] = Field(
        default="theta",
        description="Weights at which the gradients of the network are computed: the final weights "
        "(theta), the initial weights (theta0), or both.",
    )


class UnmixSettings(AttackSettings):
    """Settings of the unmixing attack, which separates the rows of the first layer into samples.

    By default, the attack compares runs with several values of the settings ``rank`` and ``strength``. If you
    set ``rank`` or ``strength``, the runs differ only in their random numbers.
    """

    domain: Literal["auto", "differences", "series", "coordinates"] = Field(
        default="auto",
        description="Transform after which most values of a sample are close to zero, such as differences "
        "of neighboring pixels. 'auto' chooses the transform by the shape of the samples.",
    )
    rank: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Number of samples that a run separates, as a share of the rank of the first layer's "
        "weight matrix. The rank counts the singular values above the noise of the initial weights. 0 means "
        "that several shares are compared.",
    )
    strength: float = Field(
        default=0.0,
        ge=0,
        description="Strength a of the contrast function log cosh(a y), which measures how sparse a "
        "separated sample y is. 0 means that several strengths are compared.",
    )
    starts: int = Field(
        default=0,
        ge=0,
        description="Number of random starting points of a run. 0 means as many as the time limit allows.",
    )
    restarts: int = Field(
        default=4,
        gt=0,
        description="Number of independent runs of the attack. Used only if rank or strength is not 0.",
    )


class ModelInversionSettings(SearchSettings):
    """Settings of model inversion, a baseline that maximizes the output of a class."""

    steps: int = Field(default=200, gt=0, description="Number of steps of gradient ascent.")


class ForestSettings(AttackSettings):
    """Settings of the attack that recovers the training table of a random forest."""

    rows: bool = Field(
        default=True,
        description="Estimate the values of the columns of classification forests, not only the labels. The "
        "search takes at most 60 seconds and needs the package ortools (the extra 'trees' of residuum).",
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
