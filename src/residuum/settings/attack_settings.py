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
LR_LAM = 0.01  # learning rate of the multipliers, if no setting and no prior for images decides it
FALLBACKS = {"lr_lam": LR_LAM}  # values of settings that the attack usually chooses by the data
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
PER_RUN = (*NUMBERS, "priors")  # settings that can differ between runs of one attack
PRIOR_NAMES = (  # built-in priors, the keys of ``PRIORS``
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
        """Return the name of the attack and the settings that were set, as an entry of an audit's list.

        Settings with the value None are left out, because TOML has no such value. Their defaults apply.
        """
        names = {"attack", *self.model_fields_set}
        return {k: v for k, v in self.to_json().items() if k in names and v is not None}


class SearchSettings(AttackSettings):
    """Settings of attacks that optimize candidates for training samples."""

    candidates: int = Field(
        default=0,
        ge=0,
        description="Number of candidates for training samples per restart; 0 for twice the known number "
        "of samples, or half the neurons of the first layer.",
    )
    steps: int = Field(default=3000, gt=0, description="Number of steps of every restart.")
    lr_x: float = Field(default=0.01, gt=0, description="Learning rate of the candidates.")
    sigma: float = Field(
        default=0.1, gt=0, description="Standard deviation of the random initial candidates."
    )
    dtype: Literal["auto", "tf32", "bf16", "float32", "float64"] = Field(
        default="auto",
        description="Number format of the attack. tf32 and bf16 are float32 with rounded matrix products. "
        "auto is tf32 on a GPU and float64 on the CPU.",
    )

    @property
    def precision(self) -> str:
        """Name of the number format of the attack. "auto" becomes tf32 on a GPU and float64 on the CPU."""
        if self.dtype != "auto":
            return self.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """Number format in which the attack stores candidates and weights."""
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
    """Settings of attacks that minimize the residual of a stationarity equation."""

    optimizer: Literal["adam", "sgd"] = Field(
        default="adam", description="Optimizer that updates the candidates and the multipliers."
    )
    momentum: float = Field(default=0.9, description="Momentum of the optimizer sgd.")
    lr_lam: float | None = Field(
        default=None,
        ge=0,
        description=f"Learning rate of the multipliers. By default {LR_LAM:g}, or 0.003 together with a "
        "sparse prior.",
    )
    lam_init: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Range of the initial multipliers, in units of their scale. If lam_distribution is "
        "normal: their mean and standard deviation.",
    )
    lam_distribution: Literal["uniform", "normal"] = Field(
        default="uniform", description="Distribution of the initial multipliers."
    )
    lam_scale: Literal["auto", "mean", "one"] = Field(
        default="auto",
        description="Scale of the multipliers. one is a scale of 1. mean is 1/m for m candidates, as in the "
        "released code of Haim et al. auto makes the weighted sum of gradients and its target "
        "equally large at the start.",
    )
    lam_min: float = Field(
        default=0.0, description="Smallest multiplier, in units of the scale of the multipliers."
    )
    lam_every: int = Field(
        default=0,
        ge=0,
        description="Number of steps after which the multipliers are set to the best values for the "
        "candidates; 0 for never.",
    )
    surrogate: Literal["sigmoid", "softplus", "none"] = Field(
        default="sigmoid",
        description="Smooth function that replaces the derivative of the ReLU in the search.",
    )
    sharpness: float = Field(
        default=150.0, gt=0, description="Sharpness of the surrogate at the last step."
    )
    sharpness_from: float = Field(
        default=10.0,
        description="Sharpness of the surrogate at the first step, if anneal is geometric.",
    )
    anneal: Literal["none", "geometric", "loo2024"] = Field(
        default="geometric",
        description="How the sharpness of the surrogate increases during the search.",
    )
    normalize: bool = Field(
        default=True,
        description="Divide the squared residual of each layer by the squared norm of the layer's target.",
    )
    layers: Literal["auto", "all", "first"] = Field(
        default="auto",
        description="Layers whose residuals are minimized. auto is the first layer of an MLP, because the "
        "other layers of an MLP hardly leave their initialization, and all layers of any "
        "other network.",
    )
    priors: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] | None = Field(
        default=None,
        description="Names and weights of priors, which are penalties on the candidates. By default, the "
        "priors suit the appearance of the data in the first layer. Known priors: "
        f"{', '.join(PRIOR_NAMES)}.",
    )
    constraint: Literal["project", "penalty"] = Field(
        default="project",
        description="How candidates are kept in the known value range, and multipliers at or above "
        "lam_min. project moves them there after every step. penalty leaves this to the "
        "priors.",
    )
    polish: float = Field(
        default=0.05,
        description="Share of the steps, at the end of the search, that use full float32 if dtype is tf32 "
        "or bf16.",
    )
    compile: bool = Field(
        default=False, description="Fuse elementwise operations with torch.compile on a GPU."
    )
    split: Literal["none", "curvature"] = Field(
        default="none",
        description="Whether candidates are split along negative curvature (Shen et al. 2026).",
    )
    split_trigger: Literal["period", "stagnation", "gradient"] = Field(
        default="stagnation",
        description="When candidates are split. period: every split_every steps. stagnation: if the loss "
        "fell by less than the share split_tolerance within split_every steps. gradient: if "
        "the norm of the gradient is at most split_tolerance, and at least split_every steps "
        "have passed since the last splits.",
    )
    split_every: int = Field(
        default=300,
        gt=0,
        description="Number of steps between splits of candidates, see split_trigger.",
    )
    split_tolerance: float = Field(
        default=0.1,
        description="Relative decrease of the loss, or norm of the gradient, below which candidates are "
        "split, see split_trigger.",
    )
    split_threshold: float = Field(
        default=0.01,
        ge=0,
        description="A candidate is split if the smallest eigenvalue of its splitting matrix is below "
        "minus this threshold.",
    )
    split_relative: bool = Field(
        default=True,
        description="Multiply split_threshold by the loss over the candidates' squared length, so that it "
        "suits every network.",
    )
    split_cap: float = Field(
        default=0.1,
        ge=0,
        description="Share of the candidates that are split at the same step, at least one candidate.",
    )
    split_limit: int = Field(
        default=0,
        ge=0,
        description="Largest number of candidates after splits; 0 for four times the initial number.",
    )
    split_eta: float = Field(
        default=0.0,
        ge=0,
        description="Largest distance by which a split moves a candidate; 0 for half the candidates' "
        "median length.",
    )
    split_zero: float = Field(
        default=1e-6,
        description="Relative squared residual at which the attack fits the weights, so that no more "
        "candidates are split.",
    )
    split_merge: bool = Field(
        default=True,
        description="Drop candidates with zero multipliers and merge similar candidates before candidates "
        "are split.",
    )
    split_eps: float = Field(
        default=1e-3,
        description="Tolerance eps of the second-order stationarity that is reported at the end of the "
        "search.",
    )


class KKTSettings(StationaritySettings):
    """Settings of the KKT attack (Haim et al. 2022, Buzaglo et al. 2023)."""

    rivals: Literal["tied", "best"] = Field(
        default="tied",
        description="Rival classes that have a multiplier, if there are several classes: every class that "
        "ties with the best rival (tied), or the best rival only (best).",
    )


class NTKSettings(StationaritySettings):
    """Settings of the attack on the weight update (Loo et al. 2024)."""

    gradients: Literal["theta", "theta0", "both"] = Field(
        default="theta",
        description="Weights at which gradients are taken: the final weights (theta), the initial weights "
        "(theta0), or both.",
    )


class UnmixSettings(AttackSettings):
    """Settings of the unmixing attack, which separates the rows of the first layer into samples.

    If rank or strength is set, the restarts differ only in their random numbers.
    """

    domain: Literal["auto", "differences", "series", "coordinates"] = Field(
        default="auto",
        description="Representation in which the samples are sparse. auto chooses the representation by "
        "the shape of the samples.",
    )
    rank: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the clean directions of the first layer to unmix; 0 to compare several "
        "shares.",
    )
    strength: float = Field(
        default=0.0,
        ge=0,
        description="Strength of the contrast function; 0 to compare several strengths.",
    )
    starts: int = Field(
        default=0,
        ge=0,
        description="Number of random starts that a run improves together; 0 for as many as the time "
        "allows.",
    )
    restarts: int = Field(
        default=4,
        gt=0,
        description="Number of independent runs of the attack, if rank or strength is set.",
    )


class ModelInversionSettings(SearchSettings):
    """Settings of model inversion, a baseline that maximizes the output of a class."""

    steps: int = Field(default=200, gt=0, description="Number of steps of gradient ascent.")


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
    "forest": AttackSettings,
    "corners": AttackSettings,
    "polynomial": AttackSettings,
    "model-inversion": ModelInversionSettings,
    "first-layer-weights": AttackSettings,
}
