"""Settings of an attack. Every field can be overridden; presets are instances of this class."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from residuum.attacks.priors import PRIORS
from residuum.errors import InputError, require_known
from residuum.records.base import plain

Step = float | Tensor
FAST = ("tf32", "bf16")  # float32 numbers, faster matrix products while the search is on
OPTIMISERS = ("adam", "sgd")
SCALES = ("auto", "mean", "one")
SPLITS = ("none", "curvature", "random", "frank-wolfe")  # the keys of growth.GROWTH
TRIGGERS = ("period", "stagnation", "gradient")
DOMAINS = ("auto", "differences", "series", "coordinates")  # the keys of unmix.DOMAINS
ANNEALINGS = ("none", "geometric", "loo2024")
POSITIVE = ("restarts", "steps", "lr_x", "sigma", "sharpness", "seconds", "split_every")
NOT_NEGATIVE = (
    *("candidates", "lr_lam", "lr_decay", "margins"),
    *("split_limit", "split_eta", "split_threshold", "split_cap"),
    *("unmix_rank", "unmix_strength", "unmix_starts"),
)
LR_LAM = 0.01
LEFT_OPEN = {"lr_lam": LR_LAM, "margins": 0.0}  # numbers that data decides, where it says nothing
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
VARIED = (*NUMBERS, "priors")  # what runs side by side may differ in


@dataclass(frozen=True)
class AttackConfig:
    """How candidates are initialised, what is minimised, and how.

    objective: a key of ``OBJECTIVES``, a baseline, or "auto" (by the number of outputs); rivals,
    gradients: options of the multiclass and NTK objectives; candidates: m, 0 for twice the known
    sample count or else half the first layer's neurons; sigma: standard deviation of the initial
    candidates; lr_lam: None for LR_LAM, or less beside a sparse prior; lr_decay: factor on both rates
    at the end; lam_init, lam_distribution: stored
    multipliers, uniform in this range or normal with this mean and deviation; lam_scale:
    multipliers are stored as lam / scale, with scale "one" (plain sum), "mean" (1/m, the released
    code of Haim et al.) or "auto" (candidates and target of equal size at the start);
    surrogate, sharpness: what stands for the ReLU and its alpha or beta, annealed from
    ``sharpness_from``; normalise, layers: see ``Problem``
    ("auto": the first layer of an MLP, where the other layers hardly leave their initialisation, and
    all layers of any other network); priors: (name, weight) pairs, None for what the data's appearance
    in the first layer asks for (``appearance.py``); margins: weight of equal margins
    (``margins.py``), None likewise; constraint:
    "project" puts candidates into the known box and multipliers above ``lam_min`` after every step,
    "penalty" leaves that to the priors; lam_every: every so many steps the multipliers are replaced
    by the best ones in closed form; dtype: float64, float32, or tf32 or bf16 (float32 numbers
    whose matrix products round their factors, the last ``polish`` share of the steps in full
    float32); auto is tf32 on a GPU and float64 on the CPU;
    rank_tolerance: above 0, candidates live in the right singular vectors of the target's first layer
    whose singular value exceeds this share of the largest (``rowspace.py``); compile: fuse
    elementwise work with torch.compile on a GPU; seconds: wall clock of all restarts together;
    domain: in which samples are sparse (``unmix.py``), "auto" by their shape; unmix_rank: share of the
    clean directions, unmix_strength: of the contrast, each 0 for several that are compared; with one
    of them named, runs are ``restarts`` that differ in their start; unmix_starts: members of a run's
    population, 0 for as many as ``seconds`` allow.

    How the candidate set grows (``growth.py``). split: curvature, random,
    frank-wolfe or none; split_trigger: a round every ``split_every`` steps ("period"), when the
    loss fell by less than the share ``split_tolerance`` over so many steps ("stagnation"), or when
    |grad_x L| is at most ``split_tolerance`` ("gradient"), at the earliest so many steps after the
    last; split_threshold: a candidate is unstable below minus this eigenvalue, relative to the loss
    over the candidates' squared length with ``split_relative``; split_cap: share of the candidates
    that one round may add, at least one; split_limit: candidates at most, 0 for four times the
    first; split_eta: longest step of a split, 0 for half the candidates' median length; split_zero:
    relative squared residual that counts as explained; split_merge: merge and prune before a round;
    split_eps: level of the second-order stationarity reported at the end.
    """

    objective: str = "auto"
    rivals: str = "tied"
    gradients: str = "theta"
    candidates: int = 0
    restarts: int = 4
    steps: int = 3000
    optimiser: str = "adam"
    lr_x: float = 0.01
    lr_lam: float | None = None
    lr_decay: float = 0.1
    momentum: float = 0.9
    sigma: float = 0.1
    lam_init: tuple[float, float] = (0.0, 1.0)
    lam_distribution: str = "uniform"
    lam_scale: str = "auto"
    lam_min: float = 0.0
    lam_every: int = 0
    surrogate: str = "sigmoid"
    sharpness: float = 150.0
    sharpness_from: float = 10.0
    anneal: str = "geometric"
    normalise: bool = True
    margins: float | None = None
    layers: str = "auto"
    priors: tuple[tuple[str, float], ...] | None = None
    constraint: str = "project"
    dtype: str = "auto"
    polish: float = 0.05
    rank_tolerance: float = 0.0
    domain: str = "auto"
    unmix_rank: float = 0.0
    unmix_strength: float = 0.0
    unmix_starts: int = 0
    split: str = "none"
    split_trigger: str = "stagnation"
    split_every: int = 300
    split_tolerance: float = 0.1
    split_threshold: float = 0.01
    split_relative: bool = True
    split_cap: float = 0.1
    split_limit: int = 0
    split_eta: float = 0.0
    split_zero: float = 1e-6
    split_merge: bool = True
    split_eps: float = 1e-3
    compile: bool = False
    device: str = "cpu"
    seed: int = 0
    seconds: float = math.inf

    def __post_init__(self) -> None:
        for name, known in (
            ("optimiser", OPTIMISERS),
            ("lam_scale", SCALES),
            ("anneal", ANNEALINGS),
            ("layers", ("auto", "all", "first")),
            ("constraint", ("project", "penalty")),
            ("surrogate", ("sigmoid", "softplus", "none")),
            ("dtype", ("auto", *FAST, "float32", "float64")),
            ("lam_distribution", ("uniform", "normal")),
            ("split", SPLITS),
            ("split_trigger", TRIGGERS),
            ("domain", DOMAINS),
        ):
            require_known(str(getattr(self, name)), known, f"No {name}")
        for name, value in vars(self).items():
            if isinstance(value, float) and name != "seconds" and not math.isfinite(value):
                raise InputError(f"{name} must be finite; got {value}.", "Correct it.")
            if name in POSITIVE and not value > 0:
                raise InputError(f"{name} must be positive; got {value}.", "Raise it.")
            if name in NOT_NEGATIVE and value is not None and value < 0:
                raise InputError(f"{name} must not be negative; got {value}.", "Correct it.")
        if not 0 <= self.rank_tolerance < 1:
            raise InputError(
                f"rank_tolerance is a share of the largest singular value, from 0 up to below 1; "
                f"got {self.rank_tolerance}.",
                "Use 0 for the full space.",
            )
        if self.unmix_rank > 1:
            raise InputError(
                f"unmix_rank is a share of the clean directions, at most 1; got {self.unmix_rank}.",
                "Use 0 for several shares.",
            )
        for prior, _ in self.priors or ():
            require_known(prior, PRIORS, "No prior")

    @property
    def precision(self) -> str:
        """``dtype`` with "auto" resolved: tf32 on a GPU, float64 on the CPU."""
        if self.dtype != "auto":
            return self.dtype
        return "tf32" if self.device.startswith("cuda") else "float64"

    @property
    def numbers(self) -> torch.dtype:
        """What candidates and weights are stored as."""
        return torch.float32 if self.precision in FAST else getattr(torch, self.precision)

    def sharpness_at(self, step: Step, sharpness: Step | None = None) -> Step:
        """The surrogate's alpha or beta at a step; a number, or a tensor that stays on its device.

        sharpness: the one at the end, by default this configuration's own.
        """
        sharpness = self.sharpness if sharpness is None else sharpness
        if self.anneal == "loo2024":
            return _at_most(10 + 10 ** (step / 20000), 200.0)
        if self.anneal == "geometric" and self.sharpness_from:
            return self.sharpness_from * (sharpness / self.sharpness_from) ** self.share_at(step)
        return sharpness

    def share_at(self, step: Step) -> Step:
        """Of the steps, 1 at the last one."""
        return _at_most(step / max(1, self.steps - 1), 1.0)

    def rate_at(self, step: Step) -> Step:
        """Factor on both learning rates: cosine from 1 down to ``lr_decay``; 1 keeps them fixed."""
        angle = math.pi * _at_most(step / max(1, self.steps), 1.0)
        cosine = torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)
        return self.lr_decay + (1 - self.lr_decay) * (1 + cosine) / 2

    def to_json(self) -> dict[str, Any]:
        """Plain values; an absent wall clock is null."""
        return plain(vars(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> AttackConfig:
        """The inverse of :meth:`to_json`; unknown settings are refused."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            require_known(name, names, "An attack has no setting")
        read = dict(values)
        if read.get("seconds", 0) is None:
            read["seconds"] = math.inf
        for name in ("priors", "lam_init"):
            if read.get(name) is not None:
                read[name] = tuple(tuple(v) if isinstance(v, list) else v for v in read[name])
        return cls(**read)


def _at_most(value: Step, limit: float) -> Step:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


class PerRun:
    """Settings of R runs that share one program and one set of weights.

    runs: one configuration each, or none where all are alike. A setting that is the same in every
    run stays a plain number; one that differs is a tensor with one value per run, shaped to
    broadcast against (R, m, ...).
    """

    def __init__(
        self,
        config: AttackConfig,
        runs: Sequence[AttackConfig] | None,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.runs = tuple(runs or ())
        self.config = config
        self._numbers: dict[str, Any] = {"dtype": dtype, "device": device}
        if self.runs:
            self._check()
        self._tensors = {
            name: torch.tensor(values, **self._numbers)
            for name in NUMBERS
            if len(set(values := [getattr(run, name) for run in self.runs])) > 1
        }

    def value(self, name: str, ndim: int = 1) -> float | Tensor:
        """One number for all runs, or a tensor (R, 1, ...) of ``ndim`` dimensions."""
        if name not in self._tensors:
            return getattr(self.runs[0] if self.runs else self.config, name)
        tensor = self._tensors[name]
        return tensor.view(-1, *[1] * (ndim - 1))

    def priors(self) -> list[tuple[str, float | Tensor]]:
        """Every prior that some run has, with its weight: a number, or (R,) with 0 where it is absent."""
        if len({run.priors for run in self.runs}) < 2:
            return list(self.one(0).priors or ())
        own = [dict(run.priors or ()) for run in self.runs]
        names = dict.fromkeys(name for priors in own for name in priors)
        return [
            (name, torch.tensor([priors.get(name, 0.0) for priors in own], **self._numbers))
            for name in names
        ]

    def one(self, run: int) -> AttackConfig:
        """The settings of one run."""
        return self.runs[run] if self.runs else self.config

    def _check(self) -> None:
        if len(self.runs) != self.config.restarts:
            raise InputError(
                f"Settings per run must be as many as restarts; got {len(self.runs)} for "
                f"{self.config.restarts}.",
                "Give one configuration per restart.",
            )
        for run in self.runs:
            common = {name: getattr(self.config, name) for name in VARIED}
            if replace(run, **common) != self.config:
                raise InputError(
                    f"Runs side by side may differ in {', '.join(VARIED)} alone.",
                    "Run configurations that differ otherwise one after the other.",
                )


def stream(*names: str | int) -> torch.Generator:
    """A generator of its own for these names: equal ones give equal numbers, on any machine.

    Datasets, initial weights and attacks all take small seeds. With one generator per plain seed an
    attack could start at the very numbers that synthetic data were made of, and find what it was given.
    """
    digest = hashlib.sha256(repr(("attack", *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
