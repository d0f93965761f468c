"""Draw rows of a training table next to their reconstruction from the file of a forest.

    python -m experiments.forest_picture DIR

A default regression forest is trained on 250 rows of scikit-learn's diabetes table and written as a pickle.
The attack reads the pickle and knows neither data nor the ranges of the columns. The picture shows the first
eight rows. A cell is right if it is within 1e-5 of the range of its column.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.programs import parse_paths, run_program
from residuum.attacks import ForestAttack
from residuum.report import drawing

RECORDS, ROWS = 250, 8
TOLERANCE = 1e-5  # of the range of a column
EXACT, INTERVAL, WRONG = "#d3ece2", "#fbe3bd", "#f3c6b8"  # tints of green, orange and vermilion
TARGET_HEAD = "target"
HEAD_COLOR, HEAD_INK, RULE_COLOR = "#f2f4f5", "#666666", "#c9ced2"
WIDTH, HEIGHT, LEFT, ROW_HEIGHT = 10.0, 6.1, 0.25, 0.245  # inches


@dataclass(frozen=True)
class Cell:
    """A cell of the picture: its text and the color behind it."""

    text: str
    color: str = "white"


def main() -> None:
    """Train, attack and draw."""
    (folder,) = parse_paths(__doc__, "DIR")
    names, x, y, table = recover()
    training, recovered = tables(x, y, table)
    folder.mkdir(parents=True, exist_ok=True)
    draw([*names, TARGET_HEAD], training, recovered).savefig(
        folder / "forest-table.png", dpi=150, facecolor="white"
    )


def recover() -> tuple[list[str], np.ndarray, np.ndarray, Any]:
    """Return names of columns, training values and targets, and the table that the attack recovers."""
    from sklearn.datasets import load_diabetes
    from sklearn.ensemble import RandomForestRegressor

    data = load_diabetes(scaled=False)
    x, y = data.data[:RECORDS], data.target[:RECORDS]
    model = RandomForestRegressor(random_state=0).fit(x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.pkl"
        path.write_bytes(pickle.dumps(model))
        table = ForestAttack().run(path)
    return list(data.feature_names), x, y, table


def tables(x: np.ndarray, y: np.ndarray, table: Any) -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Return the cells of the training table and of the recovered table.

    Args:
        x: (records, columns) training values.
        y: (records,) targets.
        table: The recovered table, in the order of the training table.

    Returns:
        Two lists of rows.
    """
    low, high = table.low.numpy(), table.high.numpy()
    is_exact, targets = table.is_exact.numpy(), table.targets[:, 0].numpy()
    is_right = np.abs((low + high) / 2 - x) <= TOLERANCE * np.ptp(x, 0)
    training, recovered = [], []
    for i in range(ROWS):
        training.append([Cell(f"{value:.5g}") for value in (*x[i], y[i])])
        cells = []
        for j in range(x.shape[1]):
            if is_exact[i, j]:
                cells.append(Cell(f"{low[i, j]:.5g}", EXACT if is_right[i, j] else WRONG))
            else:
                holds = low[i, j] <= x[i, j] <= high[i, j]
                cells.append(Cell(interval(low[i, j], high[i, j]), INTERVAL if holds else WRONG))
        is_target = abs(targets[i] - y[i]) <= TOLERANCE * np.ptp(y)
        cells.append(Cell(f"{targets[i]:.5g}", EXACT if is_target else WRONG))
        recovered.append(cells)
    return training, recovered


def interval(low: float, high: float) -> str:
    """Return an interval in words."""
    if np.isinf(low):
        return "any" if np.isinf(high) else f"≤ {high:.5g}"
    return f"> {low:.5g}" if np.isinf(high) else f"{low:.5g} to {high:.5g}"


def draw(names: list[str], training: list[list[Cell]], recovered: list[list[Cell]]) -> Any:
    """Return the picture of both tables, one below the other."""
    figure = drawing.new_figure(WIDTH, HEIGHT, automatic=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    draw_table(axes, 0.2, f"Training table, rows 0 to {ROWS - 1} of {RECORDS}", names, training)
    draw_table(axes, 3.0, "Recovered from the pickle alone, without data", names, recovered)
    legend = (
        (EXACT, "recovered exactly, equal to the training value"),
        (INTERVAL, "recovered as an interval, which holds the training value"),
    )
    x = LEFT
    for color, text in legend:
        axes.add_patch(rectangle(x, 5.75, 0.22, 0.16, color))
        axes.text(x + 0.3, 5.83, text, va="center", fontsize=10)
        x += 3.9
    return figure


def draw_table(axes: Any, top: float, title: str, names: list[str], rows: list[list[Cell]]) -> None:
    """Draw a table with its title and the numbers of its rows."""
    axes.text(LEFT, top + 0.08, title, fontsize=12.5, fontweight="bold", va="center")
    head = [Cell("row", HEAD_COLOR), *(Cell(name, HEAD_COLOR) for name in names)]
    lines = [head, *([Cell(str(i), HEAD_COLOR), *cells] for i, cells in enumerate(rows))]
    width = (WIDTH - 2 * LEFT) / len(head)
    for i, cells in enumerate(lines):
        y = top + 0.3 + i * ROW_HEIGHT
        for j, cell in enumerate(cells):
            x = LEFT + j * width
            axes.add_patch(rectangle(x, y, width, ROW_HEIGHT, cell.color))
            axes.text(
                x + width / 2,
                y + ROW_HEIGHT / 2,
                cell.text,
                fontsize=9.5,
                ha="center",
                va="center",
                fontweight="bold" if i == 0 else "normal",
                color=HEAD_INK if j == 0 else drawing.INK,
            )


def rectangle(x: float, y: float, width: float, height: float, color: str) -> Any:
    """Return a filled rectangle with a thin border."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor=RULE_COLOR, linewidth=0.6)


if __name__ == "__main__":
    sys.exit(run_program(main))
