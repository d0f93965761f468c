"""Random number generators of attacks, one per name."""

from __future__ import annotations

import hashlib

import torch


def stream(*names: str | int) -> torch.Generator:
    """A generator of its own for these names: equal ones give equal numbers, on any machine.

    Datasets, initial weights and attacks all take small seeds. With one generator per plain seed an
    attack could start at the very numbers that synthetic data were made of, and find what it was given.
    """
    digest = hashlib.sha256(repr(("attack", *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
