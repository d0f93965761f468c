"""Does the grade of a match say how good the match is?

    python -m experiments.grades [--data FOLDER] [--jobs 2]

Networks are trained on digits, MNIST and CIFAR-10. The grades near-copy, resembles and class-like are given
to candidates of a known kind, and to what an attack reconstructs. FOLDER holds ``mnist.npz`` and
``cifar10.npz``. Without it and without the environment variable RESIDUUM_DATA, only digits are measured.
Finished rows are stored in ``experiments/results/grades.json``, and an interrupted run continues with the
same command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

import residuum as rs
from experiments import RESULTS
from experiments.attack_options import knowledge_with_mean
from experiments.programs import run_program
from residuum import similarity
from residuum.attacks import attack, make_attack
from residuum.auditing.controls import SampleSets
from residuum.auditing.outcomes import CLASS_LEVEL, NEAR_COPY, RESEMBLANCE
from residuum.auditing.scores import grades, run_tests
from residuum.errors import ResiduumError
from residuum.evaluation.matching import as_array
from residuum.evaluation.scoring import CandidatePool, all_candidates
from residuum.records import Split, write_json
from residuum.records.rundir import environment
from residuum.training import TrainingConfig, make_release, train

FILE = RESULTS / "grades.json"
ROOT = "RESIDUUM_DATA"  # environment variable with the folder of the images
Row = dict[str, Any]
# Names of the grades in the stored results.
STORED_GRADES = {NEAR_COPY: "near-copy", RESEMBLANCE: "resembles", CLASS_LEVEL: "class-like"}


@dataclass(frozen=True)
class Case:
    """Networks of one data set: their architecture, the number of samples, and how many seeds."""

    data: str
    arch: str
    n: int
    seeds: int


CASES = {
    "grades_digits": Case("digits", "mlp:64-100-100-1", 40, 5),
    "grades_mnist": Case("mnist", "mlp:784-300-300-1", 100, 3),
    "grades_cifar": Case("cifar10", "mlp:3072-300-300-1", 50, 3),
}


def grade_network(case: Case, seed: int) -> Row:
    """Return the grades of what an attack reconstructs, and of candidates of a known kind."""
    split = rs.load_dataset(case.data, case.n, seed=seed, holdout=1500)
    state = train(case.arch, split.train, TrainingConfig(steps=2000, seed=seed))
    checkpoint = make_release(state, case.arch, split.train, "binary")
    config = make_attack(restarts=2, steps=2000, seed=seed)
    reconstruction = attack(checkpoint, knowledge_with_mean(split.train), config)
    samples = SampleSets(split.train, split.holdout)
    tests, _ = run_tests({"kkt": all_candidates(reconstruction)}, samples, seed, 1000, float("inf"))
    test = tests["kkt"]
    grade = grades(test, test.field.strata)
    values = {
        g: [float(test.control.value[i]) for i, which in grade.items() if which == g]
        for g in set(grade.values())
    }
    return {
        "n": case.n,
        "recovered": int(test.control.recovered.sum()),
        "p": test.adjusted,
        "expected": test.control.expected_by_chance,
        "grades": dict(Counter(STORED_GRADES[which] for which in grade.values())),
        "ncc": {STORED_GRADES[g]: [min(v), float(np.median(v)), max(v)] for g, v in values.items()},
        "confusion": grade_known_kinds(split, seed),
    }


def grade_known_kinds(split: Split, seed: int) -> dict[str, dict[str, int]]:
    """Count the grades of candidates that hold the sample, a similar image, or only the class.

    Args:
        split: Training samples and held-out samples. A third of the held-out samples makes candidates. The
            others grade them.
        seed: Of the noise and of the third.

    Returns:
        Counts of grades for each kind. A near-copy is the sample with noise of half its standard deviation
        (NCC about 0.9). A resembling image is the nearest of the third. A class-like image is a class mean.
    """
    x, y, n = split.train.x.double(), split.train.y, len(split.train)
    rng = np.random.default_rng((seed, 11))
    unseen = torch.from_numpy(rng.permutation(len(split.holdout)) < len(split.holdout) // 3)
    images, labels = split.holdout.x[unseen].double(), split.holdout.y[unseen]
    pool = split.holdout.replace(x=split.holdout.x[~unseen], y=split.holdout.y[~unseen])
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape)))
    spread = (x - x.flatten(1).mean(1).reshape(-1, *[1] * (x.ndim - 1))).flatten(1).std(1)
    candidates_of = {
        NEAR_COPY: x + 0.5 * spread.reshape(-1, *[1] * (x.ndim - 1)) * noise,
        RESEMBLANCE: images[similarity.ncc(x, images).argmax(1)],
        CLASS_LEVEL: torch.stack([images[labels == label].mean(0) for label in y]),
    }
    table: dict[str, dict[str, int]] = {}
    for kind, candidates in candidates_of.items():
        pools = {kind: CandidatePool(candidates, torch.ones(len(candidates)))}
        tests, _ = run_tests(pools, SampleSets(split.train, pool), seed, 200, 1e9)
        test = tests[kind]
        paired = np.diag(as_array(similarity.ncc(x, candidates)))
        control = replace(test.control, recovered=np.ones(n, bool), value=paired)
        counts = Counter(grades(replace(test, control=control), test.field.strata).values())
        table[STORED_GRADES[kind]] = {key: counts[g] for g, key in STORED_GRADES.items()}
    return table


def measure(name: str, seed: int) -> Row:
    """Return one row. Run it in a process of its own."""
    torch.set_num_threads(1)
    start = time.monotonic()
    row = grade_network(CASES[name], seed)
    return {"seed": seed, "took": round(time.monotonic() - start, 2)} | row


def run(names: list[str], jobs: int) -> None:
    """Measure the rows without a result, and write the file after each. A failed row is skipped."""
    rows: dict[str, list[Row]] = json.loads(FILE.read_text())["rows"] if FILE.exists() else {}
    done = {(name, row["seed"]) for name, group in rows.items() for row in group}
    missing = [
        (name, seed)
        for name in names
        for seed in range(CASES[name].seeds)
        if (name, seed) not in done
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(measure, *case): case for case in missing}
        for finished in as_completed(waiting):
            name, seed = waiting[finished]
            try:
                row = finished.result()
            except (ValueError, RuntimeError, AssertionError, ResiduumError) as problem:
                print(f"{name} {seed}: {type(problem).__name__}: {problem}", file=sys.stderr)
                continue
            rows.setdefault(name, []).append(row)
            rows[name].sort(key=lambda row: row["seed"])
            write_json(FILE, {"rows": rows, "environment": environment("cpu")})
            print(f"{name} {seed}: {row['took']:.1f} s", flush=True)


def main() -> int:
    """Measure the rows that have no result."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--data", metavar="FOLDER", help=f"folder of the images; default: ${ROOT}")
    options = parser.parse_args()
    if options.data:
        os.environ[ROOT] = options.data
    has_images = bool(os.environ.get(ROOT))
    run([name for name in CASES if has_images or name == "grades_digits"], options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
