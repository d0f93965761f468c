"""Tools that speed up the steps of a solver: CUDA graphs on a GPU, and reuse of freed memory on a CPU.

By default, the C library returns large freed blocks of memory to the operating system. In the next step of
the solver, the operating system has to provide and clear these blocks again. For small attacks, this takes
most of the time. ``keep_freed_memory`` raises the limits of the C library, so that the process keeps up to
TRIM_BYTES of freed memory. The function works on Linux with glibc and does nothing on other systems.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

# Numbers of two parameters of ``mallopt``, the function of glibc that configures memory allocation.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
TRIM_BYTES = 1 << 29  # freed memory in bytes that the process keeps for reuse
# Freed memory is reused for blocks of at most this size in bytes. glibc does not accept a larger value.
MAX_MMAP_BYTES = 32 << 20


class Repeater:
    """Repeats a step of a solver. On a GPU, the step is replayed from a CUDA graph.

    On a GPU, the first call of :meth:`run` executes its steps normally, so that lazy initialization happens,
    and then captures ``chunk`` steps. Later calls replay the captured steps without running Python code.

    Args:
        step: Function that changes tensors in place. The function must not copy values of the tensors to the
            CPU, because a CUDA graph cannot capture such a copy.
        device: Device on which the step runs, such as "cpu" or "cuda".
        chunk: Number of steps to capture in a CUDA graph.
    """

    def __init__(self, step: Callable[[], None], device: str, chunk: int) -> None:
        self.step, self.chunk = step, chunk
        self.cuda = device.startswith("cuda")
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, count: int) -> None:
        """Run the step of the solver ``count`` times."""
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
            with _without_garbage_collection(), torch.cuda.graph(graph):
                self._loop(self.chunk)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            self.cuda = False
        else:
            self.graph = graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage when entering this context, and disable garbage collection inside the context.

    The capture of a CUDA graph fails if the graph of an earlier attack is freed during the capture.

    Yields:
        Nothing.
    """
    gc_was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if gc_was_enabled:
            gc.enable()


@cache
def keep_freed_memory() -> bool:
    """Make the process keep freed memory for reuse. Return True if this is possible here."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc has no such function
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAX_MMAP_BYTES)) and bool(
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
    )
