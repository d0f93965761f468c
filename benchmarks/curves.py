"""Draw the time of one attack step against m, d, width and the number of restarts.

One of the four is varied at a time around d = 784, width 1000, m = 1000 and one restart, with the terms of
the first layer. The picture is docs/figures/step-DEVICE.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.step import ours
from experiments.report import Report, device_name

BASE = {"m": 1000, "d": 784, "width": 1000, "restarts": 1}
VARIED = {
    "m": (100, 300, 1000, 3000),
    "d": (64, 256, 784, 3072),
    "width": (100, 300, 1000, 2000),
    "restarts": (1, 2, 4, 8),
}
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def curves(device: str) -> Report:
    """Measure and draw the time of a step for all sizes."""
    gpu = device.startswith("cuda")
    rows: list[dict[str, Any]] = []
    for name, values in VARIED.items():
        for value in values:
            case = {**BASE, name: value}
            d = case.pop("d")
            dtype = "tf32" if gpu else "float32"
            ms = ours(d, device, 200 if gpu else 3, dtype=dtype, layers="first", **case)
            rows.append({"varied": name, "value": value, "ms": round(ms, 4)})
    draw(rows, device)
    base = next(r["ms"] for r in rows if r["varied"] == "restarts" and r["value"] == 1)
    largest = next(r["ms"] for r in rows if r["varied"] == "restarts" and r["value"] == 8)
    return Report(
        what="milliseconds per step; ratio: eight restarts one by one over eight in one program",
        settings=BASE,
        seeds=(0,),
        figures=rows,
        ratio=8 * base / largest,
        bar=0.0,  # a picture; the bars are in `step` and `scaling`
    )


def draw(rows: list[dict[str, Any]], device: str) -> None:
    """Draw one panel for each size that is varied."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
    labels = {
        "m": "candidates m",
        "d": "input size d",
        "width": "hidden width",
        "restarts": "restarts R",
    }
    for panel, name in zip(panels, VARIED, strict=True):
        points = [r for r in rows if r["varied"] == name]
        panel.loglog([r["value"] for r in points], [r["ms"] for r in points], "o-", color="#0072B2")
        panel.set_xlabel(labels[name])
        panel.set_xticks([r["value"] for r in points], [str(r["value"]) for r in points])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds per step")
    figure.suptitle(
        f"One attack step on {device_name(device)}; else d=784, width 1000, m=1000, R=1"
    )
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"step-{device_name(device)}.png", dpi=110)
    plt.close(figure)
