"""Priors against their formulas, value by value."""

from __future__ import annotations

import math

import pytest
import torch

from residuum.attacks.stationarity.priors import (
    MAX_MULTIPLIER,
    PRIORS,
    STEEPNESS,
    box,
    derivatives,
    penalty,
)
from residuum.errors import InputError
from residuum.records import Knowledge

SHAPE = (2, 3, 4)
LAM_MIN = 0.3
MEAN = torch.linspace(-0.2, 0.4, 24, dtype=torch.float64).view(SHAPE)
TYPES = "0-2:onehot,3:integer,5-6:integer/9,10-11:onehot/0.5"
KNOWN = Knowledge(shape=SHAPE, value_range=(-0.5, 1.0), mean=MEAN, columns=TYPES)


def hinge(v):
    return max(v, 0.0)


def pixels(x):
    """(value, mean) of every pixel of every candidate of one run."""
    means = MEAN.flatten()
    return [(float(v), float(mu)) for s in x for v, mu in zip(s.flatten(), means, strict=True)]


def value_box(x, lam):
    return sum(hinge(-0.5 - (v + mu)) ** 2 + hinge(v + mu - 1.0) ** 2 for v, mu in pixels(x))


def unit_box(x, lam):
    return sum(hinge(abs(v) - 1) ** 2 for v, _ in pixels(x))


def pixel_box(x, lam):
    return sum(
        sum(hinge(-float(v)) + hinge(float(v) - 1) for v in sample.flatten()) / sample.numel()
        for sample in x
    )


def mean_box(x, lam):
    squares = [hinge(-0.5 - (v + mu)) ** 2 + hinge(v + mu - 1.0) ** 2 for v, mu in pixels(x)]
    return len(x) * sum(squares) / len(squares)


def floor(x, lam):
    return sum(hinge(LAM_MIN - float(value)) ** 2 for value in lam.flatten())


def neighbors(x):
    for sample in x:
        for c in range(2):
            for i in range(3):
                for j in range(4):
                    if j + 1 < 4:
                        yield float(sample[c, i, j + 1] - sample[c, i, j])
                    if i + 1 < 3:
                        yield float(sample[c, i + 1, j] - sample[c, i, j])


def carried(lam):
    return [
        min(sum(abs(float(value)) for value in multipliers.flatten()), MAX_MULTIPLIER)
        for multipliers in lam
    ]


def log_cosh(v):
    return math.log(math.cosh(v))


def sparse(x, lam):
    """Lengths over channels of horizontal and vertical steps, in units of a range of 1.5."""
    total = 0.0
    for sample, weight in zip(x / 1.5, carried(lam), strict=True):
        across = [(i, j, i, j + 1) for i in range(3) for j in range(3)]
        down = [(i, j, i + 1, j) for i in range(2) for j in range(4)]
        for steps in (across, down):
            values = [
                math.sqrt(float((sample[:, k, l] - sample[:, i, j]).square().mean()) + 1e-8)
                for i, j, k, l in steps
            ]
            total += weight * sum(log_cosh(STEEPNESS * v) / STEEPNESS for v in values) / len(values)
    return total / len(x)


def typed(x, lam):
    """The least over legal values of every typed column, one by one."""
    total = 0.0
    for sample in x:
        v = [float(value) for value in (sample + MEAN).flatten()]
        for first, last, scale in ((0, 2, 1.0), (10, 11, 0.5)):
            group = [scale * v[k] for k in range(first, last + 1)]
            total += min(
                sum((value - (k == hot)) ** 2 for k, value in enumerate(group))
                for hot in range(len(group))
            )
        for column, scale in ((3, 1.0), (5, 9.0), (6, 9.0)):
            total += min((scale * v[column] - integer) ** 2 for integer in range(-100, 101))
    return total


NAIVE = {
    "none": lambda x, lam: 0.0,
    "value-box": value_box,
    "haim2022-box": unit_box,
    "haim2022-text-box": pixel_box,
    "loo2024-box": mean_box,
    "multiplier-floor": floor,
    "total-variation": lambda x, lam: sum(math.sqrt(d * d + 1e-6) for d in neighbors(x)),
    "high-frequency": lambda x, lam: sum(d * d for d in neighbors(x)),
    "sparse-gradients": sparse,
    "columns": typed,
}


def candidates(scale=1.5):
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(2, 3, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)


def prior(name, knowledge=KNOWN):
    return PRIORS[name](1.0, LAM_MIN, knowledge)


def frames():
    """Small images, their multipliers, and what is known of them."""
    generator = torch.Generator().manual_seed(0)
    x = 0.1 * torch.randn(2, 3, 2, 6, 7, generator=generator, dtype=torch.float64)
    lam = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)
    return x, lam, Knowledge(shape=(2, 6, 7), value_range=(-0.5, 1.0))


ON_LAM = {"multiplier-floor": (False, True), "sparse-gradients": (True, True)}


def test_every_prior_has_a_formula():
    assert set(NAIVE) == set(PRIORS)


@pytest.mark.parametrize("name", PRIORS)
def test_penalties_equal_their_formulas_run_by_run(name):
    x, lam = candidates()
    penalties = prior(name).penalty(x, lam)
    expected = torch.tensor([NAIVE[name](x[r], lam[r]) for r in range(2)], dtype=torch.float64)
    assert penalties.shape == (2,)
    assert torch.allclose(penalties, expected, rtol=1e-12, atol=0)
    assert (penalties > 0).all() == (name != "none")


@pytest.mark.parametrize("name", [name for name in PRIORS if name != "none"])
def test_gradients_of_penalties(name):
    x, lam = candidates()
    x.requires_grad_(), lam.requires_grad_()
    assert torch.autograd.gradcheck(prior(name).penalty, (x, lam))
    gradients = torch.autograd.grad(prior(name).penalty(x, lam).sum(), (x, lam), allow_unused=True)
    sizes = [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]
    assert tuple(size > 0 for size in sizes) == ON_LAM.get(name, (True, False))


@pytest.mark.parametrize("names", [("sparse-gradients",), ("high-frequency", "sparse-gradients")])
@pytest.mark.parametrize("lam_shape", [(), (2,)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_derivatives_by_hand_equal_automatic_ones(names, lam_shape, shift):
    x, lam, knowledge = frames()
    lam = 2.5 * lam if lam_shape else 2.5 * lam[..., 0]  # some carry all they can
    lam = lam - 2.5 * shift  # some of them, or none, have a sign
    weights = torch.tensor([3.0, 0.5], dtype=torch.float64)
    priors = [PRIORS[name](weights, LAM_MIN, knowledge) for name in names]
    xl, ll = x.clone().requires_grad_(), lam.clone().requires_grad_()
    total = penalty(priors, xl, ll, 0.3)
    expected = torch.autograd.grad(total.sum(), (xl, ll))
    value, *gradients = derivatives(priors, x, lam, 0.3)
    assert torch.allclose(value, total, rtol=1e-12, atol=0)
    for a, b in zip(gradients, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_a_sparse_prior_fades_and_means_the_same_at_every_size_and_range():
    x, lam, knowledge = frames()
    prior_at_60 = PRIORS["sparse-gradients"](60.0, knowledge=knowledge)
    assert prior_at_60.weight_at(0.0) == 60.0
    assert prior_at_60.weight_at(1.0) == pytest.approx(0.06)
    assert prior_at_60.weight_at(0.5) == pytest.approx(math.sqrt(60.0 * 0.06))
    wide = Knowledge(shape=(2, 6, 7), value_range=(0.0, 3.0))  # twice the range of ``known``
    wide_penalty = PRIORS["sparse-gradients"](60.0, knowledge=wide).penalty(2 * x, lam)
    assert torch.allclose(wide_penalty, prior_at_60.penalty(x, lam), rtol=1e-12)
    twice = prior_at_60.penalty(torch.cat([x, x], 1), torch.cat([lam, lam], 1))
    assert torch.allclose(twice, prior_at_60.penalty(x, lam), rtol=1e-12)


def test_a_candidate_of_negative_multiplier_is_charged_as_one_of_positive():
    (x, lam, knowledge), name = frames(), "sparse-gradients"
    signed = lam * torch.tensor([1.0, -1.0, 1.0])[:, None]
    cost = prior(name, knowledge).penalty(x, signed)
    assert torch.equal(cost, prior(name, knowledge).penalty(x, lam))
    assert (prior(name, knowledge).penalty(2 * x, signed) > cost).all()  # rougher is never cheaper


def test_a_mixture_of_images_costs_more_than_its_parts_and_a_quadratic_prior_cannot_tell():
    """Two images of blocks, mixed to the same energy: the mixture has more edges."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randn(2, 1, 2, 2, generator=generator, dtype=torch.float64)
    a = blocks[0].repeat_interleave(6, -1).repeat_interleave(6, -2)
    b = blocks[1].repeat_interleave(4, -1).repeat_interleave(4, -2)
    b = torch.nn.functional.pad(b, (2, 2, 2, 2))
    angle = torch.tensor(math.pi / 4).double()
    images = torch.stack([a, b])
    mixed = torch.stack([angle.cos() * a + angle.sin() * b, angle.cos() * b - angle.sin() * a])
    knowledge, lam = Knowledge(shape=(1, 12, 12)), torch.ones(1, 2, dtype=torch.float64)
    sparse_cost, quadratic = (
        [float(prior(name, knowledge).penalty(v[None], lam)[0]) for v in (images, mixed)]
        for name in ("sparse-gradients", "high-frequency")
    )
    assert sparse_cost[1] > 1.15 * sparse_cost[0]
    assert quadratic[1] == pytest.approx(quadratic[0], rel=1e-9)


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
    expected = box(KNOWN, x)
    flat = box(KNOWN.replace(mean=MEAN.flatten()), x)
    assert torch.equal(flat[0], expected[0])
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
        with pytest.raises(
            InputError, match=f"needs values that are not known: {needs[0]}"
        ) as caught:
            prior(name, knowledge)
        assert caught.value.remedy


@pytest.mark.parametrize("name", ["total-variation", "high-frequency"])
def test_smoothness_of_vectors_is_refused(name):
    with pytest.raises(InputError, match="needs images; the samples are vectors"):
        prior(name, Knowledge(shape=(24,))).penalty(*candidates())


def legal_rows():
    """Rows of the types that are known, other columns anything."""
    x, lam = candidates()
    rows = (x + MEAN).flatten(2)
    rows[..., 0:3] = torch.eye(3).double()[torch.tensor([[0, 2, 1], [1, 0, 2]])]
    rows[..., 3] = torch.tensor([[0.0, 4.0, -7.0], [1.0, 2.0, 3.0]])
    rows[..., 5:7] = torch.tensor([2.0, 9.0]).double() / 9
    rows[..., 10:12] = torch.tensor([0.0, 2.0]).double()
    return rows.view_as(x) - MEAN, lam


def test_rows_of_the_known_types_cost_nothing_and_those_between_do():
    x, lam = legal_rows()
    assert prior("columns").penalty(x, lam).max() < 1e-25
    for column, step in ((0, 0.2), (3, 0.2), (6, 0.2 / 9), (10, 0.4)):
        between = x.clone().flatten(2)
        between[0, 1, column] += step
        cost = prior("columns").penalty(between.view_as(x), lam)
        assert cost.tolist() == pytest.approx([0.04, 0.0], abs=1e-12)
    free = x.clone().flatten(2)
    free[..., [4, 7, 8, 9, 12, 23]] += 0.37  # columns of no granted type
    assert prior("columns").penalty(free.view_as(x), lam).max() < 1e-25


def test_the_pull_to_types_of_columns_rises():
    rising_prior = PRIORS["columns"](0.5, knowledge=KNOWN)
    assert rising_prior.weight_at(1.0) == 0.5
    assert rising_prior.weight_at(0.0) == pytest.approx(0.0005)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0:onehot", "2-1:integer", "0-2", "0-2:color", "0-2:onehot,2:integer"),
        *("3:integer/0", "3:integer/1e", "3:integer/1e999", "-1:integer", "0:integer,"),
    ],
)
def test_types_of_columns_that_say_nothing_are_refused(text):
    with pytest.raises(InputError, match="FIRST-LAST:onehot") as caught:
        Knowledge(columns=text)
    assert "Example" in caught.value.remedy
