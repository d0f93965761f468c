"""What a defense is: up to three hooks, what it changes, and what stays with the owner."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from residuum.errors import InputError, MissingExtraError
from residuum.records import Checkpoint, Dataset
from residuum.training import TrainingConfig, TrainingState, train

SHIFTS = ("", "constant", "vector")


@dataclass(frozen=True)
class Secret:
    """What the owner keeps: the shift of the inputs (*shape), absent without one, and a seed."""

    seed: int
    shift: Tensor | None = None

    def inputs(self, x: Tensor) -> Tensor:
        """Samples as the defended network is given them."""
        return x if self.shift is None else x + self.shift.to(x)

    def to_json(self) -> dict[str, Any]:
        """For the owner's private folder."""
        shift = None if self.shift is None else self.shift.flatten().tolist()
        return {"seed": self.seed, "shift": shift}


Facts = dict[str, Any]
Loop = Callable[[str, Dataset, TrainingConfig, str, str], tuple[TrainingState, Facts]]


def usual(
    arch: str, data: Dataset, config: TrainingConfig, task: str, device: str
) -> tuple[TrainingState, Facts]:
    """Training as :func:`residuum.training.train` does it, with nothing to say about itself."""
    return train(arch, data, config, task=task, device=device), {}


@dataclass(frozen=True)
class Training:
    """How the network is trained, on how many samples; descent: where gradient descent is needed."""

    config: TrainingConfig
    descent: TrainingConfig
    samples: int
    loop: Loop = usual


@dataclass(frozen=True)
class Defense:
    """One defense. Every hook is left alone at the strength ``off``, which is the identity.

    changes: what it changes; secret: what stays with the owner; unit: what the strength is;
    data, training, release: the hooks; shift: how the secret shift of the inputs is drawn, "" for
    none; rewrites: the shift goes into the biases after training (App. D of Refael et al. 2025)
    instead of into the training data; adaptive: the attacker who knows, a key of ``ADAPTIVE``;
    releases: whether several releases of the same weights differ; extra: of the package, needed;
    most: largest strength; switch: 0 or 1 and nothing between.
    """

    changes: str
    secret: str
    unit: str
    adaptive: str
    data: Callable[[Dataset, Secret], Dataset] | None = None
    training: Callable[[Training, float, int], Training] | None = None
    release: Callable[[Checkpoint, float, Secret], Checkpoint] | None = None
    shift: str = ""
    off: float = 0.0
    most: float = math.inf
    switch: bool = False
    releases: bool = False
    extra: str = ""
    module: str = ""

    @property
    def available(self) -> bool:
        """Whether what it needs is installed."""
        return not self.module or find_spec(self.module) is not None

    @property
    def install(self) -> str:
        """The exact line that installs what it needs; "" when nothing."""
        return f'pip install "residuum[{self.extra}]"' if self.extra else ""

    def check(self, name: str, strength: float) -> None:
        """Refuse a strength that means nothing, and a defense that cannot run here."""
        positive = self.off == math.inf
        if math.isnan(strength) or strength < 0 or (positive and strength == 0):
            raise InputError(
                f"The strength of {name} is {self.unit}; got {strength:g}.",
                f"It starts above 0; {self.off:g} leaves the network as it is.",
            )
        wrong_switch = self.switch and strength not in (0, 1)
        if strength > self.most or wrong_switch or (strength == math.inf and not positive):
            raise InputError(
                f"The strength of {name} is {self.unit}; got {strength:g}.",
                "Use 1." if self.switch else f"It is finite and at most {self.most:g}.",
            )
        if not self.available:
            raise MissingExtraError(
                f"{name} needs the extra {self.extra!r}, which is not installed.",
                f"Install it with: {self.install}",
            )

    def draw(self, strength: float, shape: tuple[int, ...], seed: int, name: str) -> Secret:
        """The secret of this strength; another for every seed."""
        digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
        own = int.from_bytes(digest[:7], "little")
        if not self.shift:
            return Secret(own)
        if self.shift == "constant":
            return Secret(own, torch.full(shape, strength, dtype=torch.float64))
        generator = torch.Generator().manual_seed(own)
        return Secret(own, strength * torch.randn(shape, generator=generator, dtype=torch.float64))


def per_pixel_and_norm(shift: Tensor) -> dict[str, float]:
    """Both ways a shift's size is given: root mean square per pixel, and the Euclidean norm."""
    norm = float(shift.norm())
    return {"per_pixel": norm / math.sqrt(max(1, shift.numel())), "norm": norm}
