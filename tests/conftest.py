"""One thread per test process: the suite runs on as many processes as there are cores."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it

import torch

if (
    "RESIDUUM_CACHE" not in os.environ
):  # twins of tests are nobody else's; one process makes the folder
    os.environ["RESIDUUM_CACHE"] = tempfile.mkdtemp(prefix="residuum-twins-")
    atexit.register(shutil.rmtree, os.environ["RESIDUUM_CACHE"], ignore_errors=True)

torch.set_num_threads(1)
