"""How accurate is exact recovery from polynomial networks, and what remains of trained ones?

    python -m experiments.polynomial

Exact KKT points on orthonormalized digits (closed form, no training) are identified from all neurons, from
16 of 36 neurons, and with noise. Cubic networks are then trained on digits. Results:
``experiments/results/polynomial-cpu.json`` and ``docs/figures/polynomial-*.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.report import Report, only_on, run_experiment
from experiments.timing import clock, threads
from residuum.attacks.exact.polynomial import identify
from residuum.datasets import load_dataset
from residuum.io.modules import checkpoint_from_module
from residuum.networks import Polynomial, PolynomialNetwork
from residuum.records import Dataset, write_atomic
from residuum.records.identification import Identification
from residuum.report import drawing
from residuum.report.drawing import BLUE, GREY, INK, ORANGE
from residuum.report.figures import identified_figure
from residuum.theory import certify
from residuum.training import TrainingConfig, train

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
CUBE = Polynomial((0, 0, 0, 1))
DRAWS, TRAINED, WIDTH, STEPS = 5, (4, 6, 10), 40, 10_000
ERROR_BAR = 1e-9


def polynomial(device: str) -> Report:
    """Measure the accuracy of exact recovery, and draw the figures."""
    only_on(device, "cpu")
    with threads(1):
        rows = [_exact(n) for n in (3, 5, 8, 12, 20)]
        recovered_of_8 = _partial()
        collapse, pictures = _trained()
    point = _point(8)
    identification = identify(checkpoint_from_module(point[0], input_shape=(8, 8)))
    _draw("polynomial-exact.png", identified_figure(identification, point[1]))
    _draw("polynomial-collapse.png", collapse_figure(pictures))
    worst = max(row["worst relative error"] for row in rows)
    return Report(
        what="bar over worst relative sample error, exact cubic points on orthonormalized digits",
        settings={"alpha": 3, "bar": ERROR_BAR, "dtype": "float64", "threads": 1},
        seeds=tuple(range(DRAWS)),
        figures=rows,
        ratio=ERROR_BAR / worst,
        bar=1.0,
        checks={
            "7 of 8 from 16 of 36 neurons, every draw": min(recovered_of_8) >= 7,
            "nothing certified for trained networks": not any(c["certified"] for c in collapse),
        },
        also={"recovered of 8 from 16 of 36 neurons": str(recovered_of_8), "trained": collapse},
    )


def _point(n: int) -> tuple[PolynomialNetwork, Tensor]:
    """Return an exact cubic point on n orthonormalized digits, one neuron for each singleton and pair.

    lam = 1 / k, neurons s w with w = k sum_{i in I} y_i x_i and s = (3 |w|^2)^(-1/4), a = 1 / (3 s). All k
    are equal, so margin 1 reads k^3 sum_{I with i} s_I^2 = 3.
    """
    data = load_dataset("digits", 60, seed=0).train
    x = torch.linalg.qr(data.x[: 3 * n : 3].flatten(1).double().T)[0].T[:n]
    y = torch.where(torch.arange(n) % 2 == 0, -1.0, 1.0).double()
    sets = [(i,) for i in range(n)] + [(i, j) for i in range(n) for j in range(i)]
    member = torch.zeros(len(sets), n, dtype=torch.float64)
    for row, members in zip(member, sets, strict=True):
        row[list(members)] = 1
    count = member.sum(1)
    # s^2 = (3 count)^(-1/2) / k, so k^2 sum (3 count)^(-1/2) over the sets with i is 3
    k = (3 / float((member[:, 0] * (3 * count) ** -0.5).sum())) ** 0.5
    s = (3 * count * k**2) ** -0.25
    model = PolynomialNetwork(64, len(sets), CUBE).double()
    model.load_state_dict({"weight": s[:, None] * k * (member * y) @ x, "coefficient": 1 / (3 * s)})
    assert certify(model, x, y).residual_plain < 1e-12
    return model, x


def _errors(identification: Identification, x: Tensor) -> Tensor:
    """Return the distance of every true unit sample from the nearest recovered one, up to sign, (n,)."""
    signed = torch.stack([identification.x, -identification.x])[:, :, None] - x
    return signed.norm(dim=3).amin(dim=(0, 1))


def _exact(n: int) -> dict[str, Any]:
    model, x = _point(n)
    identification, seconds = clock(lambda: identify(checkpoint_from_module(model)))
    return {
        "samples": n,
        "neurons": len(model.coefficient),
        "worst relative error": float(_errors(identification, x).max()),
        "certified": int(identification.certified.sum()),
        "rank K": f"{identification.rank_k} of {identification.n_r}",
        "seconds": round(seconds, 3),
    }


def _partial() -> list[int]:
    """Count the samples of 8 that are recovered from each draw of 16 of the 36 neurons."""
    model, x = _point(8)
    counts = []
    for draw in range(DRAWS):
        index = torch.randperm(36, generator=torch.Generator().manual_seed(draw))[:16]
        small = PolynomialNetwork(64, 16, CUBE).double()
        small.load_state_dict({name: t[index] for name, t in model.state_dict().items()})
        counts.append(int((_errors(identify(checkpoint_from_module(small)), x) <= 1e-9).sum()))
    return counts


def _trained() -> tuple[list[dict[str, Any]], dict[str, tuple[Tensor, int, int]]]:
    """Measure trained cubic networks: what remains of their neurons, and what is recovered."""
    rows, pictures = [], {}
    model, _ = _point(8)
    pictures["exact point, n=8"] = (_shares(model), 8, 36)
    for n in TRAINED:
        split = load_dataset("digits", n)
        state = train(f"polynomial:64-{WIDTH}-1", split.train, TrainingConfig(steps=STEPS))
        model = PolynomialNetwork(64, WIDTH, CUBE).double()
        model.load_state_dict(state.theta)
        identification = identify(checkpoint_from_module(model), data=split.train)
        shares = _shares(model)
        if n > 4:
            pictures[f"trained on {n} digits"] = (shares, identification.r, identification.n_r)
        largest = shares.sort(descending=True).values
        rows.append(
            {
                "n": n,
                "neurons with 1% or more": int((shares >= 0.01).sum()),
                "largest share": round(float(largest[0]), 4),
                "rank K": f"{identification.rank_k} of {identification.n_r}",
                "KKT residual at the data": certify(
                    model, split.train.x, split.train.y
                ).residual_plain,
                "residual": identification.residual,
                "samples found": len(identification.x),
                "certified": int(identification.certified.sum()),
                "mean best |cosine|, train": _cosine(identification.x, split.train),
                "the same, held-out digits": _cosine(identification.x, split.holdout),
                "the same, random vectors of the span": _chance(
                    model, len(identification.x), split.train
                ),
            }
        )
    return rows, pictures


def _shares(model: PolynomialNetwork) -> Tensor:
    energy = (model.weight**2).sum(1) + model.coefficient**2
    return (energy / energy.sum()).detach()


def _cosine(vectors: Tensor, data: Dataset) -> float:
    """Return the mean over samples of the largest |cosine| with one of the vectors (k, d)."""
    x = data.x.flatten(1).double()
    x, z = x / x.norm(dim=1, keepdim=True), vectors / vectors.norm(dim=1, keepdim=True)
    return round(float((x @ z.T).abs().amax(1).mean()), 3)


def _chance(model: PolynomialNetwork, count: int, data: Dataset) -> float:
    """Return _cosine of random vectors in the n leading directions of W, where the samples lie."""
    basis = torch.linalg.svd(model.weight.detach(), full_matrices=False)[2][: len(data)]
    rng = torch.Generator().manual_seed(0)
    random = torch.randn(100, count, len(basis), generator=rng, dtype=torch.float64)
    return round(sum(_cosine(vectors @ basis, data) for vectors in random) / len(random), 3)


def _draw(name: str, figure: bytes | None) -> None:
    assert figure is not None
    write_atomic(FIGURES / name, figure)


def collapse_figure(networks: dict[str, tuple[Tensor, int, int]]) -> bytes:
    """Draw the share of |theta|^2 of each neuron, largest first.

    The rank condition needs at least N_r neurons (dashed line). ``networks`` has the shares (m,), r and N_r
    by name.
    """
    figure = drawing.new_figure(4.2 * len(networks), 3.1)
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for axes, (name, (shares, r, needed)) in zip(panels, networks.items(), strict=True):
        sizes = shares.sort(descending=True).values.clamp_min(1e-12)
        axes.plot(range(1, len(sizes) + 1), sizes, "o", color=BLUE, markersize=3)
        axes.axvline(needed, color=ORANGE, ls="--", lw=1.2)
        axes.text(needed, 0.5, f"N_r = {needed} ", color=ORANGE, fontsize=8, ha="right")
        axes.axvline(r, color=GREY, ls=":", lw=1.2)
        axes.text(r, 1.5e-9, f" r = {r}", color=INK, fontsize=8)
        axes.set(yscale="log", ylim=(1e-9, 1.5), xscale="log")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("neuron, largest first", fontsize=8.5)
        drawing.tidy(axes)
    panels[0].set_ylabel("share of |theta|$^2$", fontsize=8.5)
    return drawing.encode_png(figure)


if __name__ == "__main__":
    sys.exit(run_experiment("polynomial", polynomial, __doc__))
