"""Draw one activation boundary that training moved onto training records.

    python -m experiments.attribute_picture DIR

``MLPRegressor`` is trained on two standardized columns of 30 rows of scikit-learn's diabetes table. The
picture shows the activation boundaries of its neurons as lines and the training records as points. The
highlighted boundary is the one with the most training records within 1e-3 standard deviations. The program
also prints how many boundaries pass through a training record and through a held-out record.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from experiments.programs import parse_paths, run_program

RECORDS, NEURONS, SEED = 30, 100, 0
COLUMNS = ("bmi", "bp")
ON_BOUNDARY = 1e-3  # distance in standard deviations
MIN_NORM = 1e-3  # weights of neurons that training switched off decay to zero
LIMIT = 2.9  # of both axes, in standard deviations


def main() -> None:
    """Train and draw."""
    (folder,) = parse_paths(__doc__, "DIR")
    x, holdout, weight, bias = train()
    for name, records in (("training", x), ("held-out", holdout)):
        counts = (measure_distances(records, weight, bias) < ON_BOUNDARY).sum(1)
        print(f"{counts.mean():.2f} boundaries pass through a {name} record")
    folder.mkdir(parents=True, exist_ok=True)
    draw(x, weight, bias).savefig(
        folder / "attributes-boundary.png", dpi=110, facecolor="white", bbox_inches="tight"
    )


def train() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training records, held-out records, and weights and biases of the trained neurons."""
    from sklearn.datasets import load_diabetes
    from sklearn.neural_network import MLPRegressor

    data = load_diabetes()
    columns = [data.feature_names.index(name) for name in COLUMNS]
    order = np.random.default_rng(SEED).permutation(len(data.data))
    x, y = data.data[order][:, columns], data.target[order]
    x = (x - x[:RECORDS].mean(0)) / x[:RECORDS].std(0)
    y = (y - y[:RECORDS].mean()) / y[:RECORDS].std()
    x, holdout, y = x[:RECORDS], x[RECORDS:], y[:RECORDS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = MLPRegressor(
            hidden_layer_sizes=(NEURONS,),
            random_state=SEED,
            max_iter=20000,
            tol=0,
            n_iter_no_change=20000,
        ).fit(x, y)
    weight, bias = network.coefs_[0].T, network.intercepts_[0]
    is_used = np.linalg.norm(weight, axis=1) > MIN_NORM
    return x, holdout, weight[is_used], bias[is_used]


def measure_distances(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the distance of each record from each boundary, (records, neurons)."""
    return np.abs(x @ weight.T + bias) / np.linalg.norm(weight, axis=1)


def draw(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
    """Return the picture."""
    from matplotlib.figure import Figure

    is_on_boundary = measure_distances(x, weight, bias) < ON_BOUNDARY
    best = int(is_on_boundary.sum(0).argmax())
    figure = Figure(figsize=(6.2, 5.4))
    axes = figure.subplots()
    ends = np.array([-LIMIT, LIMIT])
    for neuron in range(len(weight)):
        is_best = neuron == best
        style = {"color": "#0072b2" if is_best else "#c9ced2", "linewidth": 2 if is_best else 0.7}
        (a, b), c = weight[neuron], bias[neuron]
        line = (ends, -(a * ends + c) / b) if abs(b) > abs(a) else (-(b * ends + c) / a, ends)
        axes.plot(*line, **style, zorder=2 if is_best else 1)
    is_touched = is_on_boundary[:, best]
    axes.scatter(*x[~is_touched].T, s=22, color="#444444", zorder=3, label="training record")
    label = "training record on the blue boundary"
    axes.scatter(*x[is_touched].T, s=60, color="#d55e00", zorder=4, label=label)
    axes.set(xlim=ends, ylim=ends)
    axes.set(
        xlabel=f"{COLUMNS[0]} (standard deviations)", ylabel=f"{COLUMNS[1]} (standard deviations)"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=2, frameon=False)
    print(f"{int(is_touched.sum())} records lie on the blue boundary, of {RECORDS}")
    return figure


if __name__ == "__main__":
    sys.exit(run_program(main))
