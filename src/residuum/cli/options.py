"""Options that several commands share, and options made from the fields of settings models.

A settings model (in ``residuum.settings`` or ``residuum.auditing.request``) has the name, type, default and
description of each setting. :func:`options_from` makes the options of a command from the fields of a model. A
command receives only the options that the user passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Union, get_args, get_origin

from cyclopts import App, Group, Parameter
from pydantic import BaseModel

from residuum.cli.output import print_json
from residuum.errors import InputError
from residuum.settings import EXPERT as EXPERT_SETTING
from residuum.settings import PRESETS

BASIC = Group("Basic", sort_key=1)
SETTINGS = Group("Settings of the attack", sort_key=2)
ATTACKER = Group("Attacker knowledge", sort_key=3)
EXPERT = Group("Expert", sort_key=4)
OPTION_NAMES = {  # for each setting whose command line option has another name, the name of the option
    "model_code": "model",
    "objectives": "rank-by",
    "cpus": "cpus-per-trial",
    "gpus": "gpus-per-trial",
}
Settings = TypeVar("Settings")
Command = TypeVar("Command", bound=Callable[..., Any])


def command_app(name: str, doc: str | None) -> App:
    """Return the cyclopts application of a command.

    Args:
        name: Name of the command.
        doc: Docstring of the module of the command. All paragraphs except the first are printed below the
            options in the help.

    Returns:
        The application. The function that runs the command must still be registered.
    """
    help_text = (doc or "").strip().replace("Examples:\n", "Examples:\n\n")
    _, *paragraphs = help_text.split("\n\n")
    details = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return App(name=name, help_epilogue=details, group_parameters=BASIC)


def format_default(value: Any) -> str | None:
    """Return a default value as a user would type it, or None if the help does not show it."""
    if value is None or value is False or value in ("", math.inf, ()):
        return None
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(str(format_default(item) or 0) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def options_from(
    *models: type[BaseModel],
    skip: Iterable[str] = (),
    group: Group = BASIC,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """Return the type of a command parameter that gives the command one option for each setting.

    Args:
        *models: The settings models. If two models have a setting of the same name, the first one is used.
        skip: Names of settings that get no option.
        group: Group of the options in the help. Settings for experts are in the group ``EXPERT``.
        changes: For some settings, the annotated type that the option has instead of the type of the setting.
            An annotation can also change the option, such as its placeholder in the help.

    Returns:
        A TypedDict with one field for each setting. In the command, the parameter is a dictionary of the
        options that the user passed.
    """
    fields: dict[str, Any] = {}
    for model in models:
        for name, field in model.model_fields.items():
            if name in fields or name in skip:
                continue
            is_expert = field.json_schema_extra == EXPERT_SETTING
            option = Parameter(
                name=option_name(name),
                help=_name_options(field.description or "", model),
                group=EXPERT if is_expert else group,
                show_default=format_default(field.default) or False,
                negative_bool="no-",
            )
            annotated_type = (changes or {}).get(
                name, Annotated[_drop_none_and_empty(field.annotation), None]
            )
            fields[name] = Annotated[
                (annotated_type.__origin__, option, *annotated_type.__metadata__)
            ]
    return TypedDict("Options", fields, total=False)  # type: ignore[operator]


def _drop_none_and_empty(annotation: Any) -> Any:
    """Return the type of a setting without the values None and "", which a user cannot type.

    If None were allowed, the parser cyclopts would convert the word "none" to None. But "none" is the name of
    a prior.
    """
    type_arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return Literal[tuple(word for word in type_arguments if word != "")]
    if NoneType in type_arguments:
        return Union[tuple(member for member in type_arguments if member is not NoneType)]  # noqa: UP007
    return annotation


def with_options(**types: Any) -> Callable[[Command], Command]:
    """Return a decorator that turns dictionary parameters of a command into options.

    Args:
        **types: For each parameter name, the type that :func:`options_from` returned.

    Returns:
        The decorator.
    """

    def decorate(command: Command) -> Command:
        without_prefix = Parameter(
            name="*"
        )  # an option has the name of a field, without the parameter name as a prefix
        command.__annotations__ |= {name: Annotated[t, without_prefix] for name, t in types.items()}
        return command

    return decorate


def _name_options(text: str, model: type[BaseModel]) -> str:
    """Replace the names of settings in a help text by the names of their command line options."""
    names_with_underscore = (name for name in model.model_fields if "_" in name)
    return re.sub(
        rf"\b({'|'.join(names_with_underscore) or '$.'})\b",
        lambda match: option_name(match[1]),
        text,
    )


def make_from_options(make: Callable[..., Settings], values: Mapping[str, Any]) -> Settings:
    """Make settings from options. If a setting is not valid, the error message names its option.

    Args:
        make: The settings model, or a function that makes the settings.
        values: The values that the user passed, by the name of the setting.

    Returns:
        The settings.

    Raises:
        InputError: If a value is not allowed.
    """
    try:
        return make(**values)
    except InputError as problem:
        name, _, rule = problem.message.partition(" ")
        if name not in values:
            raise
        raise InputError(f"{option_name(name)} {rule}", problem.remedy) from problem


def option_name(setting: str) -> str:
    """Return the name of the option of a setting, such as "--lr-x"."""
    return "--" + OPTION_NAMES.get(setting, setting).replace("_", "-")


Task = Literal["auto", "binary", "multiclass", "regression"]
CheckpointPath = Annotated[
    Path,
    Parameter(
        name="CKPT",
        help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
    ),
]
OptionalCheckpointPath = Annotated[
    Path | None,
    Parameter(
        name="CKPT",
        help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
    ),
]
OwnData = Annotated[
    Path | None,
    Parameter(
        help="Training samples: an .npz with the inputs x of the network and the labels y, or a "
        "directory that `residuum train` wrote. The default is the directory of the network."
    ),
]
Arch = Annotated[
    str | None,
    Parameter(
        help="Architecture of the network, such as convnet:1x28x28-8-16-10,bias=all, if the model file "
        "does not state it. The default activation function is ReLU. To change it, write "
        "mlp:784-128-10,bias=all,activation=gelu.",
        metavar="ARCH",
        group=EXPERT,
    ),
]
ModelCode = Annotated[
    str | None,
    Parameter(
        name="--model",
        help="Function that makes the network, as package.module:function, if --arch cannot describe the "
        "network. Residuum runs this function, so you must also pass --trust-code.",
        metavar="CODE",
        group=EXPERT,
    ),
]
TrustCode = Annotated[
    bool, Parameter(help="Allow residuum to run the code that --model names.", group=EXPERT)
]
NoPlugins = Annotated[
    bool,
    Parameter(
        help="Do not load plug-ins (other Python packages that add attacks). The environment variable "
        "RESIDUUM_NO_PLUGINS=1 has the same effect.",
        group=EXPERT,
    ),
]
TaskOption = Annotated[
    Task,
    Parameter(
        help="Task that the network was trained for. 'auto' infers the task from the number of outputs."
    ),
]
Device = Annotated[
    Literal["cpu", "cuda"], Parameter(help="Device for the computation: cpu or cuda.")
]
PresetName = Annotated[
    str,
    Parameter(
        help="Name of a preset, which is a set of settings. Other options override these settings.",
        choices=tuple(PRESETS),
    ),
]
DATASETS = ("digits", "photos", "circle", "sphere", "mnist", "cifar10")


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """Options that say how a command prints its result: as JSON, as tables or not at all."""

    json: Annotated[
        bool, Parameter(help="Print the result as one JSON object, and nothing else.")
    ] = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), help="Print only errors.")] = False

    @property
    def visible(self) -> bool:
        """True if tables and progress are shown. False with --json or --quiet."""
        return not (self.json or self.quiet)

    def print_result(self, summary: Any, show: Callable[[], None]) -> None:
        """Print the result as JSON or as tables. With ``quiet``, print nothing.

        Args:
            summary: The result as plain values, for JSON.
            show: Function that prints the result as tables.
        """
        if self.json:
            print_json(summary)
        elif not self.quiet:
            show()


@Parameter(name="*", group=ATTACKER)
@dataclass(frozen=True)
class KnowledgeOptions:
    """Options that say what the attacker knows in addition to the model file."""

    shape: Annotated[
        str | None, Parameter(help="Shape of one sample, such as 1,28,28.", metavar="C,H,W")
    ] = None
    value_range: Annotated[
        str | None,
        Parameter(
            help="Smallest and largest possible value in a sample, such as 0,1.", metavar="LOW,HIGH"
        ),
    ] = None
    mean: Annotated[
        str | None,
        Parameter(
            help="Mean that was subtracted from the samples: a number, an .npy, or an .npz with 'mean'. In "
            "an audit, 'train' or 'holdout' uses the mean that is stored with these samples.",
            metavar="MEAN",
            completer=lambda _: ("train", "holdout"),
        ),
    ] = None
    mean_provenance: Annotated[
        Literal["user", "train", "holdout", "release"] | None,
        Parameter(
            help="Source of the mean, if --mean is a number or a file. Results show this text. The "
            "default is 'user'.",
        ),
    ] = None
    sample_count: Annotated[int | None, Parameter(help="Number of training samples.")] = None
    label_balance: Annotated[
        str | None,
        Parameter(
            help="Share of the training samples that have each label, such as 0.5,0.5.",
            metavar="SHARES",
        ),
    ] = None
    init: Annotated[
        str | None,
        Parameter(
            help="File of the initial weights. With the value 'own', the initial weights are read from the "
            "training directory.",
            metavar="FILE",
            completer=lambda _: ("own",),
        ),
    ] = None
    loss: Annotated[
        Literal["logistic", "exponential", "squared", "cross_entropy"] | None,
        Parameter(help="Loss function of the training."),
    ] = None
    weight_decay: Annotated[
        float | None, Parameter(help="Weight decay that the training used.")
    ] = None
    columns: Annotated[
        str | None,
        Parameter(
            help="Types of the columns of a table, counted from 0. Example: 0-2:onehot,3:integer/9, where "
            "columns 0 to 2 are one-hot, and column 3 holds integers that were divided by 9.",
            metavar="FIRST-LAST:TYPE,...",
        ),
    ] = None
    column_ranges: Annotated[
        str | None,
        Parameter(
            help="Smallest and largest value of every column of a table, for attacks on forests: 'train' or "
            "'holdout' (computed from these samples), or a .csv file with a header and two rows.",
            metavar="RANGES",
            completer=lambda _: ("train", "holdout"),
        ),
    ] = None


@Parameter(name="*", group=ATTACKER)
@dataclass(frozen=True)
class FineTuning:
    """Options that name the weights before fine-tuning, an adapter, or an update."""

    base: Annotated[
        str | None,
        Parameter(
            help="File of the weights before fine-tuning. CKPT can be an adapter (LoRA) of these weights.",
            metavar="FILE",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        Parameter(
            help="File of an adapter (LoRA). CKPT then holds the weights before fine-tuning, which the "
            "attacker knows.",
            metavar="FILE",
        ),
    ] = None
    update: Annotated[
        str | None,
        Parameter(
            help="File of an update, as in federated learning: a gradient, or the weights after training "
            "minus the weights before. CKPT or --base is then the network before the update, if it is known.",
            metavar="FILE",
        ),
    ] = None


# Values of the parameters ``output``, ``knowledge_options`` and ``fine_tuning`` if no option was passed.
OUTPUT, KNOWLEDGE_OPTIONS, FINE_TUNING = Output(), KnowledgeOptions(), FineTuning()


def check_device(device: str) -> None:
    """Raise an error if this machine does not have the device. This function imports torch."""
    from residuum.records.rundir import require_device

    require_device(device)
