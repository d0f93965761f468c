"""The settings of every attack, one model per attack.

An attack class in ``residuum.attacks`` inherits its model, so that ``KKT(steps=3000)`` is an attack with
these settings. The command line imports only the models, because importing the attacks takes seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from residuum.settings.base import Settings

if TYPE_CHECKING:
    import torch

FAST_PRECISIONS = ("tf32", "bf16")  # float32 numbers with faster matrix products during the search
LR_LAM = 0.01  # learning rate of the multipliers if neither the user nor the data decides it
FALLBACKS = {"lr_lam": LR_LAM}  # values of the settings that the data usually decides
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
PER_RUN = (*NUMBERS, "priors")  # settings that can differ between runs of one program
PRIOR_NAMES = (  # built-in priors, the keys of ``PRIORS``
    *("value-box", "haim2022-box", "haim2022-text-box", "loo2024-box", "multiplier-floor"),
    *("total-variation", "high-frequency", "sparse-gradients", "columns"),
    "none",
)


class AttackSettings(Settings):
    """Settings of every attack."""

    device: str = Field(default="cpu", description="Where the attack runs: cpu or cuda.")
    seed: int = Field(default=0, ge=0, description="Seed of all random numbers.")
    seconds: float = Field(
        default=math.inf, gt=0, allow_inf_nan=True, description="Stop after this wall-clock time."
    )

    def to_entry(self) -> dict[str, Any]:
        """Return the name of the attack and the settings that were set, for the list of an audit.

        None stands for a default. It is left out, because a configuration in TOML has no such value.
        """
        names = {"attack", *self.model_fields_set}
        return {k: v for k, v in self.to_json().items() if k in names and v is not None}


class SearchSettings(AttackSettings):
    """Settings of attacks that optimize candidates."""

    candidates: int = Field(
        default=0,
        ge=0,
        description="Candidates per restart; 0 for twice the known number of samples, or half the "
        "neurons of the first layer.",
    )
    steps: int = Field(default=3000, gt=0, description="Number of steps of every restart.")
    lr_x: float = Field(default=0.01, gt=0, description="Learning rate of the candidates.")
    sigma: float = Field(
        default=0.1, gt=0, description="Standard deviation of the initial candidates."
    )
    dtype: Literal["auto", "tf32", "bf16", "float32", "float64"] = Field(
        default="auto",
        description="Number format. tf32 and bf16 are float32 with rounded matrix products. auto is "
        "tf32 on a GPU and float64 on the CPU.",
    )

    @property
    def precision(self) -> str:
        """Number format, where "auto" is tf32 on a GPU and float64 on the CPU."""
        if self.dtype != "auto":
            return self.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """Number format in which candidates and weights are stored."""
        import torch

        return (
            torch.float32 if self.precision in FAST_PRECISIONS else getattr(torch, self.precision)
        )


class RestartSettings(SearchSettings):
    """Settings of attacks with several restarts."""

    restarts: int = Field(default=4, gt=0, description="Number of independent runs.")
    lr_decay: float = Field(
        default=0.1, ge=0, description="Factor on the learning rates at the end."
    )


class StationaritySettings(RestartSettings):
    """Settings of attacks that minimize the residual of a stationarity equation."""

    optimizer: Literal["adam", "sgd"] = Field(
        default="adam", description="Optimizer of the candidates and multipliers."
    )
    momentum: float = Field(default=0.9, description="Momentum of sgd.")
    lr_lam: float | None = Field(
        default=None,
        ge=0,
        description=f"Learning rate of the multipliers. By default {LR_LAM:g}, or 0.003 together with a "
        "sparse prior.",
    )
    lam_init: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="Range of the initial stored multipliers, or their mean and standard deviation "
        "if lam_distribution is normal.",
    )
    lam_distribution: Literal["uniform", "normal"] = Field(
        default="uniform", description="Distribution of the initial multipliers."
    )
    lam_scale: Literal["auto", "mean", "one"] = Field(
        default="auto",
        description="Multipliers are stored as lam / scale. one is a plain sum. mean is 1/m, as in the "
        "released code of Haim et al. auto makes candidates and target equally large at the start.",
    )
    lam_min: float = Field(default=0.0, description="Smallest stored multiplier.")
    lam_every: int = Field(
        default=0,
        ge=0,
        description="Solve for the best multipliers every so many steps; 0 for never.",
    )
    surrogate: Literal["sigmoid", "softplus", "none"] = Field(
        default="sigmoid",
        description="Smooth function that replaces the derivative of the ReLU in the search.",
    )
    sharpness: float = Field(
        default=150.0, gt=0, description="Sharpness of the surrogate at the end."
    )
    sharpness_from: float = Field(
        default=10.0, description="Sharpness of the surrogate at the start, if it is annealed."
    )
    anneal: Literal["none", "geometric", "loo2024"] = Field(
        default="geometric", description="How the surrogate sharpens during the search."
    )
    normalize: bool = Field(
        default=True, description="Divide the squared residual of each layer by that of its target."
    )
    layers: Literal["auto", "all", "first"] = Field(
        default="auto",
        description="Layers whose residuals are minimized. auto is the first layer of an MLP, because "
        "its other layers hardly leave their initialization, and all layers of any other network.",
    )
    priors: tuple[tuple[str, Annotated[float, Field(ge=0)]], ...] | None = Field(
        default=None,
        description="Names and weights of priors. By default those that suit the appearance of the "
        f"data in the first layer. Known: {', '.join(PRIOR_NAMES)}.",
    )
    constraint: Literal["project", "penalty"] = Field(
        default="project",
        description="project moves candidates into the known value range, and multipliers above "
        "lam_min, after every step. penalty leaves this to the priors.",
    )
    polish: float = Field(
        default=0.05,
        description="Share of the steps at the end that use full float32, if dtype is tf32 or bf16.",
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
        description="When candidates are split: every split_every steps (period), if the loss fell by "
        "less than the share split_tolerance over that many steps (stagnation), or if the gradient "
        "is at most split_tolerance, not earlier than that many steps after the last round (gradient).",
    )
    split_every: int = Field(
        default=300, gt=0, description="Steps between rounds, see split_trigger."
    )
    split_tolerance: float = Field(
        default=0.1, description="Decrease of the loss or norm of the gradient, see split_trigger."
    )
    split_threshold: float = Field(
        default=0.01,
        ge=0,
        description="A candidate is unstable if its eigenvalue is below minus this.",
    )
    split_relative: bool = Field(
        default=True,
        description="Measure that eigenvalue relative to the loss over the candidates' squared length.",
    )
    split_cap: float = Field(
        default=0.1,
        ge=0,
        description="Share of the candidates that one round can add, at least one.",
    )
    split_limit: int = Field(
        default=0,
        ge=0,
        description="Largest number of candidates; 0 for four times the initial number.",
    )
    split_eta: float = Field(
        default=0.0,
        ge=0,
        description="Longest step of a split; 0 for half the candidates' median length.",
    )
    split_zero: float = Field(
        default=1e-6, description="Relative squared residual at which the attack fits the weights."
    )
    split_merge: bool = Field(
        default=True, description="Merge and prune candidates before a round."
    )
    split_eps: float = Field(
        default=1e-3,
        description="Level of the second-order stationarity that is reported at the end.",
    )


class KKTSettings(StationaritySettings):
    """Settings of the KKT attack (Haim et al. 2022, Buzaglo et al. 2023)."""

    rivals: Literal["tied", "best"] = Field(
        default="tied",
        description="With several classes: a multiplier for every tied rival class, or for the best "
        "one only.",
    )


class NTKSettings(StationaritySettings):
    """Settings of the attack on the weight update (Loo et al. 2024)."""

    gradients: Literal["theta", "theta0", "both"] = Field(
        default="theta",
        description="Where gradients are taken: at the final weights, at the initial weights, or both.",
    )


class UnmixSettings(AttackSettings):
    """Settings of unmixing. If rank or strength is set, restarts differ only in their random numbers."""

    domain: Literal["auto", "differences", "series", "coordinates"] = Field(
        default="auto",
        description="Representation in which samples are sparse. auto chooses by their shape.",
    )
    rank: float = Field(
        default=0.0, ge=0, le=1, description="Share of the clean directions; 0 to compare several."
    )
    strength: float = Field(
        default=0.0, ge=0, description="Strength of the contrast; 0 to compare several."
    )
    starts: int = Field(
        default=0,
        ge=0,
        description="Number of members of a run's population; 0 for as many as the time allows.",
    )
    restarts: int = Field(
        default=4, gt=0, description="Number of independent runs, if rank or strength is set."
    )


class ModelInversionSettings(SearchSettings):
    """Settings of model inversion, a baseline."""

    steps: int = Field(default=200, gt=0, description="Steps of gradient ascent.")


MODELS: dict[
    str, type[AttackSettings]
] = {  # by the name of the attack, for attacks of this package
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
    "corners": AttackSettings,
    "polynomial": AttackSettings,
    "model-inversion": ModelInversionSettings,
    "first-layer-weights": AttackSettings,
}
