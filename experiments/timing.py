"""Measure wall-clock time, and limit the threads of torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def clock(work: Callable[[], T], device: str = "cpu") -> tuple[T, float]:
    """Return the result of ``work()`` and its wall-clock seconds, after the accelerator has finished."""
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - start


def median_time(
    work: Callable[[], T], repeats: int, warmups: int = 1, device: str = "cpu"
) -> tuple[T, float]:
    """Return the last result of ``work()`` and the median seconds over ``repeats`` calls."""
    for _ in range(warmups):
        work()
    runs = [clock(work, device) for _ in range(repeats)]
    return runs[-1][0], statistics.median(seconds for _, seconds in runs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with ``count`` torch threads. Small problems are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
