"""Shared tools of the reproductions: scales, cached victims and attacks, scored runs, and outcomes.

Experiments are defined at the size of the paper, and a ``Scale`` translates each number. Trained victims and
attacks are cached in files that are named by the hash of all their inputs. An ``Outcome`` holds the rows of
measured and published numbers, and the arrays that the picture of a figure is drawn from.
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
GRID_IMAGES = 45  # number of images in a published grid
SUBSETS = (
    300  # number of random subsets of the held-out set from which the chance level is estimated
)
TEST_SAMPLES = {"mnist": 10_000, "cifar10": 8_000}  # the balanced test sets of Haim et al. 2022
HIGH_DIGITS = ("5", "6", "7", "8", "9")
OURS = Auto(steps=6000, restarts=2)
# The candidates of unmixing are added to those of the attack up to this number of training samples.
MAX_UNMIX_SAMPLES = 200
RELEASED = {  # presets of the released runs of Haim et al. 2022 by dataset; their candidates are combined
    "cifar10": ("haim2022-cifar-b9dfyspx", "haim2022-cifar-k60fvjdy"),
    "mnist": ("haim2022-mnist-kcf9bhbi", "haim2022-mnist-rbijxft7"),
}
R = TypeVar("R", bound=Record)
Settings = dict[str, Any]
Arms = dict[
    str, tuple[list[Attack], Settings]
]  # attacks whose candidates are combined, and additional attacker knowledge


@dataclass(frozen=True)
class Scale:
    """Translation of the numbers of a paper to a smaller size.

    Attributes:
        name: name of the scale.
        samples: number of training samples by the number in the paper.
        width: factor of the widths of hidden layers.
        training: number of steps of training to the maximum margin.
        descent: maximum number of steps of gradient descent.
        rate: factor of the learning rate of gradient descent.
        steps: factor of the number of steps of an attack.
        restarts: maximum number of restarts of an attack.
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
        """Return the number of training samples for the number in the paper."""
        return self.samples.get(paper, paper)

    def hidden(self, paper: tuple[int, ...]) -> tuple[int, ...]:
        """Return the widths of the hidden layers for the widths in the paper."""
        return tuple(max(24, round(self.width * h)) for h in paper)

    def attack_steps(self, paper: int) -> int:
        """Return the number of steps of an attack for the number in the paper."""
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
    """A trained network with its initial weights and a summary of the training."""

    checkpoint: Network
    theta0: dict[str, Tensor]
    summary: dict[str, Any]


@dataclass(frozen=True)
class Context:
    """Scale, folders, device and seed of the run of a figure.

    Attributes:
        scale: scale of the experiments.
        cache: folder of cached victims and attacks.
        device: device of training and attacks.
        root: folder of MNIST and CIFAR.
        seed: seed of the choice of samples. Seed 0 takes the first samples, as the papers do.
        visible: whether progress is displayed.
    """

    scale: Scale
    cache: Path
    device: str = "cpu"
    root: str | None = None
    seed: int = 0
    visible: bool = False

    @property
    def fast(self) -> str:
        """Data type of attacks: TF32 on a GPU, where we measured that it changes no count."""
        return "tf32" if self.device.startswith("cuda") else "float32"

    @property
    def bundled(self) -> bool:
        """Whether bundled digits replace MNIST and CIFAR."""
        return self.scale.name == "tiny" or (self.scale.name == "small" and self.root is None)

    @property
    def suffix(self) -> str:
        """Suffix of the folder of a figure, which names its scale and seed."""
        images = "" if self.bundled else "-images"
        scale = "" if self.scale.name == "paper" else f"-{self.scale.name}{images}"
        return scale + (f"-seed{self.seed}" if self.seed else "")

    def split(self, data: str, paper: int, task: str = "binary", seed: int = 0) -> Split:
        """Load training and held-out samples. Bundled digits replace missing data.

        Args:
            data: mnist or cifar10.
            paper: number of training samples in the paper.
            task: binary, multiclass or regression.
            seed: seed of the choice of samples, 0 for the seed of the run.

        Returns:
            The training and held-out samples.

        Raises:
            DataError: if the data cannot be loaded.
        """
        n = self.scale.n(paper)
        n = max(10, n - n % 10) if task == "multiclass" else n
        options: Settings = {"seed": seed or self.seed or None, "task": task}
        if self.bundled:
            if (
                data == "cifar10" and task != "multiclass"
            ):  # so that the replacement of CIFAR differs from that of MNIST
                options["positive"] = HIGH_DIGITS
            return rs.load_dataset("digits", n, **options)
        options["root"] = self.root
        with suppress(DataError):  # fails if the files hold only a part of the test set
            return rs.load_dataset(data, n, holdout=TEST_SAMPLES[data], **options)
        try:
            return rs.load_dataset(data, n, **options)
        except DataError as problem:  # this program calls the option --root
            remedy = problem.remedy.replace("root= or ", "").replace("root=, ", "")
            raise DataError(problem.message, remedy.replace("--data-root", "--root")) from problem

    def load_or_make(self, cls: type[R], make: Callable[[Path], R], *decided: Any) -> R:
        """Load a record from the cache, or make and save it.

        Args:
            cls: class of the record.
            make: function that makes the record. It receives a path x.partial. Unfinished work may be
                saved in files x.partial*, so that it resumes after an interrupt.
            *decided: all inputs that determine the record.

        Returns:
            The record.
        """
        path = self.cache / cls.__name__.lower() / f"{digest(*decided)[:32]}.safetensors"
        if path.is_file():
            return cls.load(path)
        with lock_file(path.with_suffix(".lock")):
            if not path.is_file():
                make(path.with_suffix(".partial")).save(path)
                for partial_path in path.parent.glob(f"{path.stem}.partial*"):
                    partial_path.unlink()
        return cls.load(path)

    def train(self, arch: str, data: Dataset, task: str = "binary", **settings: Any) -> Victim:
        """Train a network, or load it from the cache.

        Args:
            arch: architecture.
            data: training samples.
            task: binary, multiclass or regression.
            **settings: settings of the training.

        Returns:
            The victim.
        """
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

        return self.load_or_make(Victim, make, arch, task, config.to_json(), data.x, data.y)

    def attack(self, target: Network, knowledge: Knowledge, config: Attack) -> Reconstruction:
        """Attack a network, or load the result from the cache. The cache omits the attacker knowledge.

        Args:
            target: network that is attacked.
            knowledge: attacker knowledge.
            config: settings of the attack.

        Returns:
            The reconstruction.
        """

        def make(partial: Path) -> Reconstruction:
            device_config = config.changed(device=self.device)
            with attack_progress(self.visible) as watch:
                reconstruction = rs.attack(
                    target, knowledge, device_config, state_path=partial, watch=watch
                )
            return reconstruction.replace(knowledge=Knowledge())

        return self.load_or_make(Reconstruction, make, *attack_identity(target, knowledge, config))


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock file. Other processes that want the same record wait until it is in the cache."""
    with make_directory(path.parent).joinpath(path.name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)


def attack_identity(target: Network, knowledge: Knowledge, config: Attack) -> list[Any]:
    """Return all inputs that determine the result of an attack. The device is not one of them.

    Settings include the defaults that the attack chooses. If a default changes, the identity changes.

    Args:
        target: network that is attacked.
        knowledge: attacker knowledge.
        config: settings of the attack.

    Returns:
        Architecture, digest of the knowledge, settings and weights.
    """
    all_settings = config.resolve_settings(target, knowledge).to_json()
    settings = {k: v for k, v in all_settings.items() if k != "device"}
    return [target.arch, knowledge.digest, settings, *target.theta.values()]


def mlp(data: Dataset, hidden: tuple[int, ...], outputs: int = 1, bias: str = "first") -> str:
    """Return the architecture of an MLP for samples of this shape.

    Args:
        data: samples.
        hidden: widths of the hidden layers.
        outputs: number of outputs.
        bias: layers with biases.

    Returns:
        The architecture as text.
    """
    arch = "mlp:" + "-".join(map(str, (data.x[0].numel(), *hidden, outputs)))
    return arch + (f",bias={bias}" if bias != "first" else "")


def first_residual(reconstruction: Reconstruction) -> float:
    """Return the final relative residual of the first layer in the best restart."""
    return (
        float(reconstruction.layers[:, -1, 0].sqrt().min())
        if reconstruction.layers.numel()
        else float("nan")
    )


def measure_loss_and_accuracy(
    checkpoint: Network, data: Dataset, loss: str = ""
) -> dict[str, float]:
    """Measure loss and accuracy of a network on labeled samples. For regression, signs are compared.

    Args:
        checkpoint: the network.
        data: labeled samples.
        loss: name of the loss, or "" for the default of the task.

    Returns:
        The loss and the accuracy by name.
    """
    task, outputs = checkpoint.task, compute_outputs(checkpoint, data)
    y = data.y.long() if task == "multiclass" else data.y.double().reshape(-1)
    value = float(LOSSES[choose_loss(loss, task)](outputs, y))
    sides = "binary" if task == "regression" else task
    return {"loss": value, "accuracy": accuracy(outputs, y, sides)}


@torch.no_grad()
def compute_outputs(checkpoint: Network, data: Dataset) -> Tensor:
    """Compute the outputs of a network.

    Args:
        checkpoint: network with C outputs.
        data: the n samples.

    Returns:
        (n, C) outputs.
    """
    return evaluate(checkpoint.copy_module(torch.float64), data.x.double())


@dataclass(frozen=True)
class ImageRun:
    """A victim and its attack at the size of the paper.

    Attributes:
        name: name of the run.
        data: name of the dataset.
        n: number of training samples.
        hidden: widths of the hidden layers.
        bias: layers with biases.
        task: binary, multiclass or regression.
        training: settings that differ from training to the maximum margin.
        attack: settings of the attack.
        box: whether the attacker knows the value range and the mean.
        initial: whether the attacker knows the initial weights.
        metric: metric that ranks the matches.
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
        """Load the data and train the victim at the scale of the run."""
        split = context.split(self.data, self.n, self.task)
        hidden, outputs = context.scale.hidden(self.hidden), 10 if self.task == "multiclass" else 1
        arch = mlp(split.train, hidden, outputs, self.bias)
        return split, context.train(arch, split.train, self.task, **self.training_at(context.scale))

    def training_at(self, scale: Scale) -> Settings:
        """Return the settings of the training at a scale."""
        changes = dict(self.training)
        if changes.get("method", "margin") == "margin":
            return {**changes, "steps": scale.training}
        changes["steps"] = min(changes.get("steps", scale.descent), scale.descent)
        changes["lr"] = changes.get("lr", 0.01) * scale.rate
        if "batch" in changes:
            changes["batch"] = max(4, changes["batch"] * scale.n(self.n) // self.n)
        return changes

    def attacks(self, context: Context, name: str) -> list[Attack]:
        """Return the attacks whose candidates are combined under a name.

        Args:
            context: scale and seed of the run.
            name: residuum, published, model-inversion or weights.

        Returns:
            The attacks.
        """
        scale, n = context.scale, context.scale.n(self.n)
        base: Settings = {"dtype": context.fast, "seed": context.seed, "candidates": 2 * n}
        if name == "residuum":
            if n == self.n and self.attack.candidates:
                base["candidates"] = self.attack.candidates
            base["restarts"] = min(self.attack.restarts, scale.restarts)
            ours = self.attack.changed(steps=scale.attack_steps(self.attack.steps), **base)
            return [ours, Unmix.like(ours)] if n <= MAX_UNMIX_SAMPLES else [ours]
        if name == "published":
            base |= {"steps": scale.attack_steps(50_000), "seed": 0}
            return [make_attack(preset=preset, **base) for preset in RELEASED[self.data]]
        base |= {"candidates": max(50, round(1000 * scale.width)), "dtype": "float32"}
        kind = attack_class({"weights": "first-layer-weights"}.get(name, name))
        return [kind(**kind.select_settings(base))]

    def knowledge(self, split: Split, net: Victim) -> Knowledge:
        """Return the attacker knowledge of this run.

        Args:
            split: training and held-out samples.
            net: the victim.

        Returns:
            The attacker knowledge.
        """
        value_range, mean = ((0.0, 1.0), split.train.mean) if self.box else (None, None)
        theta0 = net.theta0 if self.initial else None
        return Knowledge(value_range=value_range, mean=mean, theta0=theta0, shape=split.train.shape)

    def perform(self, context: Context, *names: str, arms: Arms | None = None) -> Performed:
        """Train the victim, attack it, and score the reconstructions against held-out samples.

        Args:
            context: scale, device and cache of the run.
            *names: names of attacks, see :meth:`attacks`.
            arms: attacks and additional attacker knowledge by name, instead of ``names``.

        Returns:
            Data, victim and results of every attack.

        Raises:
            InputError: if an attack fails for any reason except too little signal for unmixing.
        """
        split, net = self.trained(context)
        knowledge, done = self.knowledge(split, net), Performed(self, split, net, {})
        arms = arms or {name: (self.attacks(context, name), {}) for name in names or ("residuum",)}
        metrics = tuple(dict.fromkeys(("ncc", "ssim3", self.metric)))
        score_options: Settings = {"metrics": metrics, "subsets": SUBSETS}
        score_options["outputs"] = compute_outputs(net.checkpoint, split.train)
        for name, (configs, extra_knowledge) in arms.items():
            attack_knowledge = knowledge.replace(**extra_knowledge)
            reconstructions = [context.attack(net.checkpoint, attack_knowledge, configs[0])]
            for config in configs[1:]:
                try:
                    reconstructions.append(context.attack(net.checkpoint, attack_knowledge, config))
                except InputError as problem:
                    # Unmixing may fail because the noise of the initialization hides the samples. If an
                    # attack fails for another reason, the figure fails.
                    accepted_reasons = (TOO_FEW_DIRECTIONS, LARGE_INITIALIZATION)
                    if not any(reason in problem.message for reason in accepted_reasons):
                        raise
            x = torch.cat([reconstruction.x for reconstruction in reconstructions]).double()
            scores = rs.score(x, split.train, split.holdout, **score_options)
            seconds = sum(reconstruction.seconds for reconstruction in reconstructions)
            done.arms[name] = Arm(x, scores, seconds, first_residual(reconstructions[0]))
        return done


@dataclass(frozen=True)
class Arm:
    """Combined candidates of the attacks of an arm, with scores, run time and final residual."""

    x: Tensor
    scores: Scores
    seconds: float
    residual: float


@dataclass(frozen=True)
class Performed:
    """A finished run: data, victim, and the result of every arm."""

    run: ImageRun
    split: Split
    victim: Victim
    arms: dict[str, Arm]

    def details(self) -> dict[str, Any]:
        """Return data, training summary, accuracies and scores of the run as JSON values."""
        split, loss = self.split, self.run.training.get("loss", "")
        details: dict[str, Any] = {"data": split.train.name, "metric": self.run.metric}
        details |= {"n": len(split.train), "held_out": len(split.holdout)}
        details |= {"victim": self.victim.summary, "attacks": {}}
        for split_name, data in (("train", split.train), ("test", split.holdout)):
            values = measure_loss_and_accuracy(self.victim.checkpoint, data, loss)
            details |= {f"{split_name}_{what}": value for what, value in values.items()}
        for name, arm in self.arms.items():
            metrics = {
                metric: metric_scores.to_json()
                for metric, metric_scores in arm.scores.metrics.items()
            }
            details["attacks"][name] = {"candidates": len(arm.x), "seconds": arm.seconds, **metrics}
        return details

    def best(self, name: str = "residuum", count: int = GRID_IMAGES) -> dict[str, Any]:
        """Return the best match of each sample, best samples first.

        Args:
            name: name of the arm.
            count: maximum number of samples.

        Returns:
            Reconstructed images ("found"), true images ("true") and scores. The mean is added to images.
        """
        arm, train, metric = self.arms[name], self.split.train, self.run.metric
        sign = -1.0 if arm.scores.metrics[metric].higher_is_better else 1.0
        matches = [(row.index, row.matches[metric]) for row in arm.scores.per_sample]
        matched = [(m.nearest, i, m.nearest_candidate) for i, m in matches if m.nearest is not None]
        best = sorted((sign * value, i, candidate) for value, i, candidate in matched)
        values, samples, candidates = (list(column) for column in zip(*best[:count], strict=True))
        reconstructed = as_bytes(add_mean(arm.x.reshape(-1, *train.shape)[candidates], train.mean))
        true = as_bytes(add_mean(train.x[samples].double(), train.mean))
        return {
            "found": reconstructed,
            "true": true,
            "score": sign * np.array(values, dtype=np.float32),
        }

    def against_output(self, name: str = "residuum") -> dict[str, Any]:
        """Return score, network output, margin and whether it was recovered, for each training sample."""
        rows = self.arms[name].scores.per_sample
        score = [row.matches[self.run.metric].nearest for row in rows]  # None becomes NaN
        return {
            "output": compute_outputs(self.victim.checkpoint, self.split.train)[:, 0]
            .float()
            .numpy(),
            "score": np.array(score, dtype=np.float32),
            "recovered": np.array([bool(row.recovered) for row in rows]),
            "margin": np.array([row.margin for row in rows], dtype=np.float32),
        }


def as_bytes(images: Tensor) -> Any:
    """Return images as bytes. Each image is stretched to its own range, as in the published figures."""
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    stretched = (flat - low) / (high - low).clamp(min=1e-12)
    return (255 * stretched).round().to(torch.uint8).reshape(images.shape).numpy()


@dataclass
class Outcome:
    """Results of a figure.

    Attributes:
        rows: rows of the table.
        arrays: arrays that the picture is drawn from.
        details: settings, victims and further results.
        notes: remarks for the reader of the table.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(
        self, what: str, measured: Any, published: Any = None, chance: Any = None, **more: Any
    ) -> None:
        """Add a quantity to the table.

        Args:
            what: name of the quantity.
            measured: measured value.
            published: value printed in the paper.
            chance: the same quantity for data that the network did not learn (held-out samples, another
                seed, a rotation).
            **more: ``corrected`` (the correct value if the printed one is wrong) and ``note``.
        """
        row = {"what": what, "measured": measured, "published": published, "chance": chance}
        self.rows.append({**row, "corrected": None, "note": "", **more})

    def recovered(self, name: str, scores: Scores, note: str = "") -> None:
        """Add the number of recovered samples and the number expected by chance to the table.

        Args:
            name: name of the attack.
            scores: scores of its candidates.
            note: remark for the reader of the table.
        """
        ncc = scores.metrics["ncc"]
        note_parts = (
            f"of {scores.n}",
            ncc.rule,
            f"p {ncc.p_value:.2g}" if ncc.p_value else "",
            note,
        )
        what, note = (
            f"{name}: recovered (NCC beyond 99% of chance)",
            "; ".join(filter(None, note_parts)),
        )
        self.row(what, ncc.recovered, None, ncc.expected_by_chance, note=note)

    def keep(self, name: str, arrays: dict[str, Array]) -> None:
        """Store arrays of a part of the figure.

        Args:
            name: name of the part, which becomes a prefix of the keys.
            arrays: arrays by key.
        """
        self.arrays |= {f"{name}/{key}": value for key, value in arrays.items()}

    def column(self, name: str) -> dict[str, Any]:
        """Return the values of a column by the names of the quantities."""
        return {row["what"]: row[name] for row in self.rows if row[name] is not None}


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper.

    Attributes:
        title: title on one line.
        compute: function that computes the outcome.
        draw: function that draws the picture, or None for a table.
    """

    title: str
    compute: Callable[[Context], Outcome]
    draw: Callable[[Outcome], bytes] | None = None


def save(outcome: Outcome, folder: Path, head: dict[str, Any]) -> None:
    """Write result.json, table.md and arrays.npz.

    Args:
        outcome: results of the figure.
        folder: folder of the files.
        head: title, settings and versions of the run.
    """
    columns = {name: outcome.column(name) for name in COLUMNS}
    recovered = columns["measured"].get("recovered")
    top = {} if recovered is None else {"recovered": recovered}
    tables = {"rows": outcome.rows, "details": outcome.details, "notes": outcome.notes}
    write_npz(folder / ARRAYS, outcome.arrays)
    write_atomic(folder / TABLE, table(outcome, head["title"]))
    write_json(folder / RESULT, plain({**head, **columns, **top, **tables}))


def load(folder: Path) -> tuple[Outcome, dict[str, Any]]:
    """Load the files that :func:`save` wrote.

    Args:
        folder: folder of the files.

    Returns:
        The outcome and the content of result.json.

    Raises:
        InputError: if the folder does not contain a finished figure.
    """
    try:
        summary = json.loads((folder / RESULT).read_text())
        rows, details, notes = (summary[name] for name in ("rows", "details", "notes"))
    except (OSError, ValueError, LookupError) as problem:
        raise InputError(
            f"The folder of a figure must contain its results; {str(folder)!r} holds no finished figure "
            f"({type(problem).__name__}).",
            "Run without --draw-only first, or pass the same --scale, --seed and --root as that run.",
        ) from problem
    return Outcome(rows, read_npz(folder / ARRAYS), details, notes), summary


def table(outcome: Outcome, title: str) -> str:
    """Return the rows as a Markdown table without empty columns.

    Args:
        outcome: results of the figure.
        title: title of the table.

    Returns:
        The text of the table.
    """
    names = [*COLUMNS, "note"]
    filled = [name for name in names if any(row[name] not in (None, "") for row in outcome.rows)]
    lines = [["what", *filled], ["---"] * (1 + len(filled))]
    lines += [[row["what"], *(_format_value(row[name]) for name in filled)] for row in outcome.rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"# {title}\n\n{text}\n" + "".join(f"\n- {note}" for note in outcome.notes) + "\n"


def _format_value(value: Any) -> str:
    """Return a value as text for a table."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_value, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
