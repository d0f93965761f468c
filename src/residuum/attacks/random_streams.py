"""Random number generators with names: the same names and seeds always give the same random numbers."""

from __future__ import annotations

import hashlib

import torch


def stream(*names: str | int) -> torch.Generator:
    """Return a random number generator that depends only on the given names.

    Equal names give equal numbers on every machine. Datasets, initial weights and attacks all use small
    seeds. If datasets and attacks used the same generator for a seed, an attack could start from the same
    random numbers as synthetic training data and recover the data by accident.

    Args:
        *names: Names and seeds that identify the generator.

    Returns:
        The generator.
    """
    digest = hashlib.sha256(repr(("attack", *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
