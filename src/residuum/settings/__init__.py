"""What an attack or a training run is told, as data: each setting with its help, bounds and choices.

A group of settings is a small frozen dataclass, and may hold other groups:

    steps: int = basic(3000, "Steps of every restart.", above=0)

What stands there is all there is to say: making a group checks it, the command line has its options and
``--set`` from it, ``docs/settings.md`` its tables. Inside its group a setting has a short name
(``growth.every``); to users, in files and in sweeps it goes by one flat name, with the group's prefix
(``split_every``).

Nothing here needs torch, so that ``--help`` stays light.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_type_hints

from residuum.errors import InputError, require_known

if TYPE_CHECKING:
    import torch

RULE = "rule"  # key of a field's metadata
BOUNDS = {"above": operator.gt, "least": operator.ge, "most": operator.le, "below": operator.lt}
# Groups of options in the help of every command, in their order.
PLACES = {"basic": "Basic", "granted": "Granted to the attacker", "expert": "Expert"}


@dataclass(frozen=True)
class Rule:
    """What is said about a setting beside its type and default.

    help: one sentence or more, ending in a full stop.
    name: how users say it, where that is not the group's prefix and the field's name.
    place: key of ``PLACES`` that its option stands in; "" has no option and goes by ``--set``.
    choices: the words that it may be.
    open: plug-ins add to them, so others are looked up later.
    above, least, most, below: bounds of a number.
    endless: it may be infinite, null in JSON.
    """

    help: str
    name: str = ""
    place: str = ""
    choices: tuple[str, ...] = ()
    open: bool = False
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    endless: bool = False


@dataclass(frozen=True)
class Setting:
    """One setting: its flat name, the way to it through the groups, its type and all that is said of it."""

    name: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    rule: Rule

    def check(self, value: Any) -> None:
        """Refuse a value that breaks the rule; None leaves the choice to the data."""
        rule = self.rule
        if rule.choices and not rule.open and value is not None:
            require_known(str(value), rule.choices, f"No {self.name}")
        if not isinstance(value, int | float):
            return
        if not (math.isfinite(value) or (rule.endless and value == math.inf)):
            wanted = "finite"
        elif not all(BOUNDS[way](value, bound) for way, bound in self.bounds.items()):
            wanted = self.bounds_in_words
        else:
            return
        remedy = "Leave it out." if self.default is None else f"The default is {self.default}."
        raise InputError(f"{self.name} must be {wanted}; got {value}.", remedy)

    @property
    def bounds(self) -> dict[str, float]:
        """By their keys in ``BOUNDS``."""
        found = {way: getattr(self.rule, way) for way in BOUNDS}
        return {way: bound for way, bound in found.items() if bound is not None}

    @property
    def bounds_in_words(self) -> str:
        """Such as "at least 0 and below 1"; "" without any."""
        words = {"above": "above", "least": "at least", "most": "at most", "below": "below"}
        said = " and ".join(f"{words[way]} {bound:g}" for way, bound in self.bounds.items())
        return "positive" if said == "above 0" else said


def setting(default: Any, help: str, **rule: Any) -> Any:
    """A field of a group with what is said about it, see :class:`Rule`."""
    return dataclasses.field(default=default, metadata={RULE: Rule(help, **rule)})


basic, expert = partial(setting, place="basic"), partial(setting, place="expert")  # with an option


@dataclass(frozen=True)
class Settings:
    """Base of every group: checked when made, changed and written by flat names."""

    prefix: ClassVar[str] = ""  # of the flat names

    def __post_init__(self) -> None:
        for one in settings_of(type(self)).values():
            if len(one.path) == 1:  # a group inside has checked its own
                one.check(getattr(self, one.path[0]))
        for field in dataclasses.fields(self):
            got = getattr(self, field.name)
            if isinstance(field.default, Settings) and not isinstance(got, type(field.default)):
                raise InputError(
                    f"{field.name} is a group of settings ({type(field.default).__name__}); got {got!r}.",
                    f"By flat names: {type(self).__name__}.of({field.name}={got!r}).",
                )

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Made by flat names: ``AttackConfig.of(steps=10, split_every=5)``; the rest has its default."""
        return cls().changed(**values)

    def value(self, name: str) -> Any:
        """Of the setting with this flat name."""
        found: Any = self
        for step in settings_of(type(self))[name].path:
            found = getattr(found, step)
        return found

    def changed(self, **changes: Any) -> Self:
        """The same with other values, by flat names: ``changed(steps=10, split_every=5)``."""
        known = settings_of(type(self))
        own: dict[str, Any] = {}
        inside: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            require_known(name, known, "There is no setting")
            first, *rest = known[name].path
            if rest:
                inside.setdefault(first, {})[name] = value
            else:
                own[first] = value
        for group, values in inside.items():
            own[group] = getattr(self, group).changed(**values)
        return dataclasses.replace(self, **own)

    def to_json(self) -> dict[str, Any]:
        """Plain values by flat names; what is endless is null."""
        return {name: _plain(self.value(name)) for name in settings_of(type(self))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; what is left out has its default, unknown names are refused."""
        known = settings_of(cls)
        read = {}
        for name, value in values.items():
            require_known(name, known, "There is no setting")
            read[name] = math.inf if value is None and known[name].rule.endless else _tuple(value)
        return cls.of(**read)


def settings_of(group: type[Settings]) -> dict[str, Setting]:
    """All settings of a group and of those inside it, by flat name."""
    if group not in _FOUND:
        found = {one.name: one for one in _settings(group, ())}
        assert len(found) == len([*_settings(group, ())]), "two settings have one name"
        _FOUND[group] = found
    return _FOUND[group]


_FOUND: dict[type[Settings], dict[str, Setting]] = {}  # looked up in every step of an attack


def _settings(group: type[Settings], path: tuple[str, ...]) -> Iterator[Setting]:
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        here = (*path, field.name)
        if isinstance(field.default, Settings):
            yield from _settings(type(field.default), here)
        else:
            rule: Rule = field.metadata[RULE]
            kind = hints[field.name]
            if isinstance(kind, UnionType):  # with None, where the data decides
                kind = get_args(kind)[0]
            yield Setting(rule.name or group.prefix + field.name, here, kind, field.default, rule)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


# An attack's settings; presets (``presets.py``) are instances of the class.
FAST = ("tf32", "bf16")  # float32 numbers, faster matrix products while the search is on
ATTACKS = (  # built in; the keys of ``every_attack()``
    *("binary-kkt", "multiclass-kkt", "weight-decay", "ntk", "moment"),
    *("unmix", "unmix-moment", "trunk", "trunk-moment", "invert", "invert-moment"),
    *("geiping2020", "geiping2020-moment", "corners", "polynomial"),
    *("model-inversion", "first-layer-weights"),
)
PRIOR_NAMES = (  # built in; the keys of ``PRIORS``
    *("value-box", "haim2022-box", "haim2022-text-box", "loo2024-box", "multiplier-floor"),
    *("total-variation", "high-frequency", "sparse-gradients", "columns"),
    "none",
)
LR_LAM = 0.01  # rate of the multipliers where neither anybody nor the data says otherwise
LEFT_OPEN = {"lr_lam": LR_LAM}  # numbers that data decides, where it says nothing
NUMBERS = ("lr_x", "lr_lam", "sigma", "sharpness", "lam_min")
VARIED = (*NUMBERS, "priors")  # what runs side by side may differ in


@dataclass(frozen=True)
class Multipliers(Settings):
    """How the multipliers begin, how they are stored, and when they are solved for."""

    prefix = "lam_"
    init: tuple[float, float] = setting(
        (0.0, 1.0), "Range of the first stored multipliers; mean and deviation if these are normal."
    )
    distribution: str = setting(
        "uniform", "How the first multipliers are drawn.", choices=("uniform", "normal")
    )
    scale: str = setting(
        "auto",
        "Multipliers are stored as lam / scale: one is a plain sum, mean is 1/m as in the released "
        "code of Haim et al., auto makes candidates and target equally large at the start.",
        choices=("auto", "mean", "one"),
    )
    least: float = expert(0.0, "Least stored multiplier.", name="lam_min")
    every: int = expert(
        0, "Every so many steps the best multipliers in closed form; 0 for never.", least=0
    )


@dataclass(frozen=True)
class Surrogate(Settings):
    """What stands for the ReLU, whose derivative has nothing to descend on."""

    kind: str = expert(
        "sigmoid",
        "What stands for the ReLU.",
        name="surrogate",
        choices=("sigmoid", "softplus", "none"),
    )
    sharpness: float = expert(150.0, "Its alpha or beta at the end.", above=0)
    sharpness_from: float = setting(10.0, "Its alpha or beta at the start, where it is annealed.")
    anneal: str = expert(
        "geometric", "Sharpening on the way.", choices=("none", "geometric", "loo2024")
    )


@dataclass(frozen=True)
class Numerics(Settings):
    """The number format of the search."""

    dtype: str = expert(
        "auto",
        "Numbers; tf32 and bf16 are float32 whose matrix products round. auto is tf32 on a GPU, "
        "float64 on the CPU.",
        choices=("auto", *FAST, "float32", "float64"),
    )
    polish: float = setting(
        0.05, "Share of the steps, the last, in full float32 after tf32 or bf16."
    )
    compile: bool = setting(False, "Fuse elementwise work with torch.compile on a GPU.")


@dataclass(frozen=True)
class Growth(Settings):
    """How the candidate set grows by sample splitting (``growth.py``)."""

    prefix = "split_"
    how: str = setting(
        "none",
        "Whether candidates are split along negative curvature (Shen et al. 2026).",
        name="split",
        choices=("none", "curvature"),
    )
    trigger: str = setting(
        "stagnation",
        "When a round is due: every split_every steps (period), when the loss fell by less than the "
        "share split_tolerance over so many steps (stagnation), or when |grad_x L| is at most "
        "split_tolerance, at the earliest so many steps after the last round (gradient).",
        choices=("period", "stagnation", "gradient"),
    )
    every: int = setting(300, "Steps between rounds, see split_trigger.", above=0)
    tolerance: float = setting(0.1, "Fall of the loss or size of the gradient, see split_trigger.")
    threshold: float = setting(
        0.01, "A candidate is unstable below minus this eigenvalue.", least=0
    )
    relative: bool = setting(
        True, "That eigenvalue is relative to the loss over the candidates' squared length."
    )
    cap: float = setting(
        0.1, "Share of the candidates that one round may add, at least one.", least=0
    )
    limit: int = setting(0, "Candidates at most; 0 for four times the first.", least=0)
    eta: float = setting(
        0.0, "Longest step of a split; 0 for half the candidates' median length.", least=0
    )
    zero: float = setting(1e-6, "Relative squared residual that counts as explained.")
    merge: bool = setting(True, "Merge and prune before a round.")
    eps: float = setting(1e-3, "Level of the second-order stationarity reported at the end.")


@dataclass(frozen=True)
class Unmixing(Settings):
    """Settings of unmixing. If rank or strength is set, restarts differ only in their random start."""

    prefix = "unmix_"
    domain: str = setting(
        "auto",
        "In what samples are sparse; auto by their shape.",
        name="domain",
        choices=("auto", "differences", "series", "coordinates"),  # the keys of unmix.DOMAINS
    )
    rank: float = setting(
        0.0, "Share of the clean directions; 0 for several that are compared.", least=0, most=1
    )
    strength: float = setting(
        0.0, "Strength of the contrast; 0 for several that are compared.", least=0
    )
    starts: int = setting(
        0, "Members of a run's population; 0 for as many as seconds allow.", least=0
    )


@dataclass(frozen=True)
class AttackConfig(Settings):
    """How candidates are initialised, what is minimised, and how. Groups inside: the classes above."""

    objective: str = basic(
        "auto",
        "What is attacked with; auto by the number of outputs.",
        choices=("auto", *ATTACKS),
        open=True,
    )
    rivals: str = expert(
        "tied",
        "Multiclass: a multiplier for every tied rival, or for the best one.",
        choices=("tied", "best"),
    )
    gradients: str = expert(
        "theta", "NTK: where gradients are taken.", choices=("theta", "theta0", "both")
    )
    candidates: int = basic(
        0, "Candidates per restart; 0 for twice the known samples, or half the neurons.", least=0
    )
    restarts: int = basic(4, "Independent runs, side by side.", above=0)
    steps: int = basic(3000, "Steps of every restart.", above=0)
    optimiser: str = expert("adam", "How candidates and multipliers step.", choices=("adam", "sgd"))
    lr_x: float = expert(0.01, "Learning rate of the candidates.", above=0)
    lr_lam: float | None = expert(
        None,
        f"Learning rate of the multipliers; left out, {LR_LAM:g}, or less beside a sparse prior.",
        least=0,
    )
    lr_decay: float = setting(0.1, "Factor on both rates at the end.", least=0)
    momentum: float = setting(0.9, "Momentum of sgd.")
    sigma: float = expert(0.1, "Standard deviation of the initial candidates.", above=0)
    multipliers: Multipliers = Multipliers()
    surrogate: Surrogate = Surrogate()
    normalise: bool = setting(True, "Each layer's squared residual over that of its target.")
    layers: str = expert(
        "auto",
        "Which layers' residuals are minimised; auto: the first of an MLP, where the others hardly "
        "leave their initialisation, and all of any other network.",
        choices=("auto", "all", "first"),
    )
    priors: tuple[tuple[str, float], ...] | None = setting(
        None,
        "Names and weights of priors; left out, what the data's appearance in the first layer asks "
        "for. On the command line --prior NAME:WEIGHT.",
    )
    constraint: str = expert(
        "project",
        "project puts candidates into the known box, and multipliers above lam_min, after every "
        "step; penalty leaves that to the priors.",
        choices=("project", "penalty"),
    )
    numerics: Numerics = Numerics()
    unmixing: Unmixing = Unmixing()
    growth: Growth = Growth()
    device: str = basic("cpu", "Where the search runs.", choices=("cpu", "cuda"), open=True)
    seed: int = basic(0, "Seed of all random numbers.", least=0)
    seconds: float = basic(math.inf, "Stop after this much wall-clock time.", above=0, endless=True)

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


# A training run's settings; the defaults train to the margin.
LOSSES = ("logistic", "exponential", "squared", "cross_entropy")  # the keys of methods.LOSSES


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """How weights begin, what is descended, and when it ends."""

    method: str = basic(
        "margin",
        "Log-loss descent with a safe step (margin), full batches (gd) or mini-batches (sgd).",
        choices=("margin", "gd", "sgd"),
    )
    loss: str = expert(
        "",
        "What is descended; left out, logistic, cross_entropy or squared by the task.",
        choices=("", *LOSSES),
    )
    steps: int = basic(5000, "Steps at most.", above=0)
    lr: float = expert(0.01, "Learning rate of gd and sgd.", above=0)
    momentum: float = expert(0.0, "Momentum of gd and sgd; published: 0 or 0.9.", least=0, below=1)
    batch: int = expert(0, "Batch size of sgd.", least=0)
    weight_decay: float = expert(
        0.0, "Weight decay w of gd and sgd: adds w theta to the gradient.", least=0
    )
    init: str = expert(
        "small",
        "First weights: small has the first layer's standard normal weights and bias times "
        "init_scale, default is torch's, lecun has variance 1/fan_in and biases of zero.",
        choices=("small", "default", "lecun"),
    )
    init_scale: float = expert(1e-4, "First-layer scale of the small init.", least=0)
    dtype: str = expert("float64", "Numbers.", choices=("float64", "float32"))
    seed: int = basic(0, "Seed of the initial weights and the batches.", least=0, below=2**63)
    seconds: float = basic(math.inf, "Stop after this much wall-clock time.", least=0, endless=True)
    stop_margin: float = expert(math.inf, "Stop at this normalised margin.", endless=True)
    stop_residual: float = expert(0.0, "Stop at this relative KKT residual; 0 for never.", least=0)
    stop_loss: float = expert(0.0, "Stop at this training loss; 0 for never.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "sgd" and self.batch < 1:
            raise InputError("sgd needs a batch size.", "Say --batch 50, or --method gd.")
        if self.method == "margin" and (self.weight_decay or self.loss == "squared"):
            raise InputError(
                "Margin maximisation has no weight decay and no squared loss: its end point is a "
                "direction of maximal margin.",
                "Use --method gd.",
            )
