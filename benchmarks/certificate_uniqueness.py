"""Time the uniqueness certificate of every sample of a large network, and check examples from scratch.

A 784-1000-1000-1 network is trained on 500 digits, enlarged from 8 x 8 to 28 x 28. The training samples
with their fitted multipliers stand for a reconstruction. Samples without a multiplier get the smallest
fitted one, because every candidate of an attack has a multiplier. There are three cases: no value range, a
value range, and a value range with 50 of the digits and nine more images in the pattern of each. Bounds are
proved by duality. For twenty samples, drawn by seed before anything is certified, the set of the example is
written out and the residual of ALL candidates is computed by one backward pass.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from torch import Tensor

from experiments.report import Report
from experiments.timing import clock
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.records import Dataset, Uniqueness
from residuum.stationarity import norm
from residuum.theory.kkt import evaluate, fit_multipliers
from residuum.theory.kkt_sets import KKTSet
from residuum.theory.patterns import compute_slopes, compute_switches
from residuum.theory.rows import constraint_rows, normalize_labels
from residuum.theory.uniqueness import estimate_cost, uniqueness
from residuum.training import TrainingConfig, make_release, train

ARCH, SAMPLES, STEPS, SEED = "mlp:784-1000-1000-1", 500, 250, 0
PATTERNS, MEMBERS, TRIED = 50, 10, 20
SECONDS = {"cpu": 480.0, "cuda": 60.0}
MEMORY = 4.0  # GB
Box = tuple[Tensor, Tensor] | None


def certificate_uniqueness(device: str) -> Report:
    """Compare the allowed seconds with the seconds taken, and check twenty examples."""
    model, data, lam = _victim()
    x = data.x.double()
    mean = torch.zeros(x.shape[1:]) if data.mean is None else data.mean.reshape(x.shape[1:])
    box = (0 - mean.double(), 1 - mean.double())
    candidates = KKTSet.from_samples(model, x, data.y, lam)
    cases: dict[str, tuple[KKTSet, Box]] = {
        "no range": (candidates, None),
        "0..1": (candidates, box),
        "0..1, ten per pattern": (_crowded(candidates, box), box),
    }
    rows = [_row(name, *case, device) for name, case in cases.items()]
    allowed = SECONDS[device.split(":")[0]]
    return Report(
        what="seconds allowed / seconds taken, certificate of all samples",
        settings={
            "data": "digits, 28 x 28",
            "samples": SAMPLES,
            "arch": ARCH,
            "tried": TRIED,
            "share": 0.1,
            "training": f"margin, {STEPS} steps, float32",
            "dtype": "float64",
            "threads": torch.get_num_threads(),
        },
        seeds=(SEED,),
        figures=rows,
        ratio=min(allowed / row["seconds"] for row in rows),
        bar=1.0,
        checks={
            "examples leave the residual as it is, all tried": all(
                r["change"] < 1e-9 for r in rows
            ),
            f"memory below {MEMORY:g} GB": all(row["memory, GB"] < MEMORY for row in rows),
            "every candidate certified": all(row["certified"] == SAMPLES for row in rows),
        },
    )


def _row(name: str, candidates: KKTSet, box: Box, device: str) -> dict[str, Any]:
    """Certify one case, and measure time, memory and gaps."""
    cost = estimate_cost(candidates, box=box, device=device)
    print(f"{name}: {cost}", flush=True)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    start, seen = time.process_time(), []
    certificate, seconds = clock(
        lambda: uniqueness(
            candidates, box=box, device=device, watch=lambda i, total: seen.append(i)
        ),
        device,
    )
    busy = time.process_time() - start
    gaps, distances = (
        certificate.determined_energy - certificate.determined_at_least,
        certificate.radius_most / certificate.size,
    )
    chosen = torch.randperm(len(certificate), generator=torch.Generator().manual_seed(SEED))[:TRIED]
    peak = (
        torch.cuda.max_memory_allocated() / 1e9
        if device.startswith("cuda")
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    )
    return {
        "seed": SEED,
        "case": name,
        "certified": len(certificate),
        "patterns": certificate.sums.patterns,
        "pinned": int(certificate.pinned.sum()),
        "seconds": seconds,
        "processor seconds": busy,
        "estimated seconds": cost.seconds,
        "reports of progress": len(seen),
        "memory, GB": peak,
        "tried": TRIED,
        "change": max(_change(candidates, certificate, int(i)) for i in chosen),
        "others keep at least, median": float(certificate.determined_at_least.median()),
        "least found, median": float(certificate.determined_energy.median()),
        "margins kept: at least, median": float(certificate.full_at_least.median()),
        "gap, median": float(gaps.median()),
        "gap, largest": float(gaps.max()),
        "distance at most / |x|, median": None if box is None else float(distances.median()),
    }


def _change(candidates: KKTSet, certificate: Uniqueness, i: int) -> float:
    """Return the change of the whole sum if an example takes its share of the weight of its group."""
    pattern = candidates.switches.pattern
    same = (pattern == pattern[i]).all(1) & (candidates.y == candidates.y[i])
    w, mass = certificate.share * candidates.lam[i], candidates.lam[same].sum()
    moment = (candidates.lam[same, None] * candidates.x[same].flatten(1)).sum(0)
    image = (moment - w * certificate.least[i].flatten()) / (mass - w)
    x = torch.cat(
        [candidates.x[~same], certificate.least[i][None], image.reshape(1, *candidates.x.shape[1:])]
    )
    y = torch.cat([candidates.y[~same], candidates.y[i].repeat(2)])
    lam = torch.cat([candidates.lam[~same], torch.stack([w, mass - w])])
    other = KKTSet(
        candidates.models, candidates.target, x, y, lam, y[:, None, None], candidates.task
    )
    return norm(
        {n: other.remainder[n] - candidates.remainder[n] for n in candidates.remainder}
    ) / norm(candidates.target)


def _crowded(candidates: KKTSet, box: tuple[Tensor, Tensor]) -> KKTSet:
    """Return the heaviest samples with nine images in the pattern of each, and random multipliers."""
    rng = torch.Generator().manual_seed(SEED)
    x = candidates.x[candidates.lam.argsort(descending=True)[:PATTERNS]].repeat_interleave(
        MEMBERS, 0
    )
    y = candidates.y[candidates.lam.argsort(descending=True)[:PATTERNS]].repeat_interleave(MEMBERS)
    v = torch.rand(x.shape, generator=rng, dtype=x.dtype)
    v = torch.where(v < 0.5, box[0], box[1]) - x  # towards a corner of the box
    speed, value = (
        compute_slopes(candidates.models, x, v),
        compute_switches(candidates.models, x).values,
    )
    reach = torch.where(speed * value < 0, -value / speed, torch.inf).amin(1).clamp(max=1)
    share = torch.rand(len(x), generator=rng, dtype=x.dtype) * 0.9 * reach
    x = x + share.reshape(-1, *[1] * (x.ndim - 1)) * v
    lam = torch.rand(len(x), generator=rng, dtype=x.dtype) + 0.1
    return KKTSet(candidates.models, candidates.target, x, y, lam, y[:, None, None], "binary")


def _victim() -> tuple[MLP, Dataset, Tensor]:
    data = load_dataset("digits", SAMPLES, center=False).train
    x = torch.nn.functional.interpolate(data.x, size=(28, 28), mode="bilinear").clamp(0, 1)
    data = Dataset(x - x.mean(0), data.y, x.mean(0))
    state = train(ARCH, data, TrainingConfig(steps=STEPS, seed=SEED, dtype="float32"))
    model = make_release(state, ARCH, data, "binary").copy_module().double().requires_grad_(False)
    assert isinstance(model, MLP)
    outputs = evaluate(model, data.x.double())
    rows = constraint_rows(outputs, normalize_labels(data.y, "binary", 1), "binary")
    lam = fit_multipliers(model, data.x.double(), rows)[0]
    return model, data, lam.clamp(min=float(lam[lam > 0].min()))
