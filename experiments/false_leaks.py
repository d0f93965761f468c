"""How often is a leak reported for samples that a network never saw? ``python -m experiments.false_leaks``.

A network is trained on n digits and attacked once by binary-kkt and unmix. Then random sets of n digits
that the network never saw are tested as if they were its training set, against disjoint held-out digits.
The sets and the held-out digits are exchangeable, so at most 1% of the sets may be reported as a leak.
The whole rule of an audit is applied, by the audit's own functions.
"""

from __future__ import annotations

import numpy as np
import torch

import residuum as rs
from experiments.attack_options import knowledge_with_mean
from experiments.common import Case, run_cases
from residuum.auditing.controls import explain_by_knowledge, run_controls, set_aside_repeats
from residuum.auditing.scores import findings, run_tests
from residuum.auditing.verdict import LEAK, Checks, decide
from residuum.evaluation.null import SIGNIFICANCE
from residuum.evaluation.scoring import all_candidates
from residuum.records import Dataset
from residuum.risk.membership import measure_membership

HIDDEN = "100-100"
SIZES = ((30, 500), (8, 200), (100, 300))  # samples under test, held-out samples
SEEDS = tuple(range(9400, 9448))  # no other script uses them; the first run stopped at 9411
SETS, SUBSETS = 25, 600
STEPS, RESTARTS, ATTACK_STEPS = 1500, 2, 500
MAX_SHARE = 0.01


def run_case(seed: int, n: int, pool: int) -> Case:
    """Attack one network, then test sets of samples that it never saw."""
    arch = f"mlp:64-{HIDDEN}-1"
    split = rs.load_dataset("digits", n, seed=seed, center=False)
    seen, unseen = split.train, split.holdout
    center = seen.x.mean(0)
    trained = seen.replace(x=seen.x - center, mean=center)
    state = rs.train(arch, trained, rs.TrainingConfig(steps=STEPS, seed=seed))
    network = rs.Network(state.theta, arch, trained.shape, task="binary")
    attacked = rs.audit(
        network,
        knowledge=knowledge_with_mean(trained),
        attacks=[
            {"attack": "binary-kkt", "restarts": RESTARTS, "steps": ATTACK_STEPS},
            {"attack": "unmix"},
        ],
        baselines=False,
        seed=seed,
    )
    pools = {
        reconstruction.attack: all_candidates(reconstruction)
        for reconstruction in attacked.reconstructions
    }
    rng = np.random.default_rng((seed, n))
    counts = {"sets": SETS, "significant": 0, "leaks": 0, "caught": 0}
    for number in range(SETS):
        order = torch.from_numpy(rng.permutation(len(unseen)))
        mean = unseen.x[order[:n]].mean(0)
        tested, holdout = (
            center_by(unseen.take(rows), mean) for rows in (order[:n], order[n : n + pool])
        )
        claim = set_aside_repeats(tested, holdout)
        controls = run_controls(claim, knowledge_with_mean(tested), seed=number)
        level = controls.level
        tests, _ = run_tests(pools, claim, number, SUBSETS, float("inf"), level=level)
        matches = findings(tests, len(claim.train), row_numbers=claim.train.rows)
        failures = (*controls.failures, *explain_by_knowledge(controls, matches.samples))
        members = measure_membership(network, claim.train, claim.holdout, number)
        verdict = decide(matches, attacked.attacks, Checks(failures, level=level), members)
        is_significant = matches.p_value is not None and matches.p_value <= SIGNIFICANCE
        counts["significant"] += is_significant
        counts["leaks"] += verdict.outcome == LEAK
        counts["caught"] += is_significant and bool(failures)
    return {"attacks": list(pools), **counts}


def center_by(data: Dataset, mean: torch.Tensor) -> Dataset:
    """Subtract ``mean`` from the samples, as the training mean of an audit is."""
    return data.replace(x=data.x - mean, mean=mean, row_numbers=None)


def cases() -> list[Case]:
    return [{"seed": seed, "n": n, "pool": pool} for n, pool in SIZES for seed in SEEDS]


def measure(case: Case) -> Case:
    torch.set_num_threads(1)
    return run_case(**case)


def summarize(rows: list[Case]) -> str:
    """Return counts by setting. The bar: at most 1% of the sets are reported as a leak."""
    columns = ("sets", "significant", "leaks", "caught")
    lines = [f"{'samples, held out':>18}" + "".join(f"{name:>12}" for name in columns)]
    for n, pool in SIZES:
        group = [row for row in rows if row["case"]["n"] == n]
        counts = "".join(f"{sum(row[name] for row in group):12}" for name in columns)
        lines.append(f"{f'{n}, {pool}':>18}{counts}")
    leaks, sets = (sum(row[name] for row in rows) for name in ("leaks", "sets"))
    return "\n".join([*lines, f"leaks: {leaks} of {sets} (bar: {MAX_SHARE * sets:g})"])


if __name__ == "__main__":
    run_cases("false_leaks", cases(), measure, summarize)
