"""What every figure is given: how large to be, where data, device and kept work are, who watches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residuum.reproduce.cache import Cache
from residuum.reproduce.scales import Scale

Watching = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Context:
    """scale: sizes; root: folder of MNIST and CIFAR; seed: 0 takes the first samples, as the papers do.

    training, attacking: make context managers that give a watcher, or None where nobody watches.
    """

    scale: Scale
    cache: Cache
    device: str = "cpu"
    root: Path | None = None
    seed: int = 0
    training: Watching = field(default=nullcontext)
    attacking: Watching = field(default=nullcontext)

    @property
    def fast(self) -> str:
        """What attacks compute in: TF32 on a GPU, where it was measured to change no count."""
        return "tf32" if self.device.startswith("cuda") else "float32"
