"""Do samples and granted facts speak of the same scale? A false grant makes every attack look weak.

Attacks keep candidates inside the granted value range, less the granted mean. Training samples that
lie outside it cannot come back, so that "no leak found" would say nothing of the network; held-out
samples on another scale make chance look weaker or stronger than it is.
"""

from __future__ import annotations

import torch

from residuum.errors import DataError
from residuum.records import Dataset, Knowledge
from residuum.records.data import with_mean

NEAR = 0.01  # of the range's width: rounding, no contradiction
FAR = 1.0  # of the range's width: no sample of this range
BYTES = 255.0  # the largest value of a pixel in a file
SPREAD, SHIFT = 2.0, 0.5  # ratio of standard deviations; difference of means over the larger one


def scale_notes(
    train: Dataset | None, control: Dataset | None, knowledge: Knowledge
) -> tuple[str, ...]:
    """What contradicts, one sentence each; refused where the range cannot be meant for these data."""
    if train is None:
        return ()
    return (*_bytes(train), *_range(train, knowledge), *_scales(train, control))


def _bytes(train: Dataset) -> tuple[str, ...]:
    """Pixels as files have them: most networks receive them divided by 255."""
    least, most = float(train.x.min()), float(train.x.max())
    if not (least >= 0 and BYTES / 2 < most <= BYTES):
        return ()
    return (f"The training samples have values up to {most:g}: is this what the network receives?",)


def _range(train: Dataset, knowledge: Knowledge) -> tuple[str, ...]:
    if knowledge.value_range is None:
        return ()
    x = train.x.double()
    if (mean := knowledge.mean) is not None:
        if mean.numel() not in (1, x[0].numel()):
            raise DataError(
                f"The mean must be one number or have {x[0].numel()} values; got {mean.numel()}.",
                "Grant the mean image of the data.",
            )
        x = with_mean(x, mean)
    low, high = knowledge.value_range
    least, most = float(x.min()), float(x.max())
    beyond = max(low - least, most - high) / (high - low)
    if beyond <= NEAR:
        return ()
    added = "with the granted mean added" if mean is not None else "no mean being granted"
    said = (
        f"The training samples run from {least:.3g} to {most:.3g}, {added}, outside the granted "
        f"value range {low:g} to {high:g}"
    )
    remedy = "Grant the range of the data before a mean was subtracted, and that mean (--mean)."
    if beyond > FAR:
        raise DataError(f"{said}, by more than its width.", remedy)
    share = float(((x < low) | (x > high)).double().mean())
    return (f"{said} ({share:.0%} of the values): attacks cannot bring these back. {remedy}",)


def _scales(train: Dataset, control: Dataset | None) -> tuple[str, ...]:
    if control is None:
        return ()
    (mean, spread), (other_mean, other) = (_moments(data) for data in (train, control))
    larger, smaller = max(spread, other), min(spread, other)
    if larger <= SPREAD * smaller and abs(mean - other_mean) <= SHIFT * larger:
        return ()
    return (
        "Held-out samples seem to be on another scale than training samples (mean and standard "
        f"deviation {other_mean:.2g} and {other:.2g} against {mean:.2g} and {spread:.2g}): the "
        "control holds only where both were preprocessed alike.",
    )


def _moments(data: Dataset) -> tuple[float, float]:
    x = data.x.double()
    return float(x.mean()), float(torch.std(x, correction=0))
