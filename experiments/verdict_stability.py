"""Does an audit give the same exit code for every container and load of the machine?

Five networks, each written as a .pt file, as safetensors, with the prefix of DistributedDataParallel, in
bfloat16 and in float16. Every file is audited on a core of its own, and on a machine where four other
processes per audit compete for the cores. The bar: one exit code for all variants of a network. Run
``python -m experiments.verdict_stability``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.common import Case, run_cases

NETWORKS: tuple[Case, ...] = (
    {"data": "digits", "n": 60, "holdout": 500, "model": "mlp", "epochs": 200, "seed": 9700},
    {"data": "digits", "n": 500, "holdout": 600, "model": "mlp", "epochs": 15, "seed": 9701},
    {"data": "cancer", "n": 60, "holdout": 450, "model": "mlp", "epochs": 200, "seed": 9702},
    {"data": "cancer", "n": 120, "holdout": 420, "model": "mlp", "epochs": 15, "seed": 9703},
    {"data": "mnist", "n": 60, "holdout": 500, "model": "mlp", "epochs": 200, "seed": 9704},
)
VARIANTS = ("pt", "safetensors", "ddp", "bf16", "fp16")
LOADS = ("idle", "busy")
BUSY_PROCESSES = 4  # that compete with every audit


def cases() -> list[Case]:
    return [
        {**network, "variant": variant, "load": load}
        for load in LOADS
        for network in NETWORKS
        for variant in VARIANTS
    ]


def measure(case: Case) -> Case:
    import torch

    from experiments.ordinary import audit, draw, trained

    torch.set_num_threads(1)
    data = draw(case["data"], case["n"], case["holdout"], case["seed"])
    model = trained(case, data)
    busy = [_start_busy_process() for _ in range(BUSY_PROCESSES * (case["load"] == "busy"))]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = write(model, case["variant"], Path(folder))
            return audit(path, data["members"], data["holdout"])
    finally:
        for process in busy:
            process.kill()


def write(model: Any, variant: str, folder: Path) -> Path:
    """Write the weights of a network in one of the variants."""
    import torch
    from safetensors.torch import save_file

    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if variant in kinds:
        state = {name: t.to(kinds[variant]) for name, t in state.items()}
    if variant == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    if variant == "ddp":
        state = {f"module.{name}": t for name, t in state.items()}
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def _start_busy_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def summarize(rows: list[Case]) -> str:
    codes_of: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        codes_of[row["case"]["seed"]].add(row["exit_code"])
    lines = [
        f"network {seed}: exit codes {sorted(codes)}" for seed, codes in sorted(codes_of.items())
    ]
    stable = sum(len(codes) == 1 for codes in codes_of.values())
    return "\n".join([*lines, f"{stable} of {len(codes_of)} networks have one exit code"])


if __name__ == "__main__":
    run_cases("verdict_stability", cases(), measure, summarize)
