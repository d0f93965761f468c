"""Running steps of a solver fast: CUDA graphs on a GPU, and reuse of freed memory on a CPU.

The C library returns large freed blocks to the operating system, and the next step has to map and clear them
again. For small attacks this takes most of the time. Higher thresholds keep up to TRIM_BYTES in the process.
This works on Linux with glibc and does nothing elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt
TRIM_BYTES = 1 << 29  # freed memory that the process keeps
MAX_MMAP_BYTES = 32 << 20  # the largest value that glibc accepts


class Repeater:
    """Repeats a step, from a CUDA graph on a GPU.

    On a GPU, the first call of :meth:`run` executes its steps normally, so that lazy initialization happens,
    and then captures ``chunk`` steps. Later calls replay the captured steps without the host.

    Args:
        step: Changes tensors in place. It must not read their values on the host.
        device: The device.
        chunk: Number of steps to capture.
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
        """Capture steps, unless the step needs the host, as the forward method of a user may."""
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
    """Collect garbage now and not inside this context.

    If the graph of an earlier attack is freed while another graph is captured, the capture fails.

    Yields:
        Nothing.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@cache
def keep_freed_memory() -> bool:
    """Raise the thresholds once per process, and return whether this was possible."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAX_MMAP_BYTES)) and bool(
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
    )
