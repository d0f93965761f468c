"""Memory that is freed every step and wanted again at once.

The C library hands large freed blocks back to the system, and the next step pays for mapping and
clearing them again: on small attacks that is most of the time. Raising its thresholds keeps up to
KEEP bytes in the process. Linux with glibc; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt
KEEP, LARGEST = 1 << 29, 32 << 20  # LARGEST: glibc accepts no more


@cache
def keep_freed_memory() -> bool:
    """Raise the thresholds once per process; says whether that was possible."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEEP))
