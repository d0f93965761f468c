"""Options that several commands share, and what they amount to: settings of an attack, what is granted.

A group is a class whose fields are options; a command that takes one has them all (``flat``). Nothing
here opens a ``private/`` folder by itself: a file is read when its name is typed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from residuum.cli.output import print_json
from residuum.errors import DataError, InputError, did_you_mean, require_known

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from residuum.attacks import AttackConfig
    from residuum.records import Checkpoint, Knowledge

OWN = "own"
INIT_FILE = "init.safetensors"
Several = list[str] | None  # texts of an option that may be repeated


def option(help: str, default: Any = None, *names: str, **more: Any) -> Any:
    """An option with its help text; names: where it is not called like the parameter."""
    return typer.Option(default, *names, help=help, **more)


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: in the place of every group the group's own options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        k: kind for k, kind in hints.items() if dataclasses.is_dataclass(kind)
    }
    options: dict[str, Parameter] = {}
    for name, parameter in signature(command).parameters.items():
        kinds, members = hints, {name: parameter.default}
        if name in groups:
            kinds = get_type_hints(groups[name])
            members = {part.name: part.default for part in dataclasses.fields(groups[name])}
        for own, default in members.items():
            named, kind = Parameter.KEYWORD_ONLY, kinds[own]
            options[own] = Parameter(own, named, default=default, annotation=kind)

    def run(**given: Any) -> None:
        for name, group in groups.items():
            parts = {part.name: given.pop(part.name) for part in dataclasses.fields(group)}
            given[name] = group(**parts)
        command(**given)

    run.__signature__ = Signature(list(options.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: part.annotation for name, part in options.items()}
    run.__doc__ = command.__doc__
    return run


_CHECKPOINT = typer.Argument(
    metavar="CKPT",
    help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
)
CheckpointPath = Annotated[Path, _CHECKPOINT]
CheckpointPathOrNone = Annotated[Path | None, _CHECKPOINT]
NO_PLUGINS = option(
    "Leave installed plug-ins alone (or RESIDUUM_NO_PLUGINS=1).", False, "--no-plugins"
)
OWN_DATA = option(
    "An .npz with x (as the network receives it) and y, or a training directory (default: that of "
    "CKPT)."
)
ARCH = option(
    "Architecture where it cannot be read off the file, such as convnet:1x28x28-8-16-10,bias=all, "
    "or to confirm the activation: mlp:784-128-10,bias=all,activation=relu.",
    metavar="ARCH",
)
MODEL = option(
    "Where no --arch can say it: package.module:factory, which makes the network. That code is run: "
    "needs --trust-code.",
    metavar="CODE",
)
TRUST_CODE = option("The code that --model names may be run.", False, "--trust-code")
TASK = option("auto, binary, multiclass or regression (auto: by outputs).", "auto")
DEVICE = option("cpu or cuda.", "cpu")
SECONDS = option("Stop after this much wall-clock time.")
# Settings of an attack; None where the preset decides.
STEPS = option("Steps of every restart.")
DTYPE = option("float64, float32; on a GPU also tf32, bf16.")
DEVICE_OR_NONE = option("cpu or cuda.")
SEED_OR_NONE = option("Seed of all random numbers.", min=0, max=2**31 - 1)


@dataclass(frozen=True)
class Voice:
    """Who is told: a program (``--json``), nobody (``--quiet``), or a person."""

    json: bool = option("Print one JSON object and nothing else.", False, "--json")
    quiet: bool = option("Print nothing but errors.", False, "--quiet", "-q")

    @property
    def spoken(self) -> bool:
        """Whether a person reads along."""
        return not (self.json or self.quiet)

    def answer(self, summary: Any, show: Callable[[], None]) -> None:
        """The result as JSON, or as a person reads it."""
        if self.json:
            print_json(summary)
        elif not self.quiet:
            show()


@dataclass(frozen=True)
class Chosen:
    """Which samples a network is trained on; read by ``datasets.load_dataset``."""

    n: int | None = option(
        "Training samples, equally many of each label (default: all; half, where the held-out "
        "ones must come from the same file)."
    )
    data_root: Path | None = option("Folder of data files (or RESIDUUM_DATA).")
    data_seed: int | None = option("Random choice of samples; without it the first n.")


@dataclass(frozen=True)
class Granted:
    """What an auditor may grant the attacker; read by :func:`grant`."""

    shape: str | None = option("Granted: shape of one sample.", metavar="C,H,W")
    value_range: str | None = option("Granted: least and greatest value.", metavar="LOW,HIGH")
    mean: str | None = option("Granted: a number, an .npy, or an .npz with 'mean'.", metavar="MEAN")
    mean_provenance: str = option("Where that mean is from: user, train or holdout.", "user")
    sample_count: int | None = option("Granted: number of training samples.", min=1)
    label_balance: str | None = option(
        "Granted: share of each label, as 0.5,0.5.", metavar="SHARES"
    )
    init: str | None = option(
        "Granted: initial weights; own: those in the training directory.", metavar="FILE"
    )
    loss: str | None = option("Granted: the training loss, as logistic or squared.")
    weight_decay: float | None = option("Granted: weight decay of the training.")


@dataclass(frozen=True)
class Tuned:
    """A network that was fine-tuned, and what it began from; read by :func:`tuned`."""

    base: str | None = option(
        "Granted: the weights before fine-tuning; CKPT may be an adapter (LoRA) of it.",
        metavar="FILE",
    )
    adapter: str | None = option(
        "An adapter (LoRA) of CKPT, which is then the granted base.", metavar="FILE"
    )


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    import torch

    if device not in ("cpu", "cuda"):
        raise InputError(f"A device is cpu or cuda; got {device!r}.", "Use --device cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("No CUDA device was found.", "Use --device cpu.")


def numbers(text: str, option: str, example: str) -> tuple[float, ...]:
    """Finite numbers between commas, or one line on what ``option`` takes."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise InputError(
            f"{option} takes finite numbers between commas; got {text[:40]!r}.",
            f"Example: {option} {example}.",
        )
    return found


def value_range_of(text: str | None) -> tuple[float, float] | None:
    """``LOW,HIGH``, where it was said."""
    if text is None:
        return None
    found = numbers(text, "--value-range", "0,1")
    if len(found) != 2:
        raise InputError(
            f"A value range has two ends; got {text!r}.", "Example: --value-range 0,1."
        )
    return found[0], found[1]


def configure(
    preset: str, prior: Several, settings: Several, split: str | None = None, **given: Any
) -> AttackConfig:
    """The preset with everything overridden that was said.

    prior: ``NAME:WEIGHT``, replacing the preset's; settings: ``KEY=VALUE`` for those that have no
    option; split: a way to grow, laid over the preset before everything else; given: values of the
    other options, None where one was not used.
    """
    from residuum.attacks import GROWTH_PRESETS, PRESETS

    for kind, name, known in (
        ("No preset", preset, PRESETS),
        ("--split has no", split or "none", GROWTH_PRESETS),
        ("--rivals has no", given.get("rivals") or "tied", ("tied", "best")),
        ("--gradients has no", given.get("gradients") or "both", ("theta", "theta0", "both")),
    ):
        require_known(name, known, kind)
    changes = dict(GROWTH_PRESETS[split]) if split is not None else {}
    changes |= {name: value for name, value in given.items() if value is not None}
    changes |= (_read_pair(pair, taken=(*given, "priors", "split")) for pair in settings or ())
    if prior:
        changes["priors"] = tuple(map(_prior, prior))
    try:
        return dataclasses.replace(PRESETS[preset], **changes)
    except InputError as problem:  # a rule of the settings, said in the options' words
        name, _, rest = problem.message.partition(" ")
        if name not in given:
            raise
        raise InputError(f"{_option(name)} {rest}", problem.remedy) from problem


def _read_pair(pair: str, taken: tuple[str, ...]) -> tuple[str, Any]:
    """One ``KEY=VALUE``, as the type that the setting has."""
    from residuum.attacks import AttackConfig

    settings = dataclasses.fields(AttackConfig)
    defaults = {one.name: one.default for one in settings if one.name not in taken}
    name, equals, text = pair.partition("=")
    name = name.strip().replace("-", "_")
    if name in taken:
        raise InputError(f"--set {name} has an option of its own.", f"Use {_option(name)}.")
    if not equals or name not in defaults:
        raise InputError(
            f"--set takes KEY=VALUE with a setting of the attack; got {pair[:60]!r}.",
            did_you_mean(name, tuple(defaults)),
        )
    return name, _typed(f"--set {name}=", text.strip(), defaults[name])


def _typed(option: str, text: str, default: Any) -> Any:
    """The text as a value of the default's type."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise InputError(f"{option} is true or false; got {text!r}.", f"Use {option}true.")
        return text.lower() == "true"
    many = default if isinstance(default, tuple) else (default,)
    found = numbers(text, option, ",".join(f"{value:g}" for value in many))
    whole = isinstance(default, int)
    if len(found) != len(many) or (whole and found[0] != int(found[0])):
        kind = f"{'whole ' if whole else ''}number{'' if len(many) == 1 else 's'}"
        raise InputError(f"{option} takes {len(many)} {kind}; got {text!r}.", "Correct it.")
    return found if many is default else type(default)(found[0])


def _prior(text: str) -> tuple[str, float]:
    name, colon, weight = text.partition(":")
    value = numbers(weight, f"--prior {name}:", "1e-4")[0] if colon else 1.0
    if value < 0:
        raise InputError(f"A prior's weight must not be negative; got {text!r}.", "Correct it.")
    return name, value


def _option(name: str) -> str:
    return "--" + {"priors": "prior"}.get(name, name).replace("_", "-")


def tuned(path: Path, base: str | None, adapter: str | None) -> tuple[Path, str | None]:
    """The file that was trained, and the one that it began from."""
    if adapter is None:
        return path, base
    if base is not None:
        raise InputError("--adapter makes CKPT the base, so --base says nothing.", "Leave one out.")
    return Path(adapter), str(path)


def load(
    path: Path,
    arch: str | None,
    model: str | None,
    trusted: bool,
    shape: tuple[int, ...] | None,
    base: str | None = None,
) -> Checkpoint:
    """The network in a file, read off it, as ``--arch`` says, or made by the code of ``--model``.

    base: where it is an adapter, what that is added to.
    """
    from residuum.checkpoints import load_checkpoint
    from residuum.checkpoints.factories import load_with_code
    from residuum.checkpoints.tuning import load_tuned

    if model is None:
        return load_checkpoint(path, arch) if base is None else load_tuned(path, base, arch)
    if arch is not None:
        raise InputError("--model makes the network, so --arch says nothing.", "Leave one out.")
    return load_with_code(path, model, shape, trusted=trusted)


def grant(
    path: Path, released: Checkpoint, *, mean_provenance: str = "user", **said: Any
) -> Knowledge:
    """The Knowledge that these options amount to.

    path: of the checkpoint, for ``--init own``; said: fields of ``Granted``, None where one was not used.
    """
    from residuum.checkpoints.beside import with_release
    from residuum.records import Knowledge
    from residuum.records.knowledge import PROVENANCES

    require_known(mean_provenance, PROVENANCES, "No provenance")
    read: dict[str, Callable[[Any], Any]] = {
        "shape": _shape,
        "value_range": value_range_of,
        "mean": _mean,
        "label_balance": lambda text: _balance(text, released),
        "init": lambda text: _initial(text, path, released),
        "base": lambda text: _initial(text, path, released),
        "loss": _loss,
        "weight_decay": _decay,
        "sample_count": int,
    }
    facts = {name: read[name](value) for name, value in said.items() if value is not None}
    if {"init", "base"} <= {*facts}:
        raise InputError("--init and --base are both the start.", "Leave one out.")
    for name in {"init", "base"} & {*facts}:
        facts["theta0"] = facts.pop(name)
    knowledge = Knowledge(**facts, provenance={"mean": mean_provenance} if "mean" in facts else {})
    check_mean(knowledge)
    return with_release(path, released, knowledge)


def _loss(text: str) -> str:
    from residuum.training.methods import LOSSES

    require_known(text, LOSSES, "No loss")
    return text


def _decay(value: float) -> float:
    if not 0 <= value < math.inf:
        raise InputError(f"A weight decay is a finite number from 0; got {value}.", "Correct it.")
    return value


def check_mean(knowledge: Knowledge) -> None:
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


def shape_of(text: str | None) -> tuple[int, ...] | None:
    """``C,H,W``, where it was said."""
    return None if text is None else _shape(text)


def _shape(text: str) -> tuple[int, ...]:
    sizes = numbers(text, "--shape", "1,28,28")
    if not all(size >= 1 and size == int(size) for size in sizes):
        raise InputError(f"A shape is of whole numbers from 1; got {text!r}.", "Correct --shape.")
    return tuple(int(size) for size in sizes)


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
    from residuum.checkpoints.factories import start_of

    if text == OWN and not (path / INIT_FILE).is_file():
        raise InputError(
            f"`--init own` needs {INIT_FILE} in a training directory; {str(path)!r} has none.",
            "Name the file of the initial weights.",
        )
    file = path / INIT_FILE if text == OWN else Path(text)
    if released.module is not None:
        return start_of(file, released)
    return load_checkpoint(file, released.arch).theta
