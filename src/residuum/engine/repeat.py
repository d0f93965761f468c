"""Run one step many times: a loop on the CPU, replays of a captured CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Repeater:
    """Repeats ``step``, which must change tensors in place and never look at their values.

    On a GPU the first call runs its steps as they are, which lets lazy initialisation happen, and
    then captures ``chunk`` steps; later calls replay them without the host in between.
    """

    def __init__(self, step: Callable[[], None], device: str, chunk: int) -> None:
        self.step, self.chunk = step, chunk
        self.cuda = device.startswith("cuda")
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, count: int) -> None:
        """Take ``count`` steps."""
        if self.cuda and self.graph is None:
            self._loop(count)
            self._capture()
            return
        while self.graph is not None and count >= self.chunk:
            self.graph.replay()
            count -= self.chunk
        self._loop(count)

    def _loop(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _capture(self) -> None:
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._loop(self.chunk)


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Matrix products of float32 numbers in TF32, or in full float32, inside this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
