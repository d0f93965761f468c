"""What a figure was measured with: versions, machine, device."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "residuum",
    "torch",
    "numpy",
    "scipy",
    "safetensors",
    "scikit-learn",
    "clarabel",
    "kornia",
    "optuna",
)
OPTIONAL = ("opacus", "ray")  # of the extras dp and cluster: named where they are installed


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions of what computes, the processor, and the device in words."""
    found = {}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "python": platform.python_version(),
        "packages": found,
        "system": platform.system(),
        "device": name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def sha256(path: str | Path) -> str:
    """Hash of a file, read in pieces."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
