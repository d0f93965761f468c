"""Read what an attacker knows in addition to the weights: from options, a file or Python values.

Each item of knowledge, such as the value range of a sample, can be a text as on the command line (``"0,1"``)
or a Python value (``(0, 1)``). Files are read only if the caller names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from residuum.errors import DataError, InputError
from residuum.io.loading import load_initial_weights
from residuum.io.release import Release
from residuum.io.release_knowledge import add_stored_knowledge
from residuum.io.updates import compare_with_base
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge, read_npz

Numbers = str | Sequence[float]


def build_knowledge(
    release: Release,
    network: Network,
    *,
    shape: Numbers | None = None,
    value_range: Numbers | None = None,
    mean: str | float | Tensor | None = None,
    mean_provenance: str | None = None,
    sample_count: int | None = None,
    label_balance: Numbers | None = None,
    init: str | Path | None = None,
    base: str | Path | None = None,
    loss: str | None = None,
    weight_decay: float | None = None,
    columns: str | None = None,
    column_ranges: str | None = None,
    train: Dataset | None = None,
    holdout: Dataset | None = None,
) -> Knowledge:
    """Return what an attacker knows: the passed arguments, and what the release itself stores.

    Args:
        release: The model file with the weights, which can also store initial weights and optimizer state.
        network: The network that was loaded from ``release``.
        shape: Shape of one sample.
        value_range: Minimum and maximum value of a sample before a mean was subtracted.
        mean: The mean that was subtracted from the samples: a number, an .npy file, an .npz file with an
            array "mean", or "train" or "holdout" for the mean that is stored with these samples.
        mean_provenance: Where the mean comes from. The default is "user" for a number or a file.
        sample_count: Number of training samples.
        label_balance: Fraction of each label.
        init: File of the initial weights, or "own" for ``init.safetensors`` in the training directory.
        base: File of the weights before fine-tuning.
        loss: The training loss.
        weight_decay: Weight decay of the training.
        columns: Types of the columns, if the samples are rows of a table.
        column_ranges: Ranges of the columns, which only attacks on forests use.
        train: Training samples, which store the mean for ``mean="train"``.
        holdout: Held-out samples, which store the mean for ``mean="holdout"``.

    Returns:
        What the attacker knows.

    Raises:
        InputError: If both ``init`` and ``base`` are passed, or ``column_ranges`` for a network.
    """
    if column_ranges is not None:
        raise InputError(
            "The option --column-ranges is only for attacks on decision trees; this file holds a neural "
            "network.",
            "Omit --column-ranges. If you know the value range of the samples, pass --value-range LOW,HIGH.",
        )
    if init is not None and base is not None:
        raise InputError(
            "The options --init and --base cannot be used together, because both name the weights before "
            "training.",
            "Omit --init or --base.",
        )
    initial_weights = None if init is None else load_initial_weights(init, release, network)
    knowledge = Knowledge(
        shape=None if shape is None else parse_shape(shape),
        value_range=None if value_range is None else parse_value_range(value_range),
        sample_count=None if sample_count is None else _check_count(sample_count),
        label_balance=None if label_balance is None else _parse_balance(label_balance, network),
        theta0=initial_weights if base is None else _load_base(base, release, network),
        loss=loss,
        weight_decay=None if weight_decay is None else _check_decay(weight_decay),
        columns=columns,
    )
    if isinstance(mean, str) and mean in ("train", "holdout"):
        stored_mean = _get_stored_mean(mean, mean_provenance, train if mean == "train" else holdout)
        knowledge = _add_mean(knowledge, stored_mean, mean)
    elif mean is not None:
        knowledge = _add_mean(knowledge, _read_mean(mean), mean_provenance or "user")
        check_mean(knowledge)
    return add_stored_knowledge(release, network, knowledge)


def read_knowledge(path: str | Path) -> Knowledge:
    """Read what an attacker knows from a file of a saved ``Knowledge``, and check the type of every value.

    Args:
        path: The file, such as knowledge.safetensors of a finished audit.

    Returns:
        What the attacker knows.

    Raises:
        InputError: If the file holds a value of the wrong type.
    """
    knowledge = Knowledge.load(path)
    strict_config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)
    types = get_type_hints(Knowledge)
    for name in knowledge.known_names:
        try:
            TypeAdapter(types[name], config=strict_config).validate_python(getattr(knowledge, name))
        except ValidationError as problem:
            raise InputError(
                "Every value in a file of attacker knowledge must have the type that residuum expects; "
                f"the value {name!r} in the file {str(path)!r} has another type.",
                "Pass the file knowledge.safetensors from the folder of a finished audit.",
            ) from problem
    check_mean(knowledge)
    return knowledge


def parse_numbers(values: Numbers, option: str, example: str) -> tuple[float, ...]:
    """Parse a list of finite numbers.

    Args:
        values: A sequence of numbers, or a text of numbers with commas between them.
        option: The command line option, for the error message.
        example: A valid value of this option, for the error message.

    Returns:
        The numbers.

    Raises:
        InputError: If a value is not a finite number.
    """
    try:
        number_texts = values.split(",") if isinstance(values, str) else values
        numbers = tuple(float(entry) for entry in number_texts)
    except (TypeError, ValueError):
        numbers = (math.nan,)  # not finite, so the next check raises the error
    if not all(map(math.isfinite, numbers)):
        raise InputError(
            f"The option {option} takes finite numbers with commas between them; got {str(values)[:40]!r}.",
            f"Example: {option} {example}.",
        )
    return numbers


def parse_shape(values: Numbers) -> tuple[int, ...]:
    """Parse the shape of a sample, such as ``"1,28,28"``, and return it."""
    sizes = parse_numbers(values, "--shape", "1,28,28")
    if not all(size >= 1 and size == int(size) for size in sizes):
        raise InputError(
            f"The shape of a sample must consist of positive integers; got {values!r}.",
            "Correct the option --shape. Example: --shape 1,28,28.",
        )
    return tuple(int(size) for size in sizes)


def read_column_ranges(
    source: str, train: Dataset | None, holdout: Dataset | None
) -> tuple[Tensor, str]:
    """Return the smallest and the largest value of each column of a table, and the source of these values.

    Args:
        source: "train" or "holdout" for the ranges of these samples, or a .csv file with a header and two
            rows of numbers: the smallest values, then the largest values.
        train: Training samples.
        holdout: Held-out samples.

    Returns:
        (2, columns) ranges, and their source: "train", "holdout" or "user".

    Raises:
        InputError: If the ranges cannot be read.
    """
    if source in ("train", "holdout"):
        samples = train if source == "train" else holdout
        if samples is None:
            raise InputError(
                f"The option --column-ranges {source} computes the ranges from the "
                f"{'training' if source == 'train' else 'held-out'} samples; no such samples were passed.",
                f"Pass --{'data' if source == 'train' else 'holdout'}.",
            )
        sample_values = samples.x.flatten(1).double()
        low, high = (
            sample_values.nan_to_num(nan=torch.inf).amin(0),
            sample_values.nan_to_num(nan=-torch.inf).amax(0),
        )
        return torch.stack([low, high]), source
    try:
        low_and_high = np.loadtxt(source, delimiter=",", skiprows=1, ndmin=2)
    except (OSError, ValueError) as problem:
        raise InputError(
            "The option --column-ranges takes 'train', 'holdout' or a .csv file with a header and two "
            f"rows of numbers; reading the file {source[:80]!r} failed "
            f"({str(problem).splitlines()[0][:100]}).",
            "Write the smallest value of every column into the first row, and the largest into the second.",
        ) from problem
    if (
        len(low_and_high) != 2
        or not np.isfinite(low_and_high).all()
        or (low_and_high[0] > low_and_high[1]).any()
    ):
        raise InputError(
            "A file of column ranges must have two rows, the smallest values and the largest values of the "
            f"columns; the file {source[:80]!r} has {len(low_and_high)} rows, or a smallest value is "
            "above a largest value.",
            "Write the smallest value of every column into the first row, and the largest into the second.",
        )
    return torch.from_numpy(low_and_high), "user"


def parse_value_range(values: Numbers) -> tuple[float, float]:
    """Parse a value range, such as ``"0,1"``, and return the minimum and the maximum."""
    bounds = parse_numbers(values, "--value-range", "0,1")
    if len(bounds) != 2:
        raise InputError(
            "A value range must be two numbers, the smallest and the largest value of a sample; got "
            f"{values!r}.",
            "Example: --value-range 0,1.",
        )
    return bounds[0], bounds[1]


def check_mean(knowledge: Knowledge) -> None:
    """Check that the mean of the samples lies inside their value range, up to rounding.

    Args:
        knowledge: What the attacker knows, with or without a mean and a value range.

    Raises:
        InputError: If the mean lies outside of the value range.
    """
    mean, bounds = knowledge.mean, knowledge.value_range
    if mean is None or bounds is None:
        return
    rounding_error = 1e-6 * (bounds[1] - bounds[0])
    if mean.min() < bounds[0] - rounding_error or mean.max() > bounds[1] + rounding_error:
        raise InputError(
            f"The mean of the samples must lie inside their value range, from {bounds[0]:g} to "
            f"{bounds[1]:g}; the values of the mean are from {float(mean.min()):.4g} to "
            f"{float(mean.max()):.4g}.",
            "Pass the mean and the value range in the units of the images before the mean was subtracted.",
        )


def _parse_balance(values: Numbers, network: Network) -> tuple[float, ...]:
    fractions = parse_numbers(values, "--label-balance", "0.5,0.5")
    class_count = max(2, network.architecture.outputs)
    if len(fractions) != class_count or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-3:
        raise InputError(
            f"The label balance is the share of each label, so it must be {class_count} numbers that add "
            f"up to 1; got {str(values)[:40]!r}.",
            f"Example: --label-balance {','.join([f'{1 / class_count:.4g}'] * class_count)}.",
        )
    return fractions


def _check_count(value: int) -> int:
    if value < 1:
        raise InputError(
            f"The number of training samples must be a positive integer; got {value}.",
            "Correct the option --sample-count.",
        )
    return value


def _check_decay(value: float) -> float:
    if not 0 <= value < math.inf:
        raise InputError(
            f"The weight decay of the training must be a finite number of at least 0; got {value}.",
            "Correct the option --weight-decay.",
        )
    return value


def _add_mean(knowledge: Knowledge, mean: Tensor, provenance: str) -> Knowledge:
    return knowledge.replace(mean=mean, provenance={**knowledge.provenance, "mean": provenance})


def _get_stored_mean(name: str, provenance: str | None, samples: Dataset | None) -> Tensor:
    """Return the mean that is stored with the training or held-out samples."""
    if provenance not in (None, name):
        raise InputError(
            f"If you pass --mean {name}, the source of the mean is already known as {name!r}; got "
            f"--mean-provenance {provenance!r}.",
            "Omit --mean-provenance.",
        )
    if samples is None or samples.mean is None:
        raise InputError(
            f"The option --mean {name} needs a mean that is stored in the same file as the samples; the "
            "file stores no mean.",
            "Save the subtracted mean in the data file as the array 'mean', or omit --mean.",
        )
    return samples.mean.double()


def _read_mean(mean: str | float | Tensor) -> Tensor:
    """Return a mean that is passed as a number, an .npy file, or an .npz file with an array "mean"."""
    if isinstance(mean, Tensor):
        return mean.double()
    try:
        mean_values = np.asarray(float(mean))
    except ValueError:
        path = str(mean)
        if path.endswith(".npy"):
            mean_values = _read_npy(path)
        else:
            arrays = read_npz(path)
            if "mean" not in arrays:
                raise DataError(
                    f"An .npz file with a mean must have the array 'mean'; the file {path!r} has the "
                    f"arrays {sorted(arrays)}.",
                    "Save the mean with numpy.savez(path, mean=...), or pass a number.",
                ) from None
            mean_values = arrays["mean"]
    if mean_values.dtype.kind not in "fiu" or not np.isfinite(mean_values).all():
        raise DataError(
            f"A mean must consist of finite numbers; the mean from {str(mean)!r} contains NaN or "
            "infinite values.",
            "Correct the option --mean.",
        )
    return torch.from_numpy(np.array(mean_values, dtype=np.float64))


def _read_npy(path: str) -> np.ndarray[Any, Any]:
    try:
        # A damaged header of an .npy file can state more numbers than the file holds.
        # We map the file into memory, so that such a header allocates no memory.
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as problem:
        raise DataError(
            f"The option --mean takes a number or the path of a file; the file {path!r} does not exist.",
            "Check the path.",
        ) from problem
    except (OSError, ValueError, EOFError, SyntaxError) as problem:
        raise DataError(
            f"The file {path!r} must be an .npy file of numbers; reading the file failed ({problem}).",
            "Save the mean with numpy.save(path, mean).",
        ) from problem


def _load_base(file: str | Path, release: Release, network: Network) -> dict[str, Tensor]:
    """Return the weights before fine-tuning. Raise an error if the release holds no fine-tuned weights."""
    base = load_initial_weights(file, release, network)
    if sign := compare_with_base(network.theta, base):
        raise InputError(
            f"With --base, the model file must hold fine-tuned weights; the file {release.path.name!r} "
            f"looks like a weight difference or a gradient ({sign}).",
            "If the file is a difference or gradient, pass --update FILE --base BASE. If the file does "
            "hold weights that training changed a lot, pass --init in place of --base.",
        )
    return base
