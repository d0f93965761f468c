"""Compare the seconds of one splitting round with those of 20,000 steps, on d-1000-1000-1 with m candidates.

``python -m papers shen2026:growth-ntk`` and ``shen2026:growth-kkt`` measure what growth recovers.
"""

from __future__ import annotations

import torch

from experiments.report import Report, only_on
from experiments.timing import median_time
from residuum import attacks
from residuum.attacks.stationarity.growth import Grower
from residuum.attacks.stationarity.objectives import BinaryKKT
from residuum.attacks.stationarity.solver import Solver
from residuum.attacks.stationarity.splitting import SampleSplitting
from residuum.networks import MLP
from residuum.records import Knowledge

WIDTHS, STEPS = (784, 1000, 1000, 1), 20_000
SHARE = 0.05  # of those steps, at most


def splitting(device: str) -> Report:
    """Compare one round, with half of the candidates split, with steps of the same attack."""
    only_on(device, "cuda")
    torch.manual_seed(0)
    m = 1000
    config = attacks.BinaryKKT(
        candidates=m,
        restarts=1,
        steps=STEPS,
        device=device,
        sigma=0.1,
        split="curvature",
        split_trigger="period",
        split_every=STEPS,
        split_cap=0.5,
        split_threshold=0.0,
        sharpness_from=10.0,
    )
    solver = Solver(MLP(WIDTHS), BinaryKKT(), Knowledge(), config, WIDTHS[:1], 1, m)
    state, grower = solver.solve(solver.start(), 0), Grower(solver, SampleSplitting())
    solver.advance(state, 25, True)
    step = median_time(lambda: solver.advance(state, 1000, True), 3, 1, device)[1] / 1000
    due = state.replace(step=STEPS)
    solver.config = config.changed(steps=2 * STEPS + 1, anneal="none")
    solver.sharpness = 10.0
    grown, seconds = median_time(lambda: grower.run_due_rounds(due), 3, 1, device)
    share = seconds / (STEPS * step)
    figures = {
        "added": int(grown.population.active.sum()) - m,
        "step_seconds": step,
        "round_seconds": seconds,
        "share_of_20000_steps": share,
    }
    return Report(
        what=f"{SHARE:.0%} of {STEPS} steps over one splitting round",
        settings={"candidates": m, "widths": list(WIDTHS)},
        seeds=(0,),
        figures=[figures],
        ratio=SHARE / share,
        bar=1.0,
    )
