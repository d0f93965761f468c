"""How steps are run: replayed from a CUDA graph on a GPU, with memory kept at hand.

The C library hands large freed blocks back to the system, and the next step pays for mapping and
clearing them again: on small attacks that is most of the time. Raising its thresholds keeps up to
KEEP bytes in the process. Linux with glibc; elsewhere nothing happens.
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
KEEP, LARGEST = 1 << 29, 32 << 20  # LARGEST: glibc accepts no more


class Repeater:
    """Repeats ``step``, which must change tensors in place and never look at their values.

    On a GPU the first call runs its steps as they are, which lets lazy initialization happen, and
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
        """A step that asks the host, as somebody's own forward may, cannot be captured and is not."""
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
    """Garbage goes before, not inside: a graph of an earlier attack that dies while another one is
    captured makes the capture fail.
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
    """Raise the thresholds once per process; says whether that was possible."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEEP))
