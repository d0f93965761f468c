"""Tools that speed up the steps of a solver: CUDA graphs on a GPU, and reuse of freed memory on a CPU.

The C library returns large freed blocks to the operating system, and the next step has to map and clear them
again. For small attacks this takes most of the time. With higher thresholds, the process keeps up to
TRIM_BYTES of freed memory. This works on Linux with glibc and does nothing on other systems.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameter numbers of ``mallopt``, a function of glibc
TRIM_BYTES = 1 << 29  # freed memory in bytes that the process keeps for reuse
# Largest block in bytes that is served from freed memory. This is the largest value that glibc accepts.
MAX_MMAP_BYTES = 32 << 20


class Repeater:
    """Repeats a step of a solver. On a GPU, the step is replayed from a CUDA graph.

    On a GPU, the first call of :meth:`run` executes its steps normally, so that lazy initialization happens,
    and then captures ``chunk`` steps. Later calls replay the captured steps without the host.

    Args:
        step: Function that changes tensors in place. The function must not read the tensors' values on the
            host.
        device: Device on which the step runs, such as "cpu" or "cuda".
        chunk: Number of steps to capture in a CUDA graph.
    """

    def __init__(self, step: Callable[[], None], device: str, chunk: int) -> None:
        self.step, self.chunk = step, chunk
        self.cuda = device.startswith("cuda")
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, count: int) -> None:
        """Run the step ``count`` times."""
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
        """Capture steps in a CUDA graph. If the steps cannot be captured, they are run normally."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with _uncollected(), torch.cuda.graph(graph):
                self._loop(self.chunk)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            self.cuda = False
        else:
            self.graph = graph


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage before this context, and switch garbage collection off inside the context.

    If the graph of an earlier attack is freed while another graph is captured, the capture fails.

    Yields:
        Nothing.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def keep_freed_memory() -> bool:
    """Make the process keep freed memory for reuse, and return True if the system supports this."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # the C library is not glibc
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAX_MMAP_BYTES)) and bool(
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
    )
