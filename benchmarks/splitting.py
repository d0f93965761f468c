"""Does growing the candidate set help, and is it the curvature direction that helps?

Run as ``python -m benchmarks.splitting --root DATA --device cuda --out DIR``. One victim; every arm
attacks it from the same initial candidates, one restart per seed, all restarts of an arm side by
side, equal step counts:

none          no growth
paper         splitting as published: eigenvalue below -0.1, at most half of the candidates, eta <= 0.01
curvature     splitting with a threshold relative to the loss and steps as long as they lower it
random        random new candidates, as many per round as curvature added
frank-wolfe   new candidates at maxima of |<r, f(x)>|, as many per round
wide          no growth, from the start with as many candidates as curvature ends with

Per sample: the nearest candidate (L2 and NCC), the mean difference to ``none`` over seeds, and a
bootstrap 95% interval of its mean over ALL samples; the same against held-out images, which is what
more candidates bring by chance; the top-25 rule of Shen et al. 2026 (samples that pass the threshold
before or after, the best 25 of them, how many improved), and as control the same rule between
restarts without growth that differ in the seed alone. ``--cost`` times one round instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import clock, median_time
from residuum.attacks import GROWTH_PRESETS, PRESETS, AttackConfig
from residuum.attacks.objectives import BinaryKKT
from residuum.attacks.run import prepare, resolve
from residuum.attacks.solver import Solver
from residuum.datasets import load_dataset
from residuum.networks import MLP
from residuum.records import Checkpoint, Knowledge, Split, write_json
from residuum.records.environment import environment
from residuum.reproduce.shen2026.paired import THRESHOLD, compare, control, per_sample
from residuum.training import TrainingConfig, train

NTK = PRESETS["ntk"]
BINARY = AttackConfig(objective="binary-kkt")
VICTIMS = {
    "ntk": TrainingConfig(
        method="gd", loss="squared", lr=5e-4, momentum=0.9, steps=40000, init="lecun",
        dtype="float32", stop_loss=1e-9,
    ),
    "binary-kkt": TrainingConfig(steps=6000, dtype="float32"),
}  # fmt: skip
ARMS = ("none", "paper", "curvature", "random", "frank-wolfe", "wide")


def victim(options: argparse.Namespace) -> tuple[Checkpoint, Knowledge, Split]:
    """Trained here; the attacker knows box and mean, and for NTK the initial weights."""
    ntk = options.objective == "ntk"
    task = "regression" if ntk else "binary"
    split = load_dataset(options.dataset, options.n, seed=None, root=options.root, task=task)
    widths = (split.train.x[0].numel(), *options.hidden, 1)
    arch = "mlp:" + "-".join(map(str, widths)) + (",bias=all" if ntk else "")
    training = VICTIMS[options.objective]
    if options.training_steps:
        training = replace(training, steps=options.training_steps)
    state = train(arch, split.train, training, task=task, device=options.device)
    print(f"victim: {arch}, {state.step} steps, {state.status}, {state.history[-1]}", flush=True)
    checkpoint = Checkpoint(dict(state.theta), arch, split.train.shape, (), task)
    knowledge = Knowledge(
        value_range=(0.0, 1.0), mean=split.train.mean, shape=split.train.shape,
        theta0=state.theta0 if ntk else None,
    )  # fmt: skip
    return checkpoint, knowledge, split


def configuration(arm: str, options: argparse.Namespace, so_far: dict[str, Any]) -> AttackConfig:
    """The settings of one arm; random and frank-wolfe add what curvature added, on average."""
    base = replace(
        NTK if options.objective == "ntk" else BINARY, candidates=options.candidates,
        restarts=options.seeds, steps=options.steps, device=options.device, seed=options.seed,
        dtype=options.dtype,
    )  # fmt: skip
    growth = {"split_trigger": "period", "split_every": options.every, "split_cap": 0.5,
              "split_merge": False, "split_limit": 8 * options.candidates}  # fmt: skip
    reference = so_far.get("curvature") or so_far.get("paper")
    final = round(reference["final_candidates_mean"]) if reference else 2 * options.candidates
    rounds = max(1, (options.steps - 1) // options.every)
    if arm == "none":
        return base
    if arm == "wide":
        return replace(base, candidates=final)
    if arm == "paper":
        return replace(base, **{**GROWTH_PRESETS["paper"], **growth})
    if arm == "curvature":
        return replace(base, split="curvature", **growth)
    rate = (max(final, options.candidates + rounds) / options.candidates) ** (1 / rounds) - 1
    return replace(base, split=arm, **{**growth, "split_cap": rate, "split_limit": final})


def attack_arm(
    arm: str, options: argparse.Namespace, known: tuple[Checkpoint, Knowledge, Split],
    so_far: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One arm: its figures per seed and sample."""
    checkpoint, knowledge, data = known
    config = resolve(checkpoint, knowledge, configuration(arm, options, so_far))
    solver = prepare(checkpoint, knowledge, config)
    rounds = _time_rounds(solver, options.device)
    state, seconds = clock(solver.solve, options.device)
    population, x = state.population, solver.pixels(state.best_x).detach().cpu().double()
    active = (
        population.best_active.cpu() if population else torch.ones(x.shape[:2], dtype=torch.bool)
    )
    runs = [x[run][active[run]] for run in range(len(x))]
    events = [dict(event) for event in population.events] if population else []
    grew = [e for e in events if e["kind"] in ("split", "random", "frank-wolfe")]
    holdout = data.holdout.x[: len(data.train)].double()
    result = {
        "settings": config.to_json(),
        "seconds": seconds,
        "rounds": len(rounds),
        "seconds_per_round": float(np.mean(rounds)) if rounds else None,
        "share_of_time_in_rounds": sum(rounds) / seconds,
        "final_candidates": [len(run) for run in runs],
        "final_candidates_mean": float(np.mean([len(run) for run in runs])),
        "final_loss": state.best_loss.double().cpu().tolist(),
        "first_layer_residual": state.layers[-1][:, 0].clamp(min=0).sqrt().tolist(),
        "alive": state.alive.cpu().tolist(),
        "added": len(grew),
        "lowest_eigenvalue": min(
            (e["eigenvalue"] for e in events if "eigenvalue" in e), default=None
        ),
        "events": events[:400],
        "notes": list(solver.grower.notes.values()) if solver.grower else [],
        "train": per_sample(runs, data.train.x.double()),
        "held_out": per_sample(runs, holdout),
    }
    if solver.grower is not None:
        with solver.precision(False):
            result["second_order"] = solver.grower.verdict(state, solver._sharpness(state.step))
    return result


def _time_rounds(solver: Solver, device: str) -> list[float]:
    """Seconds of every round that was due, gathered while the solver runs."""
    found: list[float] = []
    grower = solver.grower
    if grower is None:
        return found
    inner = grower.after

    def timed(state: Any, sharpness: Any) -> Any:
        grown, seconds = clock(lambda: inner(state, sharpness), device)
        if grown is not state:
            found.append(seconds)
        return grown

    grower.after = timed  # type: ignore[method-assign]
    return found


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one splitting round over those of 20 000 steps, on d-1000-1000-1."""
    torch.manual_seed(0)
    widths, m, device = (784, *options.hidden, 1), options.candidates, options.device
    config = AttackConfig(
        objective="binary-kkt", candidates=m, restarts=1, steps=20000, device=device, sigma=0.1,
        dtype=options.dtype, split="curvature", split_trigger="period", split_every=20000,
        split_cap=0.5, split_threshold=0.0, sharpness_from=10.0,
    )  # fmt: skip
    solver = Solver(MLP(widths), BinaryKKT(), Knowledge(), config, (784,), 1, m)
    state = solver._initial()
    solver._adopt(state)
    assert solver.grower is not None
    if device.startswith("cuda"):
        solver.static.run(state, 25, True)
        steps: Callable[[], Any] = lambda: solver.static.run(state, 1000, True)  # noqa: E731
        _, seconds = median_time(steps, 3, 1, device)
        step = seconds / 1000
    else:
        x, lam, moments = state.x.clone(), state.lam.clone(), dict[str, Tensor]()
        _, step = median_time(lambda: solver._step(x, lam, moments, 0, state.moving), 5, 1, device)
    due = state.replace(step=20000)
    solver.config = solver.grower.config = replace(config, steps=40001)

    def one_round() -> Any:
        with solver.precision(False):
            return solver.grower.after(due, 10.0)  # type: ignore[union-attr]

    grown, seconds = median_time(one_round, 3, 1, device)
    added = int(grown.population.active.sum()) - m
    return {
        "candidates": m, "widths": list(widths), "added": added, "step_seconds": step,
        "round_seconds": seconds, "share_of_20000_steps": seconds / (20000 * step), "bar": 0.05,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default=None)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--objective", choices=tuple(VICTIMS), default="ntk")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1000, 1000])
    parser.add_argument("--steps", type=int, default=80_000)
    parser.add_argument("--every", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training-steps", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS[:5]))
    parser.add_argument("--seconds", type=float, default=540.0, help="no arm starts after this")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start, name = time.time(), options.name or f"splitting-{options.objective}-{options.dataset}"
    if options.cost:
        found = {"cost": cost(options), "environment": environment(options.device)}
        print(json.dumps(found["cost"]), flush=True)
        write_json(options.out / f"{options.name or 'splitting-cost'}.json", found)
        return
    known = victim(options)
    result: dict[str, Any] = {
        "benchmark": name, "n": options.n, "seeds": options.seeds, "arms": {}, "compared": {},
        "environment": environment(options.device),
    }  # fmt: skip
    for arm in options.arms:
        if time.time() - start > options.seconds:
            result.setdefault("left_out", []).append(arm)
            continue
        result["arms"][arm] = attack_arm(arm, options, known, result["arms"])
        if (base := result["arms"].get("none")) is not None:
            result["control"] = control(base)
            if arm != "none":
                result["compared"][arm] = compare(result["arms"][arm], base)
        if {"curvature", "random"} <= result["arms"].keys():
            pair = (result["arms"][each] for each in ("curvature", "random"))
            result["curvature_against_random"] = compare(*pair)
        result["seconds"] = time.time() - start
        write_json(options.out / f"{name}.json", result)
        _print(arm, result)


def _print(arm: str, result: dict[str, Any]) -> None:
    part, compared = result["arms"][arm], result["compared"].get(arm, {})
    print(
        f"{arm}: {part['seconds']:.0f} s, candidates {part['final_candidates']}, L2 < {THRESHOLD} "
        f"one-to-one {part['train']['below_threshold_one_to_one']} (held out "
        f"{part['held_out']['below_threshold_one_to_one']}), loss {part['final_loss']}, lowest "
        f"eigenvalue {part['lowest_eigenvalue']}, rounds {part['rounds']} x "
        f"{part['seconds_per_round']} s",
        flush=True,
    )
    for key in ("train_l2_difference", "held_out_l2_difference", "train_ncc_difference", "top25"):
        if key in compared:
            print(f"   {key}: {compared[key]}", flush=True)
    if arm == "none":
        print(f"   control: {result['control']['top25']}", flush=True)


if __name__ == "__main__":
    main()
