"""Priors against their formulas, value by value."""

from __future__ import annotations

import math

import pytest
import torch

from residuum.attacks.priors import PRIORS, box
from residuum.errors import InputError
from residuum.records import Knowledge

SHAPE = (2, 3, 4)
LAM_MIN = 0.3
MEAN = torch.linspace(-0.2, 0.4, 24, dtype=torch.float64).view(SHAPE)
KNOWN = Knowledge(shape=SHAPE, value_range=(-0.5, 1.0), mean=MEAN)


def hinge(v):
    return max(v, 0.0)


def pixels(x):
    """(value, mean) of every pixel of every candidate of one run."""
    return [(float(v), float(mu)) for one in x for v, mu in zip(one.flatten(), MEAN.flatten())]  # noqa: B905


def value_box(x, lam):
    return sum(hinge(-0.5 - (v + mu)) ** 2 + hinge(v + mu - 1.0) ** 2 for v, mu in pixels(x))


def unit_box(x, lam):
    return sum(hinge(abs(v) - 1) ** 2 for v, _ in pixels(x))


def pixel_box(x, lam):
    return sum(
        sum(hinge(-float(v)) + hinge(float(v) - 1) for v in one.flatten()) / one.numel()
        for one in x
    )


def mean_box(x, lam):
    squares = [hinge(-0.5 - (v + mu)) ** 2 + hinge(v + mu - 1.0) ** 2 for v, mu in pixels(x)]
    return len(x) * sum(squares) / len(squares)


def floor(x, lam):
    return sum(hinge(LAM_MIN - float(value)) ** 2 for value in lam.flatten())


def neighbours(x):
    for one in x:
        for c in range(2):
            for i in range(3):
                for j in range(4):
                    if j + 1 < 4:
                        yield float(one[c, i, j + 1] - one[c, i, j])
                    if i + 1 < 3:
                        yield float(one[c, i + 1, j] - one[c, i, j])


NAIVE = {
    "none": lambda x, lam: 0.0,
    "value-box": value_box,
    "haim2022-box": unit_box,
    "haim2022-text-box": pixel_box,
    "loo2024-box": mean_box,
    "multiplier-floor": floor,
    "total-variation": lambda x, lam: sum(math.sqrt(d * d + 1e-6) for d in neighbours(x)),
    "high-frequency": lambda x, lam: sum(d * d for d in neighbours(x)),
}


def candidates(scale=1.5):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(2, 3, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)


def prior(name, knowledge=KNOWN):
    return PRIORS[name](1.0, LAM_MIN, knowledge)


def test_every_prior_has_a_formula():
    assert set(NAIVE) == set(PRIORS)


@pytest.mark.parametrize("name", PRIORS)
def test_penalties_equal_their_formulas_run_by_run(name):
    x, lam = candidates()
    found = prior(name).penalty(x, lam)
    wanted = torch.tensor([NAIVE[name](x[r], lam[r]) for r in range(2)], dtype=torch.float64)
    assert found.shape == (2,)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=0)
    assert (found > 0).all() == (name != "none")


@pytest.mark.parametrize("name", [name for name in PRIORS if name != "none"])
def test_gradients_of_penalties(name):
    x, lam = candidates()
    x.requires_grad_(), lam.requires_grad_()
    assert torch.autograd.gradcheck(prior(name).penalty, (x, lam))
    parts = torch.autograd.grad(prior(name).penalty(x, lam).sum(), (x, lam), allow_unused=True)
    sizes = [0.0 if part is None else float(part.norm()) for part in parts]
    assert [size > 0 for size in sizes] == [name != "multiplier-floor", name == "multiplier-floor"]


@pytest.mark.parametrize("name", ["value-box", "loo2024-box"])
def test_no_penalty_inside_the_known_box(name):
    low, high = box(KNOWN, candidates()[0])
    share = torch.rand(2, 3, *SHAPE, generator=torch.Generator().manual_seed(1)).double()
    inside = low + share * (high - low)
    images = inside + MEAN
    assert -0.5 <= images.min() < -0.3
    assert 0.8 < images.max() <= 1.0
    assert (prior(name).penalty(inside, candidates()[1]) == 0).all()
    inside[1, 0, 0, 0, 0] = 1.1 - MEAN[0, 0, 0]
    penalty = prior(name).penalty(inside, candidates()[1])
    assert penalty[0] == 0
    assert penalty[1] == pytest.approx(0.01 / (1 if name == "value-box" else 24))


def test_no_penalty_inside_the_paper_boxes_or_above_the_floor():
    x, lam = candidates()
    assert (prior("haim2022-box").penalty(x.tanh(), lam) == 0).all()
    assert (prior("haim2022-text-box").penalty(x.sigmoid(), lam) == 0).all()
    assert (prior("haim2022-text-box").penalty(x.tanh(), lam) > 0).all()
    assert (prior("multiplier-floor").penalty(x, lam + LAM_MIN) == 0).all()
    assert (prior("high-frequency").penalty(torch.ones_like(x), lam) == 0).all()


def test_a_mean_may_be_flat_one_number_or_absent():
    x = candidates()[0]
    wanted = box(KNOWN, x)
    flat = box(KNOWN.replace(mean=MEAN.flatten()), x)
    assert torch.equal(flat[0], wanted[0])
    assert flat[1].shape == SHAPE
    assert [float(b) for b in box(KNOWN.replace(mean=torch.tensor(0.5)), x)] == [-1.0, 0.5]
    bare = Knowledge(value_range=(-0.5, 1.0))
    assert [float(b) for b in box(bare, x)] == [-0.5, 1.0]


@pytest.mark.parametrize("name", PRIORS)
def test_missing_knowledge_is_refused(name):
    needs = PRIORS[name].needs
    if not needs:
        prior(name, Knowledge())
        return
    for knowledge in (None, Knowledge()):
        with pytest.raises(InputError, match=f"needs to know {needs[0]}") as caught:
            prior(name, knowledge)
        assert caught.value.remedy


@pytest.mark.parametrize("name", ["total-variation", "high-frequency"])
def test_smoothness_of_vectors_is_refused(name):
    with pytest.raises(InputError, match="samples here are vectors"):
        prior(name, Knowledge(shape=(24,))).penalty(*candidates())
