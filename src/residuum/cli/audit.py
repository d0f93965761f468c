"""``residuum audit``: from a checkpoint to a verdict.

Examples:

residuum audit model.safetensors --data train.npz --holdout test.npz --mean train --value-range 0,1 --out a

residuum audit runs/m --data runs/m --holdout runs/m --budget 10min --fail-on "recovered>=5" --out runs/b

residuum audit weights.pt --model mynet:build --trust-code --data train.npz --holdout test.npz --dry-run

residuum audit --config a/config.toml --out again
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from residuum import plugins
from residuum.cli import options
from residuum.cli.options import Granted, Tuned, option
from residuum.cli.output import (
    columns,
    number,
    print_line,
    print_notes,
    print_table,
    print_wrapped,
    progress,
)
from residuum.errors import InputError
from residuum.settings.presets import PRESETS

if TYPE_CHECKING:
    from residuum.attacks.base import AttackProgress
    from residuum.auditing import AuditResult
    from residuum.auditing.artifacts import AuditSettings
    from residuum.auditing.dryrun import DryRun
    from residuum.io.release import Release
    from residuum.networks.network import Network
    from residuum.records import Dataset, Knowledge

FACTS = (
    *("shape", "value_range", "sample_count", "label_balance", "init", "loss", "weight_decay"),
    "columns",
)
ALREADY_SAID = ("network",)  # before the attacks began
AFTER = {
    "controls": "trying what holds nothing of the network",
    "score": "scoring against the held-out control",
    "permuted": "attacking a permuted target",
    "twin": "training and attacking positive controls",
    "certify": "certifying",
    "exposure": "ranking the samples by their risk",
}


@dataclass(frozen=True)
class Compared:
    """What the network is compared with, and for how long it is attacked."""

    data: str | None = option(
        "Training samples: an .npz, a .csv with a header, a folder of images or a training directory.",
        metavar="DATA",
    )
    holdout: str | None = option(
        "Samples the network never saw, likewise, at least 100; need not be said where DATA holds a "
        "test part.",
        metavar="DATA",
    )
    budget: str | None = option(
        "Time it may take, as 90s, 1m30s or 1h (default: 1min).", metavar="TIME"
    )


@dataclass(frozen=True)
class Asked:
    """Everything else that ``AuditSettings`` holds too, under the same names."""

    preset: str | None = option("Settings of the attack.", choices=PRESETS, place="expert")
    steps: int | None = option("Steps of every restart.", min=1, place="expert")
    seed: int | None = options.SEED_OR_NONE
    subsets: int | None = option("Held-out subsets drawn.", min=200, max=100_000, place="expert")
    device: str | None = options.DEVICE_OR_NONE
    baselines: bool | None = option("Run the baselines beside the attacks.", place="expert")
    vouch: bool | None = option(
        "Your word that network and records were read rightly, where it does not show: for networks "
        "that generalise or were trained privately. It stands in every artifact.",
        None,
        "--vouch",
        place="expert",
    )
    twin: bool | None = option(
        "Train and attack a network known to hold its data; without it the verdict is at best "
        "inconclusive."
    )
    recipe: str | None = option(
        "How the network was trained, for its twin: any of optimiser=sgd,rate=0.01,epochs=100,"
        "batch=50,start=default,frozen=LAYER+LAYER.",
        metavar="KEY=VALUE,...",
        place="expert",
    )
    arch: str | None = options.ARCH
    model: str | None = options.MODEL
    task: str | None = option("What the network was trained for.", choices=options.TASKS)
    shape: str | None = Granted.shape
    value_range: str | None = Granted.value_range
    mean: str | None = option(
        "train or holdout (the mean stored in that file), a number, or a file.",
        metavar="MEAN",
        suggested=("train", "holdout"),
        place="granted",
    )
    mean_provenance: str | None = option(
        "Where a number or file given as --mean is from (default: user).",
        choices=options.PROVENANCES,
        place="granted",
    )
    sample_count: int | None = Granted.sample_count
    label_balance: str | None = Granted.label_balance
    init: str | None = Granted.init
    base: str | None = Tuned.base
    adapter: str | None = Tuned.adapter
    surface: str | None = option(
        "Attack only this: weights, change (from the start), moment (optimiser state), or all.",
        choices=("weights", "change", "moment", "all"),
        place="expert",
    )
    loss: str | None = Granted.loss
    weight_decay: float | None = Granted.weight_decay
    columns: str | None = Granted.columns


def command(
    checkpoint: options.CheckpointPathOrNone = None,
    *,
    out: Path | None = option("Folder to write; an interrupted audit there is continued."),
    compared: Compared,
    fail_on: list[str] | None = option(
        "Exit code 1 when this holds: leak (default), a leak of at least a grade (near-copy, "
        "resembles, class-like), or a comparison of recovered, expected, excess, share or p_value "
        "with a number; repeatable, any of them.",
        metavar="CONDITION",
    ),
    exit_zero: bool = option("Exit code 0 whatever the verdict is.", False, "--exit-zero"),
    asked: Asked,
    config: Path | None = option(
        "A config.toml: repeats that audit; options given here override it.", place="expert"
    ),
    trust_code: bool = options.TRUST_CODE,
    dry_run: bool = option(
        "List all that is in the way, what would be tried, what it costs and which verdicts can be "
        "reached; no attack.",
        False,
        "--dry-run",
    ),
    blur: bool = option("Images of the report are blurred until asked for.", False, "--blur"),
    explain: bool = option(
        "Print every figure too, with what it means, and the words used.", False, "--explain"
    ),
    open_report: bool = option("Open the report in a browser.", False, "--open"),
    no_plugins: bool = options.NO_PLUGINS,  # seen by ``main`` before anything is read
    voice: options.Voice,
) -> None:
    """Attack a checkpoint, score what came back, certify it, and give a verdict."""
    from residuum.auditing.artifacts import AuditSettings, read_settings
    from residuum.auditing.verdict import exit_code, read_condition

    conditions = [read_condition(text) for text in fail_on or ["leak"]]
    given = {"checkpoint": checkpoint and str(checkpoint), **vars(compared), **vars(asked)}
    settings = read_settings(config) if config is not None else AuditSettings()
    settings = settings.model_copy(update={k: v for k, v in given.items() if v is not None})
    if settings.checkpoint is None:
        raise InputError("An audit needs a checkpoint.", "Say residuum audit model.safetensors.")
    trained, base = options.tuned(Path(settings.checkpoint), settings.base, settings.adapter)
    told = {"checkpoint": str(trained), "base": base, "adapter": None}
    settings = settings.model_copy(update=told)
    if dry_run:
        found = _dry_run(settings, trust_code)
        voice.answer(found.to_json(), lambda: _show_dry_run(found))
        raise typer.Exit(found.exit_code)
    if out is None:
        raise InputError("An audit needs a folder to write.", "Say --out runs/a.")
    options.check_device(settings.device or "cpu")
    with _progress(voice.spoken, settings.budget) as (watch, stage):
        say = print_wrapped if voice.spoken else None
        summary, result = audit_into(
            out, settings, watch=watch, stage=stage, say=say, blur=blur, trusted=trust_code
        )
    voice.answer(summary, lambda: show(result, out, explain))
    if open_report:
        import webbrowser

        webbrowser.open((out / "report.html").resolve().as_uri())
    raise typer.Exit(0 if exit_zero else exit_code(result.verdict, conditions))


def show(result: AuditResult, out: Path, explain: bool = False) -> None:
    """The first screen; the last line says where the rest is."""
    print_line(result.screen.text(columns(), ALREADY_SAID))
    print_notes(result.warnings)
    if explain:
        _explain(result)
    else:
        print_line("--explain prints every figure and the words used here.")
    print_line(f"report: {out / 'report.html'}")


def _explain(result: AuditResult) -> None:
    """Every figure of the audit, each with what it means, then the words."""
    from residuum.report.glossary import GLOSSARY, used

    print_line("")
    for reason in result.verdict.reasons:
        print_wrapped(reason, "because ")
    show_applies([vars(row) for row in result.applies])
    rows = []
    for row in result.attacks:
        if row.ran:
            count = f"{row.recovered} ({number(row.expected_by_chance, 2)})"
            p = number(row.p_value if row.adjusted is None else row.adjusted, 2)
            ran = row.name, str(row.restarts), number(row.residual, 2)
            rows.append((*ran, "-" if row.recovered is None else count, row.rule or "-", p))
    heads = ("attack", "restarts", "residual", "recovered\n(chance)", "counts with", "p")
    print_table("attacks: what each brought back by itself", heads, rows)
    if result.controls.rows:
        checked = []
        for one in result.controls.rows:
            count = f"{one.recovered} ({number(one.expected_by_chance, 2)})"
            checked.append((one.name, str(one.candidates), count, number(one.p_value, 2)))
        title = "controls: candidates that hold nothing of the network"
        print_table(title, ("control", "candidates", "recovered\n(chance)", "p"), checked)
    for control in result.checks.twins:
        print_wrapped(control.sentence, "positive control: ", "  ")
    if (found := result.certificate) is not None:
        print_wrapped(
            f"certificate of the {result.certificate_of}: they leave {found.residual_plain:.4g} of the "
            f"weights unexplained, {found.residual_clarke:.4g} where a neuron that switches exactly at a "
            "sample may count as half on",
            rest="  ",
        )
    for title in ("membership", "exposure"):
        beside = getattr(result, title)
        for line in beside.lines if beside else ():
            print_wrapped(line, f"{title}: ", "  ")
    print_notes(result.notes)
    said = " ".join([result.screen.text(), *result.verdict.reasons, "residual restart control"])
    print_line("words:")
    for word in used(said):
        print_wrapped(GLOSSARY[word], f"  {word}: ", "    ")


def show_applies(rows: list[dict[str, Any]]) -> None:
    """The table of what applies: the same words as in the report."""
    cells = [(row["what"], row["status"], row["why"]) for row in rows]
    print_table("what applies, what was tried, and why", ("what", "status", "why"), cells)


def audit_into(
    out: Path,
    settings: AuditSettings,
    *,
    watch: Callable[[str, int, int], Any] | None,
    blur: bool,
    trusted: bool = False,
    stage: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], AuditResult]:
    """Run, resume or show again the audit of ``settings``, files and all, in the folder ``out``."""
    from residuum.auditing import AuditResult, audit
    from residuum.auditing.artifacts import HOW, AuditRun, read_result, write_artifacts
    from residuum.auditing.budget import seconds_of
    from residuum.auditing.inputs import check_fit, scale_notes, suited
    from residuum.auditing.run import attack_config, network_and_records
    from residuum.auditing.twin import Recipe
    from residuum.datasets.given import hash_of
    from residuum.io.release import open_release
    from residuum.records import Knowledge

    assert settings.checkpoint is not None
    path = Path(settings.checkpoint)
    data, files = _samples(settings)
    shown = next((part.shape for part in data.values()), options.shape_of(settings.shape))
    release = open_release(path)
    released, stored = network_and_records(
        release,
        lambda: options.load(release, settings.arch, settings.model, trusted, shown, settings.base),
    )
    hashes = {"checkpoint": release.sha256, **{name: hash_of(f) for name, f in files.items()}}
    for name, digest in settings.sha256.items():
        if hashes.get(name, digest) != digest:
            raise InputError(
                f"The {name} is not the one that this configuration was written for.",
                "Name that file, or remove its line under [sha256].",
            )
    knowledge = Knowledge(shape=options.shape_of(settings.shape))
    if released is not None:
        knowledge = _knowledge(release, released, settings, data)
    how = {name: getattr(settings, name) for name in HOW}
    # What is wrong is refused before a folder is there.
    seconds_of("1min" if how["budget"] is None else how["budget"])
    preset, device = how["preset"] or "residuum", how["device"] or "cpu"
    attack_config(preset, how["steps"], how["seed"] or 0, device)
    if how["recipe"]:
        Recipe.parse(how["recipe"])  # refused now rather than after the attacks
    read = data.get("data"), data.get("holdout")
    if released is not None:
        read = suited(released, *read, knowledge, how["task"] or "auto")
        check_fit(released, *read, how["task"] or "auto")
    scale_notes(*read, knowledge)
    with AuditRun.open(out) as folder:
        request = _request(settings, how, hashes, knowledge)
        folder.claim(request)
        if folder.complete:
            folder.finish()
            found = AuditResult.load(out)
            if say is not None and found.fit is not None:
                say(found.fit.line)
            return read_result(out), found
        result = audit(
            released,
            data=data.get("data"),
            holdout=data.get("holdout"),
            knowledge=knowledge,
            stored=stored,
            hashes=hashes,
            batches=tuple(settings.batches),
            **{name: value for name, value in how.items() if value is not None},
            store=folder,
            watch=watch,
            stage=stage,
            say=say,
        ).replace(subject=path.name)
        named = {"checkpoint": settings.checkpoint, "out": str(out), "options": _granted(settings)}
        named |= {name: str(file) for name, file in files.items()}
        readable = {n: os.fsencode(file).decode("utf-8", "replace") for n, file in named.items()}
        result = result.replace(files=readable)
        if settings.model is not None:
            result = result.replace(settings={**result.settings, "model": settings.model})
        inputs = {"checkpoint": path, **files}
        if settings.base is not None:
            inputs["base"] = Path(settings.base)
        sources = {name: str(file.resolve()) for name, file in inputs.items()}
        summary = write_artifacts(
            folder, result, request=request, sources=sources, file=str(release.path), blur=blur
        )
    return summary, result


def _granted(settings: AuditSettings) -> str:
    """What was granted and said of the network, as options: the next command needs them too."""
    said = []
    for name in (*FACTS, "mean", "mean_provenance", "base", "arch", "model", "task"):
        if (value := getattr(settings, name)) is not None:
            said += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*said, "--trust-code"] if settings.model else said)


def _samples(settings: AuditSettings) -> tuple[dict[str, Dataset], dict[str, Path]]:
    """Training and held-out samples by name, and where each stands; one place may hold both."""
    from residuum.datasets.given import both, place_of

    train, control = both(settings.data, settings.holdout)
    data = {name: one for name, one in (("data", train), ("holdout", control)) if one is not None}
    given = {"data": settings.data, "holdout": settings.holdout or settings.data}
    return data, {name: place_of(given[name] or "", name) for name in data}


def _dry_run(settings: AuditSettings, trusted: bool) -> DryRun:
    """The audit that these settings ask for, without an attack."""
    from residuum.auditing.budget import seconds_of
    from residuum.auditing.dryrun import dry_run
    from residuum.auditing.run import Stored, attack_config, foretold, network_and_records
    from residuum.datasets.given import both
    from residuum.io.release import open_release

    assert settings.checkpoint is not None
    data: dict[str, Dataset] = {}

    def read(name: str) -> Dataset | None:
        own = settings.holdout if name == "holdout" else None
        train, control = both(settings.data if name == "data" or own is None else None, own)
        if (found := train if name == "data" else control) is not None:
            data[name] = found
        return found

    outright: list[Stored] = []
    releases: list[Release] = []

    def network() -> Network | None:
        shown = next((part.shape for part in data.values()), options.shape_of(settings.shape))
        releases.append(open_release(settings.checkpoint or ""))
        released, stored = network_and_records(
            releases[0],
            lambda: options.load(
                releases[0], settings.arch, settings.model, trusted, shown, settings.base
            ),
        )
        outright.extend(filter(None, [stored]))
        return released

    preset, device = settings.preset or "residuum", settings.device or "cpu"
    config = attack_config(preset, settings.steps, settings.seed or 0, device)
    found = dry_run(
        network,
        partial(read, "data"),
        partial(read, "holdout"),
        lambda released: _knowledge(releases[0], released, settings, data),
        config,
        seconds_of("1min" if settings.budget is None else settings.budget),
        task=settings.task or "auto",
        exact=settings.steps is not None,
        baselines=settings.baselines is not False,
        twin=settings.twin is not False,
        vouch=bool(settings.vouch),
    )
    return foretold(found, outright[0]) if outright else found


def _show_dry_run(found: DryRun) -> None:
    print_notes(found.obstacles, "obstacle")
    if found.applies:
        show_applies([vars(row) for row in found.applies])
    print_notes(found.doubts)
    if found.cost:
        print_line(found.cost)
    print_table("how it can end", ("verdict", ""), list(found.verdicts.items()))
    print_line("dry run: nothing was attacked")


def _knowledge(
    release: Release, released: Network, settings: AuditSettings, data: dict[str, Dataset]
) -> Knowledge:
    """What is granted: a file of it, or the options; "train" and "holdout" name a stored mean."""
    facts = {name: getattr(settings, name) for name in FACTS}
    if settings.knowledge is not None:
        if settings.mean is not None or any(value is not None for value in facts.values()):
            raise InputError(
                "A configuration with a file of knowledge grants exactly that.",
                "Remove its line `knowledge`, or the other facts.",
            )
        return _read_knowledge(settings.knowledge)
    facts["base"] = settings.base
    source_of_mean = settings.mean_provenance
    if settings.mean not in ("train", "holdout"):
        facts["mean"] = settings.mean
        return options.grant(release, released, mean_provenance=source_of_mean or "user", **facts)
    if source_of_mean not in (None, settings.mean):
        raise InputError(
            f"--mean {settings.mean} is from {settings.mean}, not from {source_of_mean}.",
            "Leave --mean-provenance out.",
        )
    source = data.get("data" if settings.mean == "train" else "holdout")
    if source is None or source.mean is None:
        raise InputError(
            f"--mean {settings.mean} grants the mean stored in that file; there is none.",
            "Save the mean that was subtracted as array 'mean', or leave --mean out.",
        )
    knowledge = options.grant(release, released, **facts)
    provenance = {**knowledge.provenance, "mean": settings.mean}
    return knowledge.replace(mean=source.mean.double(), provenance=provenance)


def _read_knowledge(path: str) -> Knowledge:
    """A saved Knowledge whose facts are of their own kind, whatever wrote the file."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    from residuum.records import Knowledge

    found = Knowledge.load(path)
    rule = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)
    kinds = get_type_hints(Knowledge)
    for name in found.granted:
        try:
            TypeAdapter(kinds[name], config=rule).validate_python(getattr(found, name))
        except ValidationError as problem:
            raise InputError(
                f"{path!r} must hold what an attacker is granted; its {name} is no such thing.",
                "Take knowledge.safetensors of a finished audit.",
            ) from problem
    options.check_mean(found)
    return found


def _request(
    settings: AuditSettings, how: dict[str, Any], hashes: dict[str, str], knowledge: Knowledge
) -> dict[str, Any]:
    """What decides whether two audits are the same: settings, inputs and knowledge, not paths."""
    from importlib.metadata import version

    from residuum.records.knowledge import TENSORS

    plugged = {one.name: one.version for one in plugins.load()}
    return {
        "version": version("residuum"),
        **({"plugins": plugged} if plugged else {}),
        **how,
        "arch": settings.arch,
        **({} if settings.model is None else {"model": settings.model}),
        **{f"{name}_sha256": digest for name, digest in hashes.items()},
        "batches": [vars(row) for row in settings.batches],
        "knowledge": {
            name: str(getattr(knowledge, name))[:80]
            for name in knowledge.granted
            if name not in TENSORS
        },
        "provenance": dict(knowledge.provenance),
        "knowledge_sha256": knowledge.digest,
    }


@contextmanager
def _progress(visible: bool, budget: str | float | None = None) -> Iterator[tuple[Any, Any]]:
    """A watcher for every batch of an attack, and what to tell of the stages after the attacks."""
    from residuum.auditing.budget import duration, seconds_of

    begun, allowed = time.monotonic(), duration(seconds_of("1min" if budget is None else budget))

    def state(attack: str, done: int, every: int, at: AttackProgress) -> tuple[int, int, str]:
        at_once = len(at.loss)
        which = f"{done + 1}" if at_once == 1 else f"{done + 1}-{done + at_once}"
        spent = duration(time.monotonic() - begun)
        said = f"{attack}  restart {which} of {every}  step {at.step} of {at.steps}"
        return at.step, at.steps, f"{said}  {spent} of {allowed}"

    with ExitStack() as shown:
        watch = shown.enter_context(progress("attacking", state, visible))
        if watch is None:
            yield None, None
            return
        from rich.console import Console

        def stage(name: str) -> None:
            if name not in AFTER:
                return
            shown.close()  # the attacks' bar, or the stage before
            console = Console(stderr=True)
            if console.is_terminal:
                shown.enter_context(console.status(AFTER[name]))
            else:
                sys.stderr.write(f"{AFTER[name]}, {duration(time.monotonic() - begun)}\n")

        yield lambda *batch: partial(watch, *batch), stage
