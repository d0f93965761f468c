"""What figures are made of: three sizes, kept work, victims, attacks, one scored run on images, and what
a figure found: rows of published against measured, and all that its picture is drawn from.

Experiments are written down at the paper's size; a scale says what each of their numbers becomes.
Victims and attacks are kept in files named by the hash of everything that decided them.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import residuum as rs
from residuum.attacks import Attack, Auto, StationarityAttack, Unmix, attack_class, make_attack
from residuum.attacks.unmixing.layers import LARGE_INITIALIZATION, TOO_FEW_DIRECTIONS
from residuum.cli.output import attack_progress, training_progress
from residuum.errors import DataError, InputError
from residuum.networks.network import Network
from residuum.records import (
    Dataset,
    Knowledge,
    Reconstruction,
    Record,
    Scores,
    Split,
    make_directory,
)
from residuum.records.base import plain
from residuum.records.inputs import add_mean, read_npz, write_npz
from residuum.records.rundir import digest, write_atomic, write_json
from residuum.theory.kkt import evaluate
from residuum.theory.rows import accuracy
from residuum.training import TrainingConfig, make_release
from residuum.training.methods import LOSSES, choose_loss

RESULT, ARRAYS, PICTURE, TABLE = "result.json", "arrays.npz", "figure.png", "table.md"
COLUMNS = ("published", "corrected", "measured", "chance")
Array = np.ndarray[Any, Any]
SHOWN = 45  # images of a published grid
SUBSETS = 300
TEST_SAMPLES = {"mnist": 10_000, "cifar10": 8_000}  # the balanced test sets of Haim et al. 2022
HIGH_DIGITS = ("5", "6", "7", "8", "9")
OURS = Auto(steps=6000, restarts=2)
UNMIXED = 200  # training samples up to which unmixed images are pooled with the attack's candidates
RELEASED = {  # the released runs of Haim et al. 2022 by dataset; their candidates are pooled
    "cifar10": ("haim2022-cifar-b9dfyspx", "haim2022-cifar-k60fvjdy"),
    "mnist": ("haim2022-mnist-kcf9bhbi", "haim2022-mnist-rbijxft7"),
}
R = TypeVar("R", bound=Record)
Settings = dict[str, Any]
Arms = dict[str, tuple[list[Attack], Settings]]  # pooled attacks, facts granted


@dataclass(frozen=True)
class Scale:
    """samples: training samples by the paper's number; width: share of a hidden layer; training,
    descent: margin steps, and gradient steps at most, with lr times ``rate``; steps: share of an
    attack's steps; restarts: at most.
    """

    name: str
    samples: dict[int, int]
    width: float
    training: int
    descent: int
    rate: float
    steps: float
    restarts: int

    def n(self, paper: int) -> int:
        """Training samples where the paper has so many."""
        return self.samples.get(paper, paper)

    def hidden(self, paper: tuple[int, ...]) -> tuple[int, ...]:
        """Widths where the paper has these."""
        return tuple(max(24, round(self.width * h)) for h in paper)

    def attack_steps(self, paper: int) -> int:
        """Steps of an attack where the paper's has so many."""
        return max(100, round(self.steps * paper))


_TINY = {10: 8, 50: 10, 100: 12, 200: 12, 500: 16, 1000: 24}
_SMALL = {10: 10, 50: 20, 100: 30, 200: 40, 500: 60, 1000: 100}
SCALES = {
    "tiny": Scale("tiny", _TINY, 0.08, 400, 1500, 20.0, 0.1, 2),
    "small": Scale("small", _SMALL, 0.2, 2000, 10_000, 5.0, 0.2, 3),
    "paper": Scale("paper", {}, 1.0, 6000, 100_000, 1.0, 1.0, 16),
}


@dataclass(frozen=True, eq=False)
class Victim(Record):
    """A trained network with its initial weights and how training went."""

    checkpoint: Network
    theta0: dict[str, Tensor]
    summary: dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What a figure is given. cache: folder of kept work; root: folder of MNIST and CIFAR; seed: 0 takes
    the first samples, as the papers do; visible: whether somebody watches.
    """

    scale: Scale
    cache: Path
    device: str = "cpu"
    root: str | None = None
    seed: int = 0
    visible: bool = False

    @property
    def fast(self) -> str:
        """What attacks compute in: TF32 on a GPU, where it was measured to change no count."""
        return "tf32" if self.device.startswith("cuda") else "float32"

    @property
    def bundled(self) -> bool:
        """Whether bundled digits stand for MNIST and CIFAR."""
        return self.scale.name == "tiny" or (self.scale.name == "small" and self.root is None)

    @property
    def suffix(self) -> str:
        """What a figure's folder is called by beside its name: another size or seed is another result."""
        images = "" if self.bundled else "-images"
        scale = "" if self.scale.name == "paper" else f"-{self.scale.name}{images}"
        return scale + (f"-seed{self.seed}" if self.seed else "")

    def split(self, data: str, paper: int, task: str = "binary", seed: int = 0) -> Split:
        """Training and held-out samples of an experiment; bundled digits stand for data not there."""
        n = self.scale.n(paper)
        n = max(10, n - n % 10) if task == "multiclass" else n
        options: Settings = {"seed": seed or self.seed or None, "task": task}
        if self.bundled:
            if data == "cifar10" and task != "multiclass":  # so that two datasets stay two
                options["positive"] = HIGH_DIGITS
            return rs.load_dataset("digits", n, **options)
        options["root"] = self.root
        with suppress(DataError):  # files may hold part of the test set only
            return rs.load_dataset(data, n, holdout=TEST_SAMPLES[data], **options)
        try:
            return rs.load_dataset(data, n, **options)
        except DataError as problem:  # the option is called otherwise here
            remedy = problem.remedy.replace("root= or ", "").replace("root=, ", "")
            raise DataError(problem.message, remedy.replace("--data-root", "--root")) from problem

    def kept(self, cls: type[R], make: Callable[[Path], R], *decided: Any) -> R:
        """The record that ``decided`` leads to, made unless it was before.

        make: gets a path, x.partial, where unfinished work may be kept, there and in x.partial*, so that
            it goes on after an interrupt.
        """
        path = self.cache / cls.__name__.lower() / f"{digest(*decided)[:32]}.safetensors"
        if path.is_file():
            return cls.load(path)
        with alone(path.with_suffix(".lock")):
            if not path.is_file():
                make(path.with_suffix(".partial")).save(path)
                for left in path.parent.glob(f"{path.stem}.partial*"):
                    left.unlink()
        return cls.load(path)

    def train(self, arch: str, data: Dataset, task: str = "binary", **settings: Any) -> Victim:
        """Train on ``data``, or take the network that was trained on just that before."""
        config = TrainingConfig(**{"dtype": "float32", "seed": self.seed, **settings})

        def make(partial: Path) -> Victim:
            start = time.monotonic()
            with training_progress(self.visible) as watch:
                state = rs.train(
                    arch,
                    data,
                    config,
                    task=task,
                    watch=watch,
                    device=self.device,
                    state_path=partial,
                )
            summary = {"arch": arch, "steps": state.step, "status": state.status}
            summary |= {"seconds": time.monotonic() - start, **state.history[-1]}
            return Victim(make_release(state, arch, data, task), state.theta0, summary)

        return self.kept(Victim, make, arch, task, config.to_json(), data.x, data.y)

    def attack(self, target: Network, known: Knowledge, config: Attack) -> Reconstruction:
        """Attack, or take what the same attack brought back before; what is known is not kept."""

        def make(partial: Path) -> Reconstruction:
            there = config.changed(device=self.device)
            with attack_progress(self.visible) as watch:
                found = rs.attack(target, known, there, state_path=partial, watch=watch)
            return found.replace(knowledge=Knowledge())

        return self.kept(Reconstruction, make, *attack_identity(target, known, config))


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time: another that wants the same work waits, and then finds it done."""
    with make_directory(path.parent).joinpath(path.name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def attack_identity(target: Network, known: Knowledge, config: Attack) -> list[Any]:
    """What decides an attack: weights, what is known, settings; not the device.

    Settings are those that the attack chooses where none are said: with other defaults it is another.
    """
    said = config.resolve_settings(target, known).to_json()
    settings = {k: v for k, v in said.items() if k != "device"}
    return [target.arch, known.digest, settings, *target.theta.values()]


def mlp(data: Dataset, hidden: tuple[int, ...], outputs: int = 1, bias: str = "first") -> str:
    """The architecture of a network on these samples."""
    arch = "mlp:" + "-".join(map(str, (data.x[0].numel(), *hidden, outputs)))
    return arch + (f",bias={bias}" if bias != "first" else "")


def first_residual(found: Reconstruction) -> float:
    """Relative residual of the first layer at the end, of the best restart."""
    return float(found.layers[:, -1, 0].sqrt().min()) if found.layers.numel() else float("nan")


def figures_of(checkpoint: Network, data: Dataset, loss: str = "") -> dict[str, float]:
    """Loss and accuracy of a network on labeled samples; regression counts signs."""
    task, outputs = checkpoint.task, outputs_of(checkpoint, data)
    y = data.y.long() if task == "multiclass" else data.y.double().reshape(-1)
    found = float(LOSSES[choose_loss(loss, task)](outputs, y))
    sides = "binary" if task == "regression" else task
    return {"loss": found, "accuracy": accuracy(outputs, y, sides)}


@torch.no_grad()
def outputs_of(checkpoint: Network, data: Dataset) -> Tensor:
    """(n, C) what the network says of samples."""
    return evaluate(checkpoint.copy_module(torch.float64), data.x.double())


@dataclass(frozen=True)
class ImageRun:
    """A victim and its attack at the paper's size.

    training: what differs from training to the margin; box: whether value range and mean are granted;
    initial: whether the initial weights are; metric: what matches are ranked by.
    """

    name: str
    data: str
    n: int
    hidden: tuple[int, ...] = (1000, 1000)
    bias: str = "first"
    task: str = "binary"
    training: Mapping[str, Any] = field(default_factory=dict)
    attack: StationarityAttack = OURS
    box: bool = False
    initial: bool = False
    metric: str = "ssim3"

    def trained(self, context: Context) -> tuple[Split, Victim]:
        """The data and the victim at a scale."""
        split = context.split(self.data, self.n, self.task)
        hidden, outputs = context.scale.hidden(self.hidden), 10 if self.task == "multiclass" else 1
        arch = mlp(split.train, hidden, outputs, self.bias)
        return split, context.train(arch, split.train, self.task, **self.training_at(context.scale))

    def training_at(self, scale: Scale) -> Settings:
        """Settings of the training at a scale."""
        changes = dict(self.training)
        if changes.get("method", "margin") == "margin":
            return {**changes, "steps": scale.training}
        changes["steps"] = min(changes.get("steps", scale.descent), scale.descent)
        changes["lr"] = changes.get("lr", 0.01) * scale.rate
        if "batch" in changes:
            changes["batch"] = max(4, changes["batch"] * scale.n(self.n) // self.n)
        return changes

    def attacks(self, context: Context, name: str) -> list[Attack]:
        """Attacks whose candidates are pooled under residuum, published, model-inversion or weights."""
        scale, n = context.scale, context.scale.n(self.n)
        base: Settings = {"dtype": context.fast, "seed": context.seed, "candidates": 2 * n}
        if name == "residuum":
            if n == self.n and self.attack.candidates:
                base["candidates"] = self.attack.candidates
            base["restarts"] = min(self.attack.restarts, scale.restarts)
            ours = self.attack.changed(steps=scale.attack_steps(self.attack.steps), **base)
            return [ours, Unmix.like(ours)] if n <= UNMIXED else [ours]
        if name == "published":
            base |= {"steps": scale.attack_steps(50_000), "seed": 0}
            return [make_attack(preset=preset, **base) for preset in RELEASED[self.data]]
        base |= {"candidates": max(50, round(1000 * scale.width)), "dtype": "float32"}
        kind = attack_class({"weights": "first-layer-weights"}.get(name, name))
        return [kind(**kind.select_settings(base))]

    def knowledge(self, split: Split, net: Victim) -> Knowledge:
        """What the attacker is granted."""
        value_range, mean = ((0.0, 1.0), split.train.mean) if self.box else (None, None)
        theta0 = net.theta0 if self.initial else None
        return Knowledge(value_range=value_range, mean=mean, theta0=theta0, shape=split.train.shape)

    def perform(self, context: Context, *names: str, arms: Arms | None = None) -> Performed:
        """Train or load, attack by these names or arms, score against the held-out control."""
        split, net = self.trained(context)
        known, done = self.knowledge(split, net), Performed(self, split, net, {})
        arms = arms or {name: (self.attacks(context, name), {}) for name in names or ("residuum",)}
        metrics = tuple(dict.fromkeys(("ncc", "ssim3", self.metric)))
        asked: Settings = {"metrics": metrics, "subsets": SUBSETS}
        asked["outputs"] = outputs_of(net.checkpoint, split.train)
        for name, (configs, granted) in arms.items():
            told = known.replace(**granted)
            found = [context.attack(net.checkpoint, told, configs[0])]
            for config in configs[1:]:
                try:
                    found.append(context.attack(net.checkpoint, told, config))
                except InputError as problem:
                    # The noise of the initialization hides the samples from unmixing. Any other
                    # failure of an attack is a failure of the figure.
                    hidden = (TOO_FEW_DIRECTIONS, LARGE_INITIALIZATION)
                    if not any(reason in problem.message for reason in hidden):
                        raise
            x = torch.cat([one.x for one in found]).double()
            scores = rs.score(x, split.train, split.holdout, **asked)
            seconds = sum(one.seconds for one in found)
            done.arms[name] = Arm(x, scores, seconds, first_residual(found[0]))
        return done


@dataclass(frozen=True)
class Arm:
    """What one attack on a run brought back."""

    x: Tensor
    scores: Scores
    seconds: float
    residual: float


@dataclass(frozen=True)
class Performed:
    """A run at some scale: data, victim, and what every attack brought back."""

    run: ImageRun
    split: Split
    victim: Victim
    arms: dict[str, Arm]

    def details(self) -> dict[str, Any]:
        """Everything a table or a reader may want, as plain values."""
        split, loss = self.split, self.run.training.get("loss", "")
        found: dict[str, Any] = {"data": split.train.name, "metric": self.run.metric}
        found |= {"n": len(split.train), "held_out": len(split.holdout)}
        found |= {"victim": self.victim.summary, "attacks": {}}
        for part, data in (("train", split.train), ("test", split.holdout)):
            values = figures_of(self.victim.checkpoint, data, loss)
            found |= {f"{part}_{what}": value for what, value in values.items()}
        for name, arm in self.arms.items():
            metrics = {metric: one.to_json() for metric, one in arm.scores.metrics.items()}
            found["attacks"][name] = {"candidates": len(arm.x), "seconds": arm.seconds, **metrics}
        return found

    def best(self, name: str = "residuum", count: int = SHOWN) -> dict[str, Any]:
        """Best matches of every sample, best first: found, true, score; images with the mean added."""
        arm, train, metric = self.arms[name], self.split.train, self.run.metric
        sign = -1.0 if arm.scores.metrics[metric].higher_is_better else 1.0
        matches = [(row.index, row.matches[metric]) for row in arm.scores.per_sample]
        known = [(m.nearest, i, m.nearest_candidate) for i, m in matches if m.nearest is not None]
        best = sorted((sign * value, i, candidate) for value, i, candidate in known)
        values, samples, candidates = (list(part) for part in zip(*best[:count], strict=True))
        found = as_bytes(add_mean(arm.x.reshape(-1, *train.shape)[candidates], train.mean))
        true = as_bytes(add_mean(train.x[samples].double(), train.mean))
        return {"found": found, "true": true, "score": sign * np.array(values, dtype=np.float32)}

    def against_output(self, name: str = "residuum") -> dict[str, Any]:
        """Score and network output of every training sample, its margin, whether it was recovered."""
        rows = self.arms[name].scores.per_sample
        score = [row.matches[self.run.metric].nearest for row in rows]  # None becomes NaN
        return {
            "output": outputs_of(self.victim.checkpoint, self.split.train)[:, 0].float().numpy(),
            "score": np.array(score, dtype=np.float32),
            "recovered": np.array([bool(row.recovered) for row in rows]),
            "margin": np.array([row.margin for row in rows], dtype=np.float32),
        }


def as_bytes(images: Tensor) -> Any:
    """Images as bytes, each stretched to its own range as published figures are."""
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    stretched = (flat - low) / (high - low).clamp(min=1e-12)
    return (255 * stretched).round().to(torch.uint8).reshape(images.shape).numpy()


@dataclass
class Outcome:
    """rows: the table; arrays: for the picture; details: settings and victims; notes: what to know."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(
        self, what: str, measured: Any, published: Any = None, chance: Any = None, **more: Any
    ) -> None:
        """One more quantity. published: as printed; chance: the same where nothing was learnt (held-out
        samples, another seed, a rotation); more: corrected (what the mathematics says where that
        differs from print) and note.
        """
        row = {"what": what, "measured": measured, "published": published, "chance": chance}
        self.rows.append({**row, "corrected": None, "note": "", **more})

    def recovered(self, name: str, scores: Scores, note: str = "") -> None:
        """How many samples an attack brought back, and how many it would by chance."""
        ncc = scores.metrics["ncc"]
        parts = (f"of {scores.n}", ncc.rule, f"p {ncc.p_value:.2g}" if ncc.p_value else "", note)
        what, note = f"{name}: recovered (NCC beyond 99% of chance)", "; ".join(filter(None, parts))
        self.row(what, ncc.recovered, None, ncc.expected_by_chance, note=note)

    def keep(self, name: str, arrays: dict[str, Array]) -> None:
        """Arrays of one part of the figure, under its name."""
        self.arrays |= {f"{name}/{key}": value for key, value in arrays.items()}

    def column(self, name: str) -> dict[str, Any]:
        """The values of one column by what they are of."""
        return {row["what"]: row[name] for row in self.rows if row[name] is not None}


@dataclass(frozen=True)
class Figure:
    """title: one line; draw: None for a table, which is written as text alone."""

    title: str
    compute: Callable[[Context], Outcome]
    draw: Callable[[Outcome], bytes] | None = None


def save(outcome: Outcome, folder: Path, head: dict[str, Any]) -> None:
    """Write result.json, table.md and arrays.npz; head: what the run knows about itself."""
    columns = {name: outcome.column(name) for name in COLUMNS}
    found = columns["measured"].get("recovered")
    top = {} if found is None else {"recovered": found}
    rest = {"rows": outcome.rows, "details": outcome.details, "notes": outcome.notes}
    write_npz(folder / ARRAYS, outcome.arrays)
    write_atomic(folder / TABLE, table(outcome, head["title"]))
    write_json(folder / RESULT, plain({**head, **columns, **top, **rest}))


def load(folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """What :func:`save` wrote, to draw it again."""
    try:
        summary = json.loads((folder / RESULT).read_text())
        rows, details, notes = (summary[name] for name in ("rows", "details", "notes"))
    except (OSError, ValueError, LookupError) as problem:
        raise InputError(
            f"{str(folder)!r} holds no finished figure ({type(problem).__name__}).",
            "Run it without --draw-only first, or give the --scale, --seed and --root that it had.",
        ) from problem
    return Outcome(rows, read_npz(folder / ARRAYS), details, notes), summary


def table(outcome: Outcome, title: str) -> str:
    """The rows as a Markdown table; columns that nobody fills are left out."""
    names = [*COLUMNS, "note"]
    filled = [name for name in names if any(row[name] not in (None, "") for row in outcome.rows)]
    lines = [["what", *filled], ["---"] * (1 + len(filled))]
    lines += [[row["what"], *(_shown(row[name]) for name in filled)] for row in outcome.rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"# {title}\n\n{text}\n" + "".join(f"\n- {note}" for note in outcome.notes) + "\n"


def _shown(value: Any) -> str:
    """A value for a person."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
