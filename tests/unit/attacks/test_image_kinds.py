"""Kinds of data in a first layer: photographs, strokes, neither."""

from __future__ import annotations

import pytest
import torch

import residuum as rs
from residuum.attacks.stationarity.defaults import (
    SIGNED_SPARSE,
    SIGNED_STROKES,
    SPARSE,
    measure_appearance,
)
from residuum.datasets import load_dataset
from residuum.settings import LR_LAM
from residuum.training import TrainingConfig, train

CONFIG = TrainingConfig(steps=150, dtype="float32")


def trained(name, n):
    split = load_dataset(name, n, seed=5, holdout=30)
    arch = f"mlp:{split.train.x[0].numel()}-40-40-1"
    theta = dict(train(arch, split.train, CONFIG).theta)
    return rs.Network(theta, arch, tuple(split.train.x.shape[1:]))


def strokes(n=30, side=20):
    """Thick bars in the middle of an empty frame."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(n, 1, side, side)
    for image in images:
        i, j = torch.randint(6, 10, (2,), generator=generator).tolist()
        image[0, i : i + 7, j : j + 3] = 1.0
    return images - images.mean(0)


def test_photographs_are_distinguished_from_small_digits():
    photos, digits = trained("photos", 30), trained("digits", 30)
    seen = measure_appearance(photos.theta["layers.0.weight"], (3, 32, 32))
    assert seen.are_images
    assert seen.are_photographs
    assert not measure_appearance(digits.theta["layers.0.weight"], (1, 8, 8)).are_images
    resolved = rs.attacks.Auto().resolve_settings(photos, rs.Knowledge())
    assert resolved.priors == (("sparse-gradients", SPARSE),)
    resolved = rs.attacks.Auto().resolve_settings(digits, rs.Knowledge())
    assert resolved.priors == ()


def test_multipliers_of_free_sign_keep_their_rate_with_a_weaker_prior():
    photos = trained("photos", 30)
    for objective, weight in (("binary-kkt", SPARSE), ("weight-decay", SIGNED_SPARSE)):
        resolved = rs.attacks.make_attack(objective).resolve_settings(photos, rs.Knowledge())
        assert resolved.priors == (("sparse-gradients", weight),)
        assert (resolved.lr_lam == LR_LAM) == (objective == "weight-decay")


def test_pen_strokes_have_a_weaker_prior_still_where_the_sign_is_free():
    mixtures = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    first = (mixtures @ strokes().flatten(1)).float()
    theta = {"layers.0.weight": first, "layers.0.bias": torch.zeros(50)}
    theta["layers.1.weight"] = torch.ones(1, 50)
    pen_strokes = rs.Network(theta, "mlp:400-50-1", (1, 20, 20))
    for objective, weight in (("binary-kkt", SPARSE), ("weight-decay", SIGNED_STROKES)):
        resolved = rs.attacks.make_attack(objective).resolve_settings(pen_strokes, rs.Knowledge())
        assert resolved.priors == (("sparse-gradients", weight),)


def test_images_show_in_the_change_from_a_start_that_hides_them():
    photos, generator = trained("photos", 30), torch.Generator().manual_seed(4)
    start = {name: torch.randn(t.shape, generator=generator) for name, t in photos.theta.items()}
    hidden = photos.replace(theta={name: t + start[name] for name, t in photos.theta.items()})
    assert not measure_appearance(hidden.theta["layers.0.weight"], (3, 32, 32)).are_images
    resolved = rs.attacks.NTK().resolve_settings(hidden, rs.Knowledge(theta0=start))
    assert resolved.priors == (("sparse-gradients", SIGNED_SPARSE),)
    resolved = rs.attacks.WeightDecay().resolve_settings(hidden, rs.Knowledge(theta0=start))
    assert resolved.priors == ()  # its equation is about the weights, which do not show them


def test_mixtures_of_strokes_are_images_and_no_photographs():
    mixtures = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    seen = measure_appearance(mixtures @ strokes().flatten(1), (1, 20, 20))
    assert seen.are_images
    assert not seen.are_photographs


def test_noise_vectors_and_broken_layers_are_nothing():
    noise = torch.randn(50, 400, generator=torch.Generator().manual_seed(2))
    assert not measure_appearance(noise, (1, 20, 20)).are_images
    assert not measure_appearance(noise, (400,)).are_images
    assert not measure_appearance(torch.zeros(5, 64), (1, 8, 8)).are_images
    assert not measure_appearance(torch.full((5, 64), torch.nan), (1, 8, 8)).are_images
    assert measure_appearance(torch.ones(5, 64), (1, 8, 8)).are_images
    assert not measure_appearance(
        torch.ones(5, 16), (1, 4, 4)
    ).are_images  # too small a frame to tell


def test_pixels_in_another_order_are_no_image():
    mixtures = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    rows = mixtures @ strokes().flatten(1)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    assert not measure_appearance(rows[:, order], (1, 20, 20)).are_images


@pytest.mark.parametrize(
    "settings", [{"priors": ()}, {"lr_lam": 0.02}, {"priors": (), "lr_lam": 0.02}]
)
def test_what_is_said_stays(settings):
    resolved = rs.attacks.Auto(**settings).resolve_settings(trained("photos", 20), rs.Knowledge())
    for name, value in settings.items():
        assert getattr(resolved, name) == value
