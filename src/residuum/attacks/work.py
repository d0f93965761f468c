"""Count the work of a computation, and express it in seconds of a reference machine.

The result does not depend on the machine or its load, so an audit can plan with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Speed(NamedTuple):
    """Speed of a machine.

    Attributes:
        calls: Number of calls of PyTorch operators per second.
        flops: Number of floating-point operations of matrix products and convolutions per second.
        numbers: Number of values per second that all other operators write to memory.
    """

    calls: float
    flops: float
    numbers: float


# Assumed speeds of two reference machines: about two cores of a server, and one data-center GPU. The values
# are fixed, because an audit that plans its work with them gives the same result on every machine.
REFERENCE = {"cpu": Speed(5e4, 2e10, 3e8), "cuda": Speed(4e5, 1e13, 5e10)}


@dataclass
class Work:
    """The counted work of a computation.

    Attributes:
        calls: Number of calls of PyTorch operators.
        flops: Number of floating-point operations of matrix products and convolutions.
        numbers: Number of values that all other operators write to memory.
    """

    calls: int = 0
    flops: int = 0
    numbers: int = 0

    def seconds(self, speed: Speed) -> float:
        """Return how many seconds the counted work takes on a machine of a given speed."""
        return self.calls / speed.calls + self.flops / speed.flops + self.numbers / speed.numbers


def count_work(run: Callable[[], Any]) -> Work:
    """Run a function and count the work of all its PyTorch operators."""
    with _Counter() as counter:
        run()
    return counter.work


class _Counter(TorchDispatchMode):
    """A context that counts the work of all PyTorch operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.work.calls += 1
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.work.flops += count(*args, **(kwargs or {}), out_val=output)
        elif not func.is_view:
            tensors = (value for value in tree_leaves(output) if isinstance(value, Tensor))
            self.work.numbers += sum(value.numel() for value in tensors)
        return output
