"""One thread per test process: the suite runs on as many processes as there are cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it

import torch

torch.set_num_threads(1)
