"""Options that several commands share, and what they amount to: settings of an attack, what is granted.

A group is a class whose fields are options; a command that takes one has them all (``flat``). Nothing
here opens a ``private/`` folder by itself: a file is read when its name is typed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from residuum.cli.output import print_json
from residuum.errors import InputError, did_you_mean, require_known
from residuum.settings import (
    LOSSES,
    PLACES,
    PRIOR_NAMES,
    AttackConfig,
    Setting,
    Settings,
    settings_of,
)
from residuum.settings.presets import GROWTH_PRESETS, PRESETS

PROVENANCES = ("user", "train", "holdout", "release")
HYPHEN = "\N{NON-BREAKING HYPHEN}"
OWN = "own"
ConfigT = TypeVar("ConfigT", bound=Settings)
Several = list[str] | None  # texts of an option that may be repeated


LONG = 60  # of choices between bars, above which they are listed in the help


def option(
    help: str,
    default: Any = None,
    *names: str,
    place: str = "basic",
    choices: Iterable[str] = (),
    suggested: Iterable[str] = (),
    **more: Any,
) -> Any:
    """An option with its help text; names: where it is not called like the parameter.

    place: key of ``PLACES``, the group of the help that it stands in.
    choices: the words that it may be.
    suggested: words that completion offers where others may be said too.
    """
    choices, offered = tuple(choices), tuple(suggested)
    if len("|".join(choices)) > LONG:
        more = {"metavar": "NAME", **more}
        help = f"{help} One of: {', '.join(choices)}."
    if offered:
        more["autocompletion"] = lambda incomplete: [w for w in offered if w.startswith(incomplete)]
    found = typer.Option(default, *names, help=help, rich_help_panel=PLACES[place], **more)
    found.choices = choices
    return found


@dataclass(frozen=True)
class Generated:
    """Marks a command's parameter: options made of a group's settings; the values arrive as a dict.

    Each is None where nobody said it, or its default if that is to be shown.
    """

    group: type[Settings]
    shown: bool = False

    def options(self) -> dict[str, tuple[Any, Any]]:
        """Type and option of every setting that has a place in the help."""
        placed = {n: one for n, one in settings_of(self.group).items() if one.rule.place}
        return {n: (one.kind | None, of_setting(one, self.shown)) for n, one in placed.items()}


def of_setting(one: Setting, shown: bool = False, **changes: Any) -> Any:
    """The option of a setting; its bounds are checked, in its words, once the settings are made."""
    rule, more = one.rule, dict(changes)
    words = [word for word in rule.choices if word]
    more.setdefault("place", rule.place or "expert")
    help = more.pop("help", rule.help)
    default = one.default if shown and one.default not in ("", math.inf) else None
    if not rule.open:
        return option(help, default, choices=words, **more)
    more = {"metavar": "NAME", **more}
    return option(f"{help} Known: {', '.join(words)}.", default, suggested=words, **more)


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: in the place of every group the group's own options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, list[str]]] = {}  # how a group is made, and of which options
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in signature(command).parameters.items():
        kind = hints[name]
        marks = [mark for mark in get_args(kind)[1:] if isinstance(mark, Generated)]
        if marks:
            members = marks[0].options()
            groups[name] = dict, [*members]
        elif dataclasses.is_dataclass(kind):
            kinds = get_type_hints(kind)
            members = {part.name: (kinds[part.name], part.default) for part in fields(kind)}
            groups[name] = kind, [*members]
        else:
            members = {name: (kind, parameter.default)}
        options |= members

    def run(**given: Any) -> None:
        for name, (make, members) in groups.items():
            given[name] = make(**{member: given.pop(member) for member in members})
        command(**given)

    made = []
    for name, (kind, default) in options.items():
        own = {"default": default, "annotation": _narrowed(kind, default)}
        made.append(Parameter(name, Parameter.KEYWORD_ONLY, **own))
    run.__signature__ = Signature(made)  # type: ignore[attr-defined]
    run.__annotations__ = {part.name: part.annotation for part in made}
    run.__doc__ = command.__doc__
    return run


def _narrowed(kind: Any, default: Any) -> Any:
    """The type with an option's choices in the place of any text, so that completion offers them."""
    if not (choices := getattr(default, "choices", ())):
        return kind
    words: Any = Literal[choices]
    return {str: words, str | None: words | None}[kind]


class Grouped(TyperCommand):
    """A command whose help has its options in groups and breaks no name at its hyphens."""

    def get_help(self, ctx: Any) -> str:
        """While lines are made, a sign at which none ends stands for a hyphen."""
        formatter = ctx.make_formatter()
        paragraph, listing = formatter.write_text, formatter.write_dl
        formatter.write_text = lambda text: paragraph(text.replace("-", HYPHEN))
        formatter.write_dl = lambda rows: listing(
            [(name, text.replace("-", HYPHEN)) for name, text in rows]
        )
        self.format_help(ctx, formatter)
        return str(formatter.getvalue()).replace(HYPHEN, "-").rstrip("\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, then every place of ``PLACES``; ``--help`` itself is basic."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {title: [] for title in PLACES.values()}
        for parameter in self.get_params(ctx):
            argument = parameter.param_type_name == "argument"
            title = getattr(parameter, "rich_help_panel", None) or PLACES["basic"]
            if (record := parameter.get_help_record(ctx)) is not None:
                sections["Arguments" if argument else title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_CHECKPOINT = typer.Argument(
    metavar="CKPT",
    help="A .safetensors, .pt or .pth file, or a directory written by `residuum train`.",
)
CheckpointPath = Annotated[Path, _CHECKPOINT]
CheckpointPathOrNone = Annotated[Path | None, _CHECKPOINT]
NO_PLUGINS = option(
    "Leave installed plug-ins alone (or RESIDUUM_NO_PLUGINS=1).",
    False,
    "--no-plugins",
    place="expert",
)
OWN_DATA = option(
    "An .npz with x (as the network receives it) and y, or a training directory (default: that of "
    "CKPT)."
)
ARCH = option(
    "Architecture where it cannot be read off the file, such as convnet:1x28x28-8-16-10,bias=all, "
    "or to confirm the activation: mlp:784-128-10,bias=all,activation=relu.",
    metavar="ARCH",
    place="expert",
)
MODEL = option(
    "Where no --arch can say it: package.module:factory, which makes the network. That code is run: "
    "needs --trust-code.",
    metavar="CODE",
    place="expert",
)
TRUST_CODE = option(
    "The code that --model names may be run.", False, "--trust-code", place="expert"
)
DATASETS = ("digits", "photos", "circle", "sphere", "mnist", "cifar10")
TASKS = ("auto", "binary", "multiclass", "regression")
TASK = option("What the network was trained for (auto: by outputs).", "auto", choices=TASKS)
DEVICE = option("Where it runs.", "cpu", choices=("cpu", "cuda"))
SECONDS = option("Stop after this much wall-clock time.")
# Settings of an attack, for commands that take some of them; None where the preset decides.
_NAMES = ("steps", "dtype", "device", "objective")
STEPS, DTYPE, DEVICE_OR_NONE, OBJECTIVE = (of_setting(settings_of(AttackConfig)[n]) for n in _NAMES)
SEED_OR_NONE = option("Seed of all random numbers.", min=0, max=2**31 - 1)
PRESET = option("Settings that the other options change.", "residuum", choices=PRESETS)
PRIOR = option(
    f"Prior in place of the preset's; repeatable. Of: {', '.join(PRIOR_NAMES)}, or of a plug-in.",
    metavar="NAME:WEIGHT",
    place="expert",
    suggested=[f"{name}:" for name in PRIOR_NAMES],
)
SET = option(
    "Any other setting, such as momentum=0.8; repeatable. An unknown key lists them.",
    None,
    "--set",
    metavar="KEY=VALUE",
    place="expert",
)


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
    """What an auditor may grant the attacker; read by ``attacker_knowledge``."""

    shape: str | None = option("Shape of one sample.", metavar="C,H,W", place="granted")
    value_range: str | None = option(
        "Least and greatest value.", metavar="LOW,HIGH", place="granted"
    )
    mean: str | None = option(
        "A number, an .npy, or an .npz with 'mean'.", metavar="MEAN", place="granted"
    )
    mean_provenance: str = option(
        "Where that mean is from.",
        "user",
        choices=PROVENANCES,
        place="granted",
    )
    sample_count: int | None = option("Number of training samples.", min=1, place="granted")
    label_balance: str | None = option(
        "Share of each label, as 0.5,0.5.", metavar="SHARES", place="granted"
    )
    init: str | None = option(
        "Initial weights; own: those in the training directory.",
        metavar="FILE",
        suggested=(OWN,),
        place="granted",
    )
    loss: str | None = option("The training loss.", choices=LOSSES, place="granted")
    weight_decay: float | None = option("Weight decay of the training.", place="granted")
    columns: str | None = option(
        "Types of a table's columns, counted from 0, as 0-2:onehot,3:integer/9 (divided by 9).",
        metavar="FIRST-LAST:TYPE,...",
        place="granted",
    )


@dataclass(frozen=True)
class Tuned:
    """A network that was fine-tuned, and what it began from; read by ``trained_and_base``."""

    base: str | None = option(
        "The weights before fine-tuning; CKPT may be an adapter (LoRA) of it.",
        metavar="FILE",
        place="granted",
    )
    adapter: str | None = option(
        "An adapter (LoRA) of CKPT, which is then the granted base.",
        metavar="FILE",
        place="granted",
    )


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work; torch is imported for that, and not earlier."""
    from residuum.records.rundir import require_device

    require_device(device)


def configure(
    preset: str, prior: Several, settings: Several, split: str | None = None, **given: Any
) -> AttackConfig:
    """The preset with everything overridden that was said.

    prior: ``NAME:WEIGHT``, replacing the preset's.
    settings: ``KEY=VALUE`` for those that have no option.
    split: a way to grow, laid over the preset before everything else.
    given: values of the other options, None where one was not used.
    """
    changes = dict(GROWTH_PRESETS[split]) if split is not None else {}
    changes |= {name: value for name, value in given.items() if value is not None}
    changes |= (_read_pair(pair, taken=(*given, "priors", "split")) for pair in settings or ())
    if prior:
        changes["priors"] = tuple(map(_prior, prior))
    return made(PRESETS[preset], changes, taken=given)


def made(base: ConfigT, changes: dict[str, Any], taken: Iterable[str]) -> ConfigT:
    """The settings with these changes; a rule that one breaks is said in its option's words."""
    try:
        return base.changed(**changes)
    except InputError as problem:
        name, _, rest = problem.message.partition(" ")
        if name not in taken:
            raise
        raise InputError(f"{_option(name)} {rest}", problem.remedy) from problem


def _read_pair(pair: str, taken: tuple[str, ...]) -> tuple[str, Any]:
    """One ``KEY=VALUE``, as the type that the setting has."""
    known = {name: one for name, one in settings_of(AttackConfig).items() if name not in taken}
    name, equals, text = pair.partition("=")
    name = name.strip().replace("-", "_")
    if name in taken:
        raise InputError(f"--set {name} has an option of its own.", f"Use {_option(name)}.")
    if not equals or name not in known:
        raise InputError(
            f"--set takes KEY=VALUE with a setting of the attack; got {pair[:60]!r}.",
            did_you_mean(name, tuple(known)),
        )
    return name, _typed(f"--set {name}=", text.strip(), known[name])


def _typed(option: str, text: str, one: Setting) -> Any:
    """The text as a value of the setting's type."""
    if one.kind is str:
        return text
    if one.kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{option} is true or false; got {text!r}.", f"Use {option}true.")
        return text.lower() == "true"
    from residuum.io.attacker_knowledge import parse_numbers

    many = one.default if isinstance(one.default, tuple) else (one.default or 0,)
    found = parse_numbers(text, option, ",".join(f"{value:g}" for value in many))
    whole = one.kind is int
    if len(found) != len(many) or (whole and found[0] != int(found[0])):
        kind = f"{'whole ' if whole else ''}number{'' if len(many) == 1 else 's'}"
        raise InputError(f"{option} takes {len(many)} {kind}; got {text!r}.", "Correct it.")
    return found if many is one.default else one.kind(found[0])


def _prior(text: str) -> tuple[str, float]:
    from residuum.attacks import PRIORS
    from residuum.io.attacker_knowledge import parse_numbers

    name, colon, weight = text.partition(":")
    require_known(name, PRIORS, "No prior")
    value = parse_numbers(weight, f"--prior {name}:", "1e-4")[0] if colon else 1.0
    if value < 0:
        raise InputError(f"A prior's weight must not be negative; got {text!r}.", "Correct it.")
    return name, value


def _option(name: str) -> str:
    return "--" + {"priors": "prior"}.get(name, name).replace("_", "-")
