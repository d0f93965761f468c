"""Equal margins: the penalty against a loop, its common margin against a search, where it applies."""

from __future__ import annotations

import math

import pytest
import torch

import residuum as rs
from residuum.attacks.margins import FLOOR, EqualMargins, common_margin
from residuum.attacks.objectives import NTK, BinaryKKT, MulticlassKKT, WeightDecay
from residuum.attacks.problem import Problem
from residuum.networks import Architecture

SHAPE = (9,)
KNOWN = rs.Knowledge(shape=SHAPE)


def weighted_median(values, weights):
    """The least value below or at which half of the weight lies."""
    pairs = sorted(zip(values, weights, strict=True))
    total, below = sum(weights), 0.0
    for value, weight in pairs:
        below += weight
        if below >= total / 2:
            return value
    raise AssertionError


def naive(kappa, margins, mu):
    """One run; mu: stored multipliers of each candidate, summed over rivals."""
    m = len(margins)
    w = [min(v, 1.0) / m for v in mu]
    size = sum(a * abs(b) for a, b in zip(w, margins, strict=True)) / sum(w)
    p = max(weighted_median(margins, w), FLOOR * size)
    return kappa * sum(a * (b / p - 1) ** 2 for a, b in zip(w, margins, strict=True))


def draw(outputs, rivals=False, runs=2, m=7):
    generator = torch.Generator().manual_seed(4)
    Phi = torch.randn(runs, m, outputs, generator=generator, dtype=torch.float64)
    shape = (runs, m, outputs) if rivals else (runs, m)
    return Phi, 3 * torch.rand(shape, generator=generator, dtype=torch.float64)


def test_the_penalty_of_a_binary_classifier_equals_the_loop():
    Phi, lam = draw(1)
    y = torch.tensor([1.0, -1, 1, -1, 1, 1, -1]).double()
    found = EqualMargins(BinaryKKT(), 0.7, 2.0).penalty(Phi, y, lam)
    wanted = [naive(0.7, (Phi[r, :, 0] * y).tolist(), (lam[r] / 2).tolist()) for r in range(2)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("rivals", ["tied", "best"])
def test_the_penalty_of_many_classes_equals_the_loop_over_rivals(rivals):
    Phi, lam = draw(3, rivals == "tied")
    y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    found = EqualMargins(MulticlassKKT(rivals), 0.7, 2.0).penalty(Phi, y, lam)
    wanted = []
    for r in range(2):
        margins = [
            float(Phi[r, i, y[i]]) - max(float(Phi[r, i, c]) for c in range(3) if c != y[i])
            for i in range(7)
        ]
        mu = [float((lam[r, i] / 2).sum()) for i in range(7)]
        wanted.append(naive(0.7, margins, mu))
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_equal_margins_cost_nothing_and_one_that_disagrees_does():
    Phi = torch.full((1, 5, 1), 2.0, dtype=torch.float64)
    y, lam = torch.ones(5).double(), torch.ones(1, 5).double()
    term = EqualMargins(BinaryKKT(), 1.0, 1.0)
    assert term.penalty(Phi, y, lam).item() == 0
    assert term.disagreement(Phi, y, lam).item() == 0
    Phi[0, 0] = 3.0
    assert term.penalty(Phi, y, lam).item() == pytest.approx(0.25 / 5)
    lam[0, 0] = 0.0  # without a multiplier any output will do
    assert term.penalty(Phi, y, lam).item() == 0


def test_the_common_margin_is_never_zero_and_never_negative():
    margins = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 2.0]]).double()
    weight = torch.ones(1, 5).double()
    assert common_margin(margins, weight).item() == pytest.approx(FLOOR * 7 / 5)
    assert common_margin(margins - 5, weight).item() > 0
    assert math.isfinite(common_margin(0 * margins, 0 * weight).item())


def test_candidates_in_chunks_share_one_common_margin():
    """The term needs the outputs of all candidates: chunks must not change it."""
    torch.manual_seed(0)
    model = Architecture.parse("mlp:9-12-7-1").build()
    y = BinaryKKT().labels(11, 1, KNOWN)
    x, lam = torch.randn(2, 11, 9).double(), torch.rand(2, 11).double()
    term = EqualMargins(BinaryKKT(), 0.7, 0.5)
    problem = Problem(model, BinaryKKT(), KNOWN, y)
    whole = problem.evaluate(x, lam, 20.0, margins=term)
    assert problem.explicit.plan(2, 11).chunks == 1
    problem.explicit.workspace, problem.explicit.chunk = 20_000, 8_000
    assert problem.explicit.plan(2, 11).chunks > 1
    parts = problem.evaluate(x, lam, 20.0, margins=term)
    for name in ("loss", "layers", "grad_x", "grad_lam"):
        assert torch.allclose(getattr(parts, name), getattr(whole, name), rtol=1e-11), name
    without = problem.evaluate(x, lam, 20.0)
    assert not torch.allclose(without.grad_x, parts.grad_x, rtol=1e-3)


@pytest.mark.parametrize(
    ("objective", "knowledge", "shape", "weight", "promised"),
    [
        (BinaryKKT(), KNOWN, SHAPE, 1.0, True),
        (MulticlassKKT(), KNOWN, SHAPE, 1.0, True),
        (BinaryKKT(), KNOWN, SHAPE, 0.0, False),
        (BinaryKKT(), KNOWN, (2,), 1.0, False),
        (BinaryKKT(), rs.Knowledge(weight_decay=0.1), SHAPE, 1.0, False),
        (WeightDecay(), KNOWN, SHAPE, 1.0, False),
        (NTK(), KNOWN, SHAPE, 1.0, False),
    ],
)
def test_margins_are_equal_where_training_to_zero_loss_ends(
    objective, knowledge, shape, weight, promised
):
    found = EqualMargins.promised(objective, knowledge, shape, weight, 1.0)
    assert (found is not None) == promised


@pytest.mark.parametrize(("weight", "said"), [(1e-9, True), (30.0, False), (0.0, False)])
def test_an_attack_says_when_its_candidates_do_not_agree_on_a_margin(weight, said):
    """Weights that were never trained: only a heavy term makes outputs equal; without one nobody asks."""
    torch.manual_seed(3)
    model = Architecture.parse("mlp:9-12-1").build()
    config = rs.AttackConfig.of(candidates=6, restarts=2, steps=400, margins=weight, priors=())
    found = rs.attack(model, KNOWN, config)
    assert any("equal margins: outputs" in note for note in found.notes) == said
