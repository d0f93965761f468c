"""Figures: valid images of a sensible size for every kind of sample, whatever the attack left."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from residuum.attacks import select
from residuum.evaluation import score
from residuum.records import Dataset, Knowledge, Reconstruction, Scores
from residuum.report.drawing import Cell, draw_image_grid, is_image, to_pixels
from residuum.report.figures import (
    compared_figure,
    loss_figure,
    matches_figure,
    output_figure,
    selected_figure,
)

SHAPES = [(1, 8, 8), (3, 8, 8), (4, 12), (2,), (16,), (1,)]
SAMPLES = 12


def opened(content: bytes | None) -> np.ndarray:
    """The pixels of a PNG that is neither blank nor out of proportion."""
    assert content is not None
    assert len(content) < 400_000
    image = Image.open(io.BytesIO(content))
    image.load()
    assert image.format == "PNG"
    assert 300 <= image.width <= 1400
    assert 100 <= image.height <= 1200
    pixels = np.asarray(image.convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 5
    return pixels


def made_up(shape: tuple[int, ...], restarts: int = 2) -> tuple[Reconstruction, Dataset]:
    """Noisy copies of random samples, as an attack could bring them back."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    train = Dataset(x, torch.tensor([-1.0, 1.0] * (SAMPLES // 2)), mean=x.mean(0))
    noisy = torch.cat(
        [x + 0.1 * torch.randn(x.shape, generator=generator) for _ in range(restarts)]
    )
    history = torch.rand(restarts, 9, 2, generator=generator, dtype=torch.float64)
    reconstruction = Reconstruction(
        attack="binary-kkt",
        x=noisy,
        labels=train.y.repeat(restarts),
        lam=torch.rand(len(noisy), generator=generator),
        steps=torch.arange(9) * 25,
        run=torch.arange(restarts).repeat_interleave(SAMPLES),
        loss=history.sum(2),
        layers=history,
        layer_names=("layers.0", "layers.1"),
        status=("finished",) * restarts,
        knowledge=Knowledge(mean=train.mean),
    )
    return reconstruction.replace(selection=select(reconstruction)), train


def scored(
    reconstruction: Reconstruction, train: Dataset, outputs: int = 1
) -> tuple[Scores, torch.Tensor]:
    says = torch.randn(len(train), outputs, generator=torch.Generator().manual_seed(1))
    return score(reconstruction.x, train, None, outputs=says, metrics=("ncc", "l2")), says


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_of_every_shape(shape: tuple[int, ...]) -> None:
    reconstruction, train = made_up(shape)
    opened(selected_figure(reconstruction))
    opened(matches_figure(reconstruction.x, train, scored(reconstruction, train)[0]))


def test_the_same_figure_twice_is_the_same_file() -> None:
    reconstruction, train = made_up((1, 8, 8))
    scores, _ = scored(reconstruction, train)
    assert selected_figure(reconstruction) == selected_figure(reconstruction)
    assert matches_figure(reconstruction.x, train, scores) == matches_figure(
        reconstruction.x, train, scores
    )


def test_recovered_samples_are_framed() -> None:
    reconstruction, train = made_up((1, 8, 8))
    pool = torch.randn(300, 1, 8, 8, generator=torch.Generator().manual_seed(5)).double()
    control = Dataset(pool, torch.tensor([-1.0, 1.0] * 150), mean=train.mean)
    scores = score(reconstruction.x, train, control, metrics=("ncc",), subsets=200)
    assert scores.recovered == SAMPLES
    framed = opened(matches_figure(reconstruction.x, train, scores))
    plain = opened(matches_figure(reconstruction.x, train, scored(reconstruction, train)[0]))
    blue = np.array([0x00, 0x72, 0xB2])
    assert (framed == blue).all(2).sum() > 1000 > (plain == blue).all(2).sum()


def test_attacks_are_compared_band_by_band() -> None:
    reconstruction, train = made_up((1, 8, 8))
    few = reconstruction.replace(x=reconstruction.x[:3])
    bands = {
        name: (reconstruction_part.x, score(reconstruction_part.x, train, None, metrics=("ncc",)))
        for name, reconstruction_part in {"all": reconstruction, "few": few}.items()
    }
    image = opened(compared_figure(bands, train))
    alone = opened(compared_figure({"all": bands["all"]}, train))
    assert image.shape[1] < alone.shape[1]  # as many columns as the attack with fewer matches has
    assert image.shape[0] > 1.5 * alone.shape[0]


def test_loss_over_the_steps() -> None:
    reconstruction, _ = made_up((16,))
    opened(loss_figure(reconstruction))
    loss, layers = reconstruction.loss.clone(), reconstruction.layers.clone()
    loss[1, 4:], layers[1, 4:] = torch.nan, torch.inf
    loss[0, 3], layers[0, 3] = 0.0, -1e-20
    opened(
        loss_figure(
            reconstruction.replace(loss=loss, layers=layers, status=("finished", "diverged"))
        )
    )
    lost = reconstruction.replace(loss=loss * torch.nan, layers=layers * torch.nan)
    opened(loss_figure(lost.replace(status=("diverged", "diverged"))))


def test_nothing_to_draw() -> None:
    reconstruction, _ = made_up((16,))
    assert selected_figure(reconstruction.replace(selection=None)) is None
    empty = reconstruction.replace(
        steps=reconstruction.steps[:0],
        loss=reconstruction.loss[:, :0],
        layers=reconstruction.layers[:, :0],
    )
    assert loss_figure(empty) is None


@pytest.mark.parametrize("outputs", [1, 3])
def test_outputs_and_margins(outputs: int) -> None:
    reconstruction, train = made_up((1, 8, 8))
    classes = train.replace(y=torch.arange(SAMPLES) % 3) if outputs > 1 else train
    scores, says = scored(reconstruction, classes, outputs)
    assert all(row.margin is not None for row in scores.per_sample)
    opened(output_figure(scores, says, ("ncc", "l2")))
    targets = train.replace(y=torch.linspace(0, 1, SAMPLES, dtype=torch.float64))
    opened(output_figure(*scored(reconstruction, targets, outputs)))


def test_pixels_fill_the_range() -> None:
    color = torch.rand(3, 4, 5) * 7 - 3
    assert to_pixels(color).shape == (4, 5, 3)
    assert to_pixels(color[:2]).shape == to_pixels(color[0]).shape == (4, 5)
    assert (to_pixels(color).min(), to_pixels(color).max()) == (0, 1)
    assert (to_pixels(torch.ones(1, 4, 5)) == 0).all()
    assert [is_image(shape) for shape in ((2,), (1, 64), (8, 8), (1, 8, 8), (1, 1, 9))] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 28, 28)), (30, (1, 28, 28)), (11, (1, 4, 30)), (11, (30, 4))]
)
def test_grids_grow_with_their_content(count: int, shape: tuple[int, ...]) -> None:
    cells = [Cell((torch.rand(*shape),) * 2, "0.123", bool(i % 2)) for i in range(count)]
    opened(draw_image_grid("title", cells, ("found", "training")))
