"""What the auditor grants the attacker, read from the command line.

Nothing here opens a ``private/`` folder by itself: a file is read when its name is typed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residuum.cli.options import numbers
from residuum.errors import DataError, InputError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from residuum.records import Checkpoint, Knowledge

OWN = "own"
INIT_FILE = "init.safetensors"


def grant(
    path: Path,
    released: Checkpoint,
    *,
    shape: str | None = None,
    value_range: str | None = None,
    mean: str | None = None,
    mean_provenance: str = "user",
    sample_count: int | None = None,
    label_balance: str | None = None,
    init: str | None = None,
    loss: str | None = None,
    weight_decay: float | None = None,
) -> Knowledge:
    """The Knowledge that these options amount to; ``path``: of the checkpoint, for ``--init own``."""
    from residuum.records import Knowledge

    facts: dict[str, Any] = {
        "shape": None if shape is None else _shape(shape),
        "value_range": None if value_range is None else _pair(value_range),
        "mean": None if mean is None else _mean(mean),
        "sample_count": sample_count,
        "label_balance": None if label_balance is None else _balance(label_balance, released),
        "theta0": None if init is None else _initial(init, path, released),
        "loss": None if loss is None else _loss(loss),
        "weight_decay": weight_decay,
    }
    if weight_decay is not None and not 0 <= weight_decay < math.inf:
        raise InputError(
            f"A weight decay is a finite number from 0; got {weight_decay}.", "Correct it."
        )
    knowledge = Knowledge(
        **facts, provenance={} if mean is None else {"mean": _provenance(mean_provenance)}
    )
    _check_mean(knowledge)
    return knowledge


def read_knowledge(path: str) -> Knowledge:
    """A saved Knowledge whose facts are of their own kind, whatever wrote the file."""
    from torch import Tensor

    from residuum.records import Knowledge

    found = Knowledge.load(path)
    whole, real, tensor = (int,), (int, float), (Tensor,)
    many = {"shape": whole, "value_range": real, "label_balance": real}
    single = {"sample_count": whole, "weight_decay": real, "loss": (str,), "mean": tensor,
              "norms": tensor}  # fmt: skip
    for name in found.granted:
        value = getattr(found, name)
        if name == "theta0":
            fits = isinstance(value, dict) and all(isinstance(t, Tensor) for t in value.values())
        elif name in many:
            fits = isinstance(value, tuple) and all(_is(part, many[name]) for part in value)
        else:
            fits = _is(value, single[name])
        if not fits or (name == "value_range" and len(value) != 2):
            raise InputError(
                f"{path!r} must hold what an attacker is granted; its {name} is no such thing.",
                "Take knowledge.safetensors of a finished audit.",
            )
    _check_mean(found)
    return found


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Of one of the kinds; numbers are finite and positive enough to be used."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, int | float) or math.isfinite(value)


def _shape(text: str) -> tuple[int, ...]:
    sizes = numbers(text, "--shape", "1,28,28")
    if not all(size >= 1 and size == int(size) for size in sizes):
        raise InputError(f"A shape is of whole numbers from 1; got {text!r}.", "Correct --shape.")
    return tuple(int(size) for size in sizes)


def _pair(text: str) -> tuple[float, float]:
    found = numbers(text, "--value-range", "0,1")
    if len(found) != 2:
        raise InputError(
            f"A value range has two ends; got {text!r}.", "Example: --value-range 0,1."
        )
    return found[0], found[1]


def _mean(text: str) -> Tensor:
    """A number, or the array ``mean`` of an .npz, or an .npy."""
    import numpy as np
    import torch

    from residuum.records import read_npz

    try:
        values = np.asarray(float(text))
    except ValueError:
        if text.endswith(".npy"):
            values = _read_npy(text)
        else:
            arrays = read_npz(text)
            if "mean" not in arrays:
                raise DataError(
                    f"A mean is read from the array 'mean'; {text!r} holds {sorted(arrays)}.",
                    "Save it with numpy.savez(path, mean=...), or say a number.",
                ) from None
            values = arrays["mean"]
    if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
        raise DataError(f"A mean is of finite numbers; that of {text!r} is not.", "Correct --mean.")
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _read_npy(path: str) -> np.ndarray[Any, Any]:
    import numpy as np

    try:
        # Mapped, so that a header that claims more than the file holds allocates nothing.
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as problem:
        raise DataError(f"No file at {path!r}.", "Check the path.") from problem
    except (OSError, ValueError, EOFError, SyntaxError) as problem:
        raise DataError(
            f"{path!r} must be an .npy of plain numbers; reading it failed ({problem}).",
            "Save it with numpy.save(path, mean).",
        ) from problem


def _provenance(text: str) -> str:
    from residuum.records.knowledge import PROVENANCES

    if text not in PROVENANCES:
        raise InputError(f"No provenance {text!r}.", did_you_mean(text, PROVENANCES))
    return text


def _check_mean(knowledge: Knowledge) -> None:
    """The mean of values inside a range lies inside it, up to rounding."""
    mean, span = knowledge.mean, knowledge.value_range
    if mean is None or span is None:
        return
    slack = 1e-6 * (span[1] - span[0])
    if mean.min() < span[0] - slack or mean.max() > span[1] + slack:
        raise InputError(
            f"The mean must lie in the value range {span[0]:g},{span[1]:g}; it runs from "
            f"{float(mean.min()):.4g} to {float(mean.max()):.4g}.",
            "Give both in the units of the images before the mean was subtracted.",
        )


def _balance(text: str, released: Checkpoint) -> tuple[float, ...]:
    from residuum.networks import Architecture

    shares = numbers(text, "--label-balance", "0.5,0.5")
    classes = max(2, Architecture.parse(released.arch).outputs)
    if len(shares) != classes or min(shares) < 0 or abs(sum(shares) - 1) > 1e-3:
        raise InputError(
            f"A label balance has {classes} shares that add up to 1; got {text[:40]!r}.",
            f"Example: --label-balance {','.join([f'{1 / classes:.4g}'] * classes)}.",
        )
    return shares


def _initial(text: str, path: Path, released: Checkpoint) -> dict[str, Tensor]:
    from residuum.checkpoints import load_checkpoint

    if text != OWN:
        return load_checkpoint(text, released.arch).theta
    if not (path / INIT_FILE).is_file():
        raise InputError(
            f"`--init own` needs {INIT_FILE} in a training directory; {str(path)!r} has none.",
            "Name the file of the initial weights.",
        )
    return load_checkpoint(path / INIT_FILE, released.arch).theta


def _loss(text: str) -> str:
    from residuum.training.methods import LOSSES

    if text not in LOSSES:
        raise InputError(f"No loss {text!r}.", did_you_mean(text, tuple(LOSSES)))
    return text
