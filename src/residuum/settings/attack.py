"""Settings of an attack. Every one can be changed; presets (``presets.py``) are instances of the class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from residuum.settings import Settings, setting

if TYPE_CHECKING:
    import torch

FAST = ("tf32", "bf16")  # float32 numbers, faster matrix products while the search is on
ATTACKS = (  # built in; the keys of ``every_attack()``
    *("binary-kkt", "multiclass-kkt", "weight-decay", "ntk", "moment"),
    *("unmix", "unmix-moment", "trunk", "trunk-moment", "invert", "invert-moment"),
    *(
        "geiping2020",
        "geiping2020-moment",
        "corners",
        "polynomial",
        "kinks",
        "model-inversion",
        "first-layer-weights",
    ),
)
PRIOR_NAMES = (  # built in; the keys of ``PRIORS``
    *("value-box", "haim2022-box", "haim2022-text-box", "loo2024-box", "multiplier-floor"),
    *("total-variation", "high-frequency", "sparse-gradients", "patch-experts", "none"),
)
SPLITS = ("none", "curvature", "random", "frank-wolfe")  # the keys of growth.GROWTH
LR_LAM = 0.01  # rate of the multipliers where neither anybody nor the data says otherwise
LEFT_OPEN = {"lr_lam": LR_LAM, "margins": 0.0}  # numbers that data decides, where it says nothing
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
VARIED = (*NUMBERS, "priors")  # what runs side by side may differ in


@dataclass(frozen=True)
class Multipliers(Settings):
    """How the multipliers begin, how they are stored, and when they are solved for."""

    init: tuple[float, float] = setting(
        (0.0, 1.0),
        "Range of the first stored multipliers; mean and deviation if these are normal.",
        name="lam_init",
    )
    distribution: str = setting(
        "uniform",
        "How the first multipliers are drawn.",
        name="lam_distribution",
        choices=("uniform", "normal"),
    )
    scale: str = setting(
        "auto",
        "Multipliers are stored as lam / scale: one is a plain sum, mean is 1/m as in the released "
        "code of Haim et al., auto makes candidates and target equally large at the start.",
        name="lam_scale",
        choices=("auto", "mean", "one"),
    )
    least: float = setting(0.0, "Least stored multiplier.", name="lam_min", place="expert")
    every: int = setting(
        0,
        "Every so many steps the best multipliers in closed form; 0 for never.",
        name="lam_every",
        place="expert",
        least=0,
    )


@dataclass(frozen=True)
class Surrogate(Settings):
    """What stands for the ReLU, whose derivative has nothing to descend on."""

    kind: str = setting(
        "sigmoid",
        "What stands for the ReLU.",
        name="surrogate",
        place="expert",
        choices=("sigmoid", "softplus", "none"),
    )
    sharpness: float = setting(150.0, "Its alpha or beta at the end.", place="expert", above=0)
    sharpness_from: float = setting(10.0, "Its alpha or beta at the start, where it is annealed.")
    anneal: str = setting(
        "geometric",
        "Sharpening on the way.",
        place="expert",
        choices=("none", "geometric", "loo2024"),
    )


@dataclass(frozen=True)
class Margins(Settings):
    """Equal margins: samples that carry weight sit on the same margin (``margins.py``)."""

    weight: float | None = setting(
        None,
        "Weight of equal margins; left out, as the images ask for.",
        name="margins",
        place="expert",
        least=0,
    )


@dataclass(frozen=True)
class Numerics(Settings):
    """In which numbers, and in which space, the search runs."""

    dtype: str = setting(
        "auto",
        "Numbers; tf32 and bf16 are float32 whose matrix products round. auto is tf32 on a GPU, "
        "float64 on the CPU.",
        place="expert",
        choices=("auto", *FAST, "float32", "float64"),
    )
    polish: float = setting(
        0.05, "Share of the steps, the last, in full float32 after tf32 or bf16."
    )
    rank_tolerance: float = setting(
        0.0,
        "Row-space mode: search in the singular vectors of the first layer above this share of the "
        "largest; 0 for all directions.",
        place="expert",
        least=0,
        below=1,
    )
    compile: bool = setting(False, "Fuse elementwise work with torch.compile on a GPU.")


@dataclass(frozen=True)
class Growth(Settings):
    """How the candidate set grows (``growth.py``)."""

    how: str = setting("none", "Where new candidates come from.", name="split", choices=SPLITS)
    trigger: str = setting(
        "stagnation",
        "When a round is due: every split_every steps (period), when the loss fell by less than the "
        "share split_tolerance over so many steps (stagnation), or when |grad_x L| is at most "
        "split_tolerance, at the earliest so many steps after the last round (gradient).",
        name="split_trigger",
        choices=("period", "stagnation", "gradient"),
    )
    every: int = setting(
        300, "Steps between rounds, see split_trigger.", name="split_every", above=0
    )
    tolerance: float = setting(
        0.1, "Fall of the loss or size of the gradient, see split_trigger.", name="split_tolerance"
    )
    threshold: float = setting(
        0.01,
        "A candidate is unstable below minus this eigenvalue.",
        name="split_threshold",
        least=0,
    )
    relative: bool = setting(
        True,
        "That eigenvalue is relative to the loss over the candidates' squared length.",
        name="split_relative",
    )
    cap: float = setting(
        0.1,
        "Share of the candidates that one round may add, at least one.",
        name="split_cap",
        least=0,
    )
    limit: int = setting(
        0, "Candidates at most; 0 for four times the first.", name="split_limit", least=0
    )
    eta: float = setting(
        0.0,
        "Longest step of a split; 0 for half the candidates' median length.",
        name="split_eta",
        least=0,
    )
    zero: float = setting(
        1e-6, "Relative squared residual that counts as explained.", name="split_zero"
    )
    merge: bool = setting(True, "Merge and prune before a round.", name="split_merge")
    eps: float = setting(
        1e-3, "Level of the second-order stationarity reported at the end.", name="split_eps"
    )


@dataclass(frozen=True)
class Unmixing(Settings):
    """How a layer is taken apart (``unmix.py``); rank or strength named, restarts differ in their start."""

    domain: str = setting(
        "auto",
        "In what samples are sparse; auto by their shape.",
        choices=("auto", "differences", "series", "coordinates"),  # the keys of unmix.DOMAINS
    )
    rank: float = setting(
        0.0,
        "Share of the clean directions; 0 for several that are compared.",
        name="unmix_rank",
        least=0,
        most=1,
    )
    strength: float = setting(
        0.0,
        "Strength of the contrast; 0 for several that are compared.",
        name="unmix_strength",
        least=0,
    )
    starts: int = setting(
        0,
        "Members of a run's population; 0 for as many as seconds allow.",
        name="unmix_starts",
        least=0,
    )


@dataclass(frozen=True)
class AttackConfig(Settings):
    """How candidates are initialised, what is minimised, and how. Groups inside: the classes above."""

    objective: str = setting(
        "auto",
        "What is attacked with; auto by the number of outputs.",
        place="basic",
        choices=("auto", *ATTACKS),
        open=True,
    )
    rivals: str = setting(
        "tied",
        "Multiclass: a multiplier for every tied rival, or for the best one.",
        place="expert",
        choices=("tied", "best"),
    )
    gradients: str = setting(
        "theta",
        "NTK: where gradients are taken.",
        place="expert",
        choices=("theta", "theta0", "both"),
    )
    candidates: int = setting(
        0,
        "Candidates per restart; 0 for twice the known samples, or half the neurons.",
        place="basic",
        least=0,
    )
    restarts: int = setting(4, "Independent runs, side by side.", place="basic", above=0)
    steps: int = setting(3000, "Steps of every restart.", place="basic", above=0)
    optimiser: str = setting(
        "adam", "How candidates and multipliers step.", place="expert", choices=("adam", "sgd")
    )
    lr_x: float = setting(0.01, "Learning rate of the candidates.", place="expert", above=0)
    lr_lam: float | None = setting(
        None,
        f"Learning rate of the multipliers; left out, {LR_LAM:g}, or less beside a sparse prior.",
        place="expert",
        least=0,
    )
    lr_decay: float = setting(0.1, "Factor on both rates at the end.", least=0)
    momentum: float = setting(0.9, "Momentum of sgd.")
    sigma: float = setting(
        0.1, "Standard deviation of the initial candidates.", place="expert", above=0
    )
    multipliers: Multipliers = Multipliers()
    surrogate: Surrogate = Surrogate()
    normalise: bool = setting(True, "Each layer's squared residual over that of its target.")
    margins: Margins = Margins()
    layers: str = setting(
        "auto",
        "Which layers' residuals are minimised; auto: the first of an MLP, where the others hardly "
        "leave their initialisation, and all of any other network.",
        place="expert",
        choices=("auto", "all", "first"),
    )
    priors: tuple[tuple[str, float], ...] | None = setting(
        None,
        "Names and weights of priors; left out, what the data's appearance in the first layer asks "
        "for. On the command line --prior NAME:WEIGHT.",
    )
    constraint: str = setting(
        "project",
        "project puts candidates into the known box, and multipliers above lam_min, after every "
        "step; penalty leaves that to the priors.",
        place="expert",
        choices=("project", "penalty"),
    )
    numerics: Numerics = Numerics()
    unmixing: Unmixing = Unmixing()
    growth: Growth = Growth()
    device: str = setting(
        "cpu", "Where the search runs.", place="basic", choices=("cpu", "cuda"), open=True
    )
    seed: int = setting(0, "Seed of all random numbers.", place="basic", least=0)
    seconds: float = setting(
        math.inf, "Stop after this much wall-clock time.", place="basic", above=0, endless=True
    )

    @property
    def precision(self) -> str:
        """``dtype`` with "auto" resolved: tf32 on a GPU, float64 on the CPU."""
        if self.numerics.dtype != "auto":
            return self.numerics.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """What candidates and weights are stored as."""
        import torch

        return torch.float32 if self.precision in FAST else getattr(torch, self.precision)
