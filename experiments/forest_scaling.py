"""How do time and memory of the attack on forests grow? ``python -m experiments.forest_scaling``.

Each case fits a forest of 100 trees to n rows of Friedman-1 with 20 columns, and recovers the table in a
process of its own, on one core. The bar at n = 10,000: under 2 minutes and 2 GB, all targets, 99% of cells.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from experiments.common import Case, run_cases
from experiments.forest_tables import compare

SIZES = (1000, 3000, 10_000)
FITS = 3
FIRST_SEED = 294113


def cases() -> list[Case]:
    return [{"n": n, "seed": FIRST_SEED + number} for n in SIZES for number in range(FITS)]


def measure(case: Case) -> Case:
    command = (
        f"from experiments.forest_scaling import recover; recover({case['n']}, {case['seed']})"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True, env=environment
    )
    result: Case = json.loads(process.stdout)
    return result


def recover(n: int, seed: int) -> None:
    """Fit a forest, recover its table, and print the counts, the seconds of one core and the largest memory.

    The memory includes the model itself.
    """
    from sklearn.ensemble import RandomForestRegressor

    from experiments.private_tables import make_table
    from residuum.io.forests import read_forests
    from residuum.io.release import open_release
    from residuum.trees.recovery import recover_table

    table = make_table("friedman1-20", n, seed)
    model = RandomForestRegressor(random_state=seed).fit(table.x, table.y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        forest = read_forests(open_release(path))[0].forest
    start = time.process_time()
    recovered = recover_table(forest, table.ranges)
    seconds = time.process_time() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    counts = compare(recovered, replace(table, holdout=table.holdout[:100]))
    print(json.dumps({**counts, "cpu_seconds": round(seconds, 1), "gib": round(memory, 2)}))


def summarize(rows: list[Case]) -> str:
    lines = ["n | targets | rows | cells | false exact cells | s on one core | GiB"]
    seconds = {}
    for n in SIZES:
        fits = [row for row in rows if row["case"]["n"] == n]
        if fits:
            columns = (
                "{targets}",
                "{rows}",
                "{cells:.2%}",
                "{false_exact}",
                "{cpu_seconds}",
                "{gib}",
            )
            texts = [" ".join(column.format(**fit) for fit in fits) for column in columns]
            lines.append(" | ".join([str(n), *texts]))
            seconds[n] = sum(fit["cpu_seconds"] for fit in fits) / len(fits)
    if SIZES[0] in seconds and SIZES[-1] in seconds:
        growth = math.log(seconds[SIZES[-1]] / seconds[SIZES[0]]) / math.log(SIZES[-1] / SIZES[0])
        lines.append(f"time grows as n^{growth:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cases("forest_scaling", cases(), measure, summarize)
