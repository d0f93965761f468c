"""Find arrays that look like samples of the model, and are not weights.

Two hints decide together. One is the name of the array, such as ``example_inputs``. The other is the shape:
its rows have as many values as a sample of the model, or are images with the channels of the first layer
(:mod:`.survey`). If both agree, the severity is high. With one of them it is medium.

Weights are told from samples by their names (``PARAMETERS`` in :mod:`.survey`). An array without a telling
name and with the shape of a weight is a copy of this weight if the two correlate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch

from residuum.errors import CheckpointError
from residuum.io.inert import Block
from residuum.io.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS
from residuum.io.tree import Place
from residuum.scanning.finding import STORED, Finding
from residuum.scanning.record_arrays import FRAME_PART
from residuum.scanning.stored_rules import (
    DELETE_ARRAY,
    MEMORIES,
    RECORD_NAMES,
    StoredArray,
)
from residuum.scanning.survey import Survey, is_parameter

# Names of arrays of samples. The last word of a name says what the array is: "input_mean" is a mean.
SAMPLE_NAMES = re.compile(
    r"(^|_)(examples?|samples?|inputs?|input_ids|batch|batches|support|supports|background|references?|"
    r"few_?shots?|shots|demonstrations?|demos?|calibration|calib|replay|coreset|exemplars?|records|"
    r"images|rows|data|dataset)\d*$|(^|_)x(_(ref|val|valid|test|calib|bg|small))?\d*$|"
    r"(^|_)(examples?|sample|dummy|few_?shot|demo|demonstration|calib|calibration|replay|coreset|background|"
    r"reference|support|train|training)_(x|inputs?|samples?|batch(es)?|data|images?|set|rows?|buffer|"
    r"tensors?|points|features)\d*$",
    re.IGNORECASE,
)
# Names that are weak evidence. An array with such a name is reported only if it has the shape of samples.
WEAK_NAMES = re.compile(r"^(x|data|images|rows|records|sample|input|reference|dataset)\d*$", re.I)
MIN_SIDE = 8  # smallest height and width of an image, because kernels of convolutions are smaller
MAX_KERNEL = 15  # largest side of a square array with an odd side that can be a kernel
MIN_LENGTH = 32  # smallest length of a signal, because kernels of convolutions are shorter
# Smallest correlation of an array and a weight of the same shape that shows a copy, such as a moving average.
MIN_CORRELATION = 0.3
MAX_COMPARED = 1 << 24  # largest number of values of an array that is compared with weights


def find_samples(place: Place, survey: Survey) -> Iterator[StoredArray]:
    """Find arrays that look like samples of the model, and are not weights.

    Args:
        place: A value in the model file, with its path.
        survey: Facts about the model, such as the number of values of a sample.

    Yields:
        The arrays with their findings.
    """
    block = place.value
    if not isinstance(block, Block) or len(block.shape) < 2 or block.read is None:
        return
    if place.section or place.owner in survey.known_classes or place.owner == FRAME_PART:
        return
    shortened_path = place.path[-60:]
    if RECORD_NAMES.search(shortened_path) or MEMORIES.search(
        shortened_path
    ):  # another rule reports such an array
        return
    name = place.leaf
    has_name = bool(SAMPLE_NAMES.search(name))
    if block.kind == "bool" or name in FIRST_MOMENTS | SECOND_MOMENTS or math.prod(block.shape) < 2:
        return
    if not has_name and (is_parameter(place) or block.kind.startswith(("int", "complex"))):
        return
    shape_note = describe_shape(block.shape, survey)
    if not has_name and (block.shape[0] < 2 or not shape_note or _is_weight_copy(block, survey)):
        return
    if not shape_note and WEAK_NAMES.match(name):
        return
    severity = "high" if has_name and shape_note else "medium"
    reasons = [
        *(["the name of the array says that it holds samples"] if has_name else []),
        *([shape_note] if shape_note else []),
    ]
    finding_title = f"an array that looks like samples, named {name[:40]}"
    finding = Finding(
        STORED,
        severity,
        finding_title,
        place.path,
        ". ".join(sentence[:1].upper() + sentence[1:] for sentence in reasons),
        DELETE_ARRAY,
        count=block.shape[0],
    )
    yield StoredArray(finding, block, is_certain=False)


def describe_shape(shape: tuple[int, ...], survey: Survey) -> str:
    """Return how the shape of an array agrees with samples of the model.

    Args:
        shape: Shape of the array.
        survey: Facts about the model, such as the number of values of a sample.

    Returns:
        A sentence, or "" if the shape does not agree.
    """
    if (width := math.prod(shape[1:])) in survey.widths:
        return f"the first layer of the model takes {width} values, and so many are in each row"
    if len(shape) == 3 and shape[2] in survey.widths:
        return f"the first layer of the model takes {shape[2]} values, and so many are in each step"
    for channels in survey.channels.get(len(shape) - 1, ()):
        for size, layout in ((shape[2:], shape[1]), (shape[1:-1], shape[-1])):
            if layout == channels and _is_image(size, channels):
                sides = " x ".join(map(str, size))
                return (
                    f"a layer of the model takes {channels} channels, as in these images of {sides}"
                )
    return ""


def _is_image(size: tuple[int, ...], channels: int) -> bool:
    """Return True if an array of this height and width is an image or a signal, and not a kernel."""
    if len(size) == 1:
        return size[0] >= MIN_LENGTH
    is_kernel = len({*size}) == 1 and size[0] % 2 == 1 and size[0] <= MAX_KERNEL
    return channels in (1, 3, 4) and min(size) >= MIN_SIDE and not is_kernel


def _is_weight_copy(block: Block, survey: Survey) -> bool:
    """Return True if an array correlates with a weight of the same shape, such as an average."""
    if block.numel > MAX_COMPARED:
        return False
    try:
        for weight in survey.weights.get(block.shape, ())[:8]:
            array_and_weight = torch.stack(
                [block.tensor().double().flatten(), weight.tensor().double().flatten()]
            )
            if torch.corrcoef(array_and_weight)[0, 1].abs() > MIN_CORRELATION:
                return True
    except CheckpointError:  # the numbers are damaged, so a copy cannot be recognized
        return False
    return False
