"""Would this audit have seen it? A network of the same make, known to hold its data, attacked likewise.

The twin has the audited architecture and is trained on as many held-out samples, taken out of the pool,
in the way that was granted (``--recipe``) or can be seen: its start (granted; else small or default, by
the spectrum of the first layer), the layers that moved, the training loss that was reached. Then it is
attacked by the same attacks with the same settings, fewer restarts, and judged by the same rule over all
of them. An audit that brings nothing back from it says nothing by finding nothing elsewhere.

Twins are kept between audits: training and attacking one again would give the same answer.
``$RESIDUUM_CACHE`` names the folder, else ``$XDG_CACHE_HOME/residuum``, else ``~/.cache/residuum``; set
and empty it turns this off. A twin's weights hold the held-out samples it was trained on, so folder and
files are for their owner alone, and a folder that others may write to is not used. An entry is a record
(safetensors and JSON, no pickle) whose name ends in its own hash: one that was changed or cut off is
removed and made anew. The oldest go when there are too many. A cache that fails is no reason for an
audit to fail: then there is none.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks import every_attack
from residuum.attacks.contract import stream
from residuum.auditing.budget import PARTS, TWIN_SHARE, UNBOUNDED, Allowance, Batch
from residuum.auditing.controls import Claim, sample_losses
from residuum.auditing.stages import Attacked, AttackStage, findings, run_tests
from residuum.auditing.verdict import HURRIED, Twin
from residuum.checkpoints import Inspection, build_model
from residuum.checkpoints.surfaces import weights
from residuum.errors import InputError, ResiduumError, require_known
from residuum.evaluation.matching import as_array, discrete
from residuum.evaluation.null import SUBSETS, draw_sets
from residuum.evaluation.scoring import CandidatePool, whole_pool
from residuum.networks import Architecture
from residuum.records import Checkpoint, Dataset, Knowledge, Record
from residuum.records.rundir import digest, sha256
from residuum.stationarity import by_layer, parameters
from residuum.theory.rows import choose_task, normalise_labels
from residuum.training import TrainingConfig, initialise, train
from residuum.training.methods import LOSSES, choose_loss

SPARE = 100  # held-out samples beyond twice the training set that a twin needs to be judged
STEPS = 5000  # of training, where no recipe says
RATE, FASTER, SLOWER = 0.1, 1.05, 0.5  # of descent that keeps its loss falling
ENOUGH = 0.75  # of what attacking a twin should take: with less left it is not begun
SAME_STEPS = 1.1  # of the steps of two audits that count as alike
OPTIMISERS, STARTS = ("margin", "gd", "sgd", "adam"), ("small", "default", "lecun", "granted")
TRAINING, JUDGING = 1 / 4, 1 / 4  # of what is left for a twin, at most to train and to judge it
VARIABLE = "RESIDUUM_CACHE"
MOST_FILES, MOST_BYTES = 64, 256 << 20  # of twins kept: nobody should notice them on a disk
HASHED = 32  # characters of an entry's hash in its name
Kept = TypeVar("Kept", bound=Record)


@dataclass(frozen=True)
class Recipe:
    """How the audited network was trained, as far as somebody says; "" and 0: as can be seen.

    optimiser: margin and gd take the whole set at every step, with a step size that keeps the loss
        falling unless a rate is given.
    frozen: layers that kept their start.
    """

    optimiser: str = ""
    rate: float = 0.0
    epochs: int = 0
    batch: int = 0
    start: str = ""
    frozen: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """``optimiser=sgd,rate=0.01,epochs=100,batch=50,start=default,frozen=0+2``, any part of it."""
        kinds = {"optimiser": str, "rate": float, "epochs": int, "batch": int}
        kinds |= {"start": str, "frozen": str}
        values: dict[str, object] = {}
        for part in filter(None, (one.strip() for one in text.split(","))):
            name, _, value = part.partition("=")
            require_known(name[:40], kinds, "A recipe has no")
            try:
                values[name] = kinds[name](value)
            except ValueError as problem:
                raise InputError(
                    f"{name} of a recipe must be a number; got {value[:40]!r}.",
                    "Say --recipe optimiser=sgd,rate=0.01,epochs=100,batch=50.",
                ) from problem
        for name, known in (("optimiser", OPTIMISERS), ("start", STARTS)):
            require_known(str(values.get(name, known[0])), known, f"A recipe knows no {name}")
        numbers = [float(str(values.get(name, 0))) for name in ("rate", "epochs", "batch")]
        if not all(0 <= value < 1e9 for value in numbers):
            rule = "Numbers of a recipe are not negative."
            raise InputError(rule, "Leave out what is not known.")
        values["frozen"] = tuple(filter(None, str(values.get("frozen", "")).split("+")))
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class TwinNetwork(Record):
    """A trained twin: its weights, its start, the loss it reached, and how it was made in words."""

    theta: dict[str, Tensor]
    start: dict[str, Tensor]
    loss: float
    how: str


def audit_twin(
    stage: AttackStage,
    claim: Claim,
    inspection: Inspection,
    attacked: Attacked,
    recipe: str = "",
    allowance: Allowance = UNBOUNDED,
) -> Twin:
    """Train the twin of an audited network and attack it as that was, within ``allowance``.

    Found again where the same was asked before: see ``kept``.
    """
    assert claim.pool is not None
    train, pool, theta = claim.train, claim.pool, stage.checkpoint.theta
    told = [version("residuum"), torch.__version__, stage.checkpoint.arch, len(train), recipe]
    told += [stage.seconds, SUBSETS, stage.config.to_json(), sorted(theta)]
    told += [[part.attack for part in attacked.found]]
    hashed = [str(told), stage.knowledge.digest]
    key = digest(hashed, train.x, train.y, pool.x, pool.y, *theta.values())
    known = stage.checkpoint.module is None  # of somebody's own code no key knows what it does
    if known and (before := recall(Twin, key)) is not None and _no_harder(before, attacked.batches):
        return before
    if allowance.left <= ENOUGH * _expected(attacked):
        return Twin(reason=HURRIED)
    start = time.monotonic()
    try:
        found = _audited(stage, claim, inspection, attacked, Recipe.parse(recipe), allowance)
    except (ResiduumError, RuntimeError) as problem:  # somebody's own network need not train
        found = Twin(reason=str(problem).splitlines()[0][:200])
    found = replace(found, seconds=round(time.monotonic() - start, 3))
    if known and found.leaks:
        keep(key, found)
    return found


def _expected(attacked: Attacked) -> float:
    """Seconds that the attacks on a twin would take, by what those on the audited network took."""
    batched, total = {batch.attack for batch in attacked.batches}, 0.0
    for part in attacked.found:
        some = part.attack in batched
        restarts = _some_of(attacked.batches, part.attack).restarts if some else part.restarts
        total += part.seconds * restarts / part.restarts
    return total


def _no_harder(before: Twin, batches: Sequence[Batch]) -> bool:
    """Whether a twin of an earlier audit gave its samples to attacks that tried no harder than these.

    How many restarts and steps fit a budget is measured anew every time.
    """
    last = {batch.attack: batch for batch in batches}
    return all(
        one.attack in last
        and one.restarts <= _some_of(batches, one.attack).restarts
        and one.steps <= SAME_STEPS * last[one.attack].steps
        for one in before.batches
    )


def _some_of(batches: Sequence[Batch], name: str) -> Batch:
    """The part of an attack's restarts that a twin gets."""
    mine = [batch for batch in batches if batch.attack == name]
    return mine[0].replace(restarts=max(1, sum(batch.restarts for batch in mine) // PARTS))


def _audited(
    stage: AttackStage,
    claim: Claim,
    inspection: Inspection,
    attacked: Attacked,
    recipe: Recipe,
    allowance: Allowance,
) -> Twin:
    """Make the twin, attack it as the network was attacked, and judge it by the same rule.

    The twin's data are held-out samples that the audit's own control does not need, or bundled digits
    of the same shape where there are too few. What the attacker was told of the audited network is told
    of the twin in kind: its own start, its own number of samples. Time comes out of the allowance of
    checks, with a reserve for judging; a twin in haste is said to be one, and shows nothing.
    """
    checkpoint, knowledge, seed = stage.checkpoint, stage.knowledge, stage.config.seed
    assert claim.pool is not None
    losses = sample_losses(checkpoint, claim.train, claim.train, checkpoint.task)
    reached = 0.0 if losses is None else float(losses.mean())
    weaker = ""
    if len(claim.pool) >= 2 * len(claim.train) + SPARE:
        data, rest = _out_of(claim.pool, claim.train, seed)
    else:
        data, rest = _bundled(claim.train, checkpoint, knowledge, seed)
        weaker = (
            f"; it is weaker, of {len(data)} digits of this shape, because {len(claim.pool)} held-out "
            f"samples are fewer than {2 * len(claim.train) + SPARE}"
        )
    held = knowledge.sample_count or 0
    if held > len(claim.train) + len(claim.repeats):
        weaker += (
            f"; it holds these {len(data)} alone, where the audited network holds {held} samples, and "
            "gives them back the more easily"
        )
    whole = allowance.left
    wanted = math.inf if whole == math.inf else TWIN_SHARE * stage.seconds
    training = min(wanted, whole * TRAINING)
    told = (checkpoint, data, knowledge, inspection, recipe, reached, training, seed)
    made = _network(*told, unhurried=training >= wanted)
    granted = None if knowledge.theta0 is None else made.start
    known = knowledge.replace(
        theta0=granted,
        norms=None,
        moment=None,
        sample_count=None if knowledge.sample_count is None else len(data),
        provenance={k: v for k, v in knowledge.provenance.items() if k not in ("norms", "moment")},
    )
    again = replace(stage, checkpoint=checkpoint.replace(theta=made.theta), knowledge=known)
    reserve = 0.0 if whole == math.inf else whole * JUDGING
    run = _attacked(again, attacked, allowance, reserve)
    lost = f"loss {made.loss:.2g} where the audited network reached {reached:.2g}"
    how = f"{made.how}, {lost}{weaker}"
    if not run.pools:
        why = HURRIED if run.hurried else "; ".join(run.missing) or "no attack applies to it"
        return Twin(reason=why, made=how, left_out=tuple(run.missing))
    left = max(allowance.left, 0.0) / 2  # estimates err, and this is the last
    tests, _ = run_tests(run.pools, Claim(data, rest), seed, SUBSETS, left, must=False)
    if not tests:
        return Twin(reason=HURRIED, made=how, attacked=tuple(run.words))
    found = findings(tests, len(data))
    return Twin(
        n=len(data),
        recovered=found.recovered,
        expected_by_chance=found.expected_by_chance,
        p_value=found.p_value,
        rule=found.rule,
        made=how,
        attacked=tuple(run.words),
        left_out=tuple(run.missing),
        batches=tuple(run.batches),
    )


@dataclass
class _Run:
    """Attacks on a twin: candidates, what was run in words and batches, what was not, in haste or not."""

    pools: dict[str, CandidatePool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    hurried: bool = False


def _attacked(stage: AttackStage, attacked: Attacked, allowance: Allowance, reserve: float) -> _Run:
    """What each attack of the audit brings back from the twin.

    Those of one run come first: they take what they took. Batches have a part of the restarts, and
    end with the time: what comes back in less than the audited network had is the more telling.
    """
    run = _Run()
    batched = {batch.attack for batch in attacked.batches}
    queue = sorted(attacked.found, key=lambda part: part.attack in batched)
    for place, part in enumerate(queue):
        name = part.attack
        seconds = (allowance.left - reserve) / (len(queue) - place)
        if seconds <= 0 or (name not in batched and part.seconds > seconds):
            run.missing.append(f"{name}, for want of time")
            run.hurried = True
            continue
        batch = _some_of(attacked.batches, name) if name in batched else None
        if batch is None:  # the time it was given: a setting that goes by it is the same
            seconds = float(part.settings.get("seconds") or seconds)
        try:
            found = stage.once_more(name, batch, seconds)
        except Exception as problem:
            if not (every_attack()[name].outside or isinstance(problem, ResiduumError)):
                raise
            run.missing.append(f"{name}, which failed: {str(problem)[:100]}")
            continue
        if found is None:
            run.missing.append(f"{name}, which does not apply to it")
            continue
        run.pools[name] = whole_pool(found)
        if batch is None:
            run.words.append(name)
            continue
        steps = int(found.steps[-1]) if "time" in found.status else batch.steps
        of = "" if steps == batch.steps else f" of {batch.steps}"
        total = sum(one.restarts for one in attacked.batches if one.attack == name)
        run.words.append(f"{name} ({batch.restarts} of {total} restarts, {steps}{of} steps)")
        run.batches.append(batch.replace(steps=steps))
    return run


def _network(
    checkpoint: Checkpoint,
    data: Dataset,
    knowledge: Knowledge,
    inspection: Inspection,
    recipe: Recipe,
    reached: float,
    seconds: float,
    seed: int,
    *,
    unhurried: bool,
) -> TwinNetwork:
    """The trained twin, kept for other audits of the same claim unless it was hurried."""
    made_by = [version("residuum"), torch.__version__, checkpoint.arch, checkpoint.task]
    told = [*made_by, vars(recipe), reached, seconds, seed, bool(inspection.directions)]
    start = knowledge.theta0
    begun = () if start is None else (*start.values(), *checkpoint.theta.values())
    shapes = {name: [*t.shape, str(t.dtype)] for name, t in checkpoint.theta.items()}
    key = digest([str(told), shapes], data.x, data.y, *begun)
    known = checkpoint.module is None
    found = recall(TwinNetwork, key) if known else None
    if found is None:
        found = TwinNetwork(
            *_trained(checkpoint, data, knowledge, inspection, recipe, reached, seconds, seed)
        )
        if known and unhurried:
            keep(key, found)
    return found


def _out_of(pool: Dataset, like: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """As many held-out samples as were trained on, with their label counts where there are enough."""
    rng = np.random.default_rng((seed, 7))
    theirs, mine = as_array(pool.y), as_array(like.y)
    alike = discrete(pool.y) and discrete(like.y)
    enough = alike and all(
        (theirs == value).sum() >= count
        for value, count in zip(*np.unique(mine, return_counts=True), strict=True)
    )
    labels = theirs if enough else np.zeros(len(pool), dtype=int)
    wanted = mine if enough else np.zeros(len(like), dtype=int)
    rows = torch.from_numpy(draw_sets(labels, wanted, 1, rng)[0])
    kept = torch.ones(len(pool), dtype=torch.bool)
    kept[rows] = False
    if len(pool.y.unique()) < 2:
        raise InputError("held-out samples without labels cannot be trained on", "Give labels.")
    return (
        pool.replace(x=pool.x[rows], y=pool.y[rows], mean=like.mean),
        pool.replace(x=pool.x[kept], y=pool.y[kept], mean=like.mean),
    )


def _bundled(
    like: Dataset, checkpoint: Checkpoint, knowledge: Knowledge, seed: int
) -> tuple[Dataset, Dataset]:
    """Bundled digits in the shape and range of the training samples, with labels of their task."""
    from sklearn.datasets import load_digits

    images, digit = load_digits(return_X_y=True)
    order = np.random.default_rng((seed, 8)).permutation(len(images))
    x, y = torch.from_numpy(images[order] / 16).reshape(-1, 1, 8, 8), torch.from_numpy(digit[order])
    shape = like.shape
    if len(shape) == 3:
        x = F.interpolate(x, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1)
    else:
        x = F.interpolate(x.reshape(-1, 1, 64), math.prod(shape), mode="linear").reshape(-1, *shape)
    pictures = like.images.double()
    low, high = knowledge.value_range or (float(pictures.min()), float(pictures.max()))
    x = low + (high - low) * x
    if like.mean is not None:
        x = x - like.mean.double().reshape(shape)
    elif knowledge.mean is not None:
        mean = knowledge.mean
        x = x - (mean.double().reshape(shape) if mean.numel() > 1 else mean)
    outputs = Architecture.parse(checkpoint.arch).outputs
    task = choose_task(checkpoint.task, outputs)
    if task == "regression":
        y = (y.double() / 9)[:, None].expand(-1, outputs)
    elif task == "binary":
        y = 2 * (y % 2) - 1
    else:
        y = y % outputs
    n = min(len(like), (len(x) - SPARE) // 2)
    x = x.to(like.x.dtype).contiguous()
    return Dataset(x[:n], y[:n], like.mean), Dataset(x[n:], y[n:], like.mean)


def _trained(
    checkpoint: Checkpoint,
    data: Dataset,
    knowledge: Knowledge,
    inspection: Inspection,
    recipe: Recipe,
    reached: float,
    seconds: float,
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, str]:
    """Weights, start and loss of the twin, and how it was made in words."""
    outputs = Architecture.parse(checkpoint.arch).outputs
    task = choose_task(checkpoint.task, outputs)
    seen = "small" if inspection.directions else "default"
    start = recipe.start or (seen if knowledge.theta0 is None else "granted")
    frozen = recipe.frozen
    if not frozen and knowledge.theta0 is not None:
        moved = weights(checkpoint, knowledge).layers
        frozen = tuple(name for name in by_layer(checkpoint.theta) if name not in moved)
    told = start == "granted" and knowledge.theta0 is not None
    plain = task != "regression" and not told and not frozen and checkpoint.module is None
    optimiser = recipe.optimiser or ("margin" if plain else "gd")
    words = f"trained by {optimiser} from a {start} start"
    words += f", {', '.join(frozen)} frozen" if frozen else ""
    if optimiser == "margin" and plain:
        config = TrainingConfig(steps=recipe.epochs or STEPS, seed=seed + 1, stop_loss=reached)
        begun = start if start != "granted" else "default"
        config = replace(config, init=begun, seconds=max(seconds, 0.1))
        state = train(checkpoint.arch, data, config, task=task)
        last = state.history[-1]["loss"] if state.history else math.nan
        return state.theta, state.theta0, last, words
    model = _begun(checkpoint, knowledge if told else None, start, seed)
    first = {name: t.clone() for name, t in parameters(model).items()}
    for layer, names in by_layer(first).items():
        if layer in frozen:
            for name, p in model.named_parameters():
                p.requires_grad_(p.requires_grad and name not in names)
    y = normalise_labels(data.y, task, outputs)
    loss = _descend(
        model, data.x.double(), y, choose_loss("", task), recipe, optimiser, reached, seconds, seed
    )
    dtype = {name: t.dtype for name, t in checkpoint.theta.items()}
    theta = {name: t.detach().to(dtype.get(name, t.dtype)) for name, t in parameters(model).items()}
    return theta, {name: t.to(theta[name].dtype) for name, t in first.items()}, loss, words


def _begun(checkpoint: Checkpoint, knowledge: Knowledge | None, start: str, seed: int) -> nn.Module:
    """The architecture at its start: as granted, or drawn anew."""
    model = build_model(checkpoint, torch.float64)
    if knowledge is not None and knowledge.theta0 is not None:
        begun = {name: t.double() for name, t in knowledge.theta0.items()}
        model.load_state_dict({**model.state_dict(), **begun})
    elif checkpoint.module is None:
        drawn = TrainingConfig(init="default" if start == "granted" else start, seed=seed + 1)
        model = initialise(Architecture.parse(checkpoint.arch), drawn).double()
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            for part in model.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
    return model.requires_grad_(True)


def _descend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: str,
    recipe: Recipe,
    optimiser: str,
    reached: float,
    seconds: float,
    seed: int,
) -> float:
    """Train in place until the audited network's loss, the recipe's epochs, or the end of the time."""
    moving = [p for p in model.parameters() if p.requires_grad]
    rate = recipe.rate or (1e-3 if optimiser == "adam" else RATE)
    kind = torch.optim.Adam if optimiser == "adam" else torch.optim.SGD
    steps = kind(moving, lr=rate)
    batch = recipe.batch or len(x)
    end, value = time.monotonic() + max(seconds, 0.1), math.inf
    # Losses of one batch and of the next say nothing about a step.
    careful = not recipe.rate and optimiser in ("gd", "margin") and batch >= len(x)
    drawn = stream("twin", seed)
    kept = [p.detach().clone() for p in moving]
    for _ in range(recipe.epochs or STEPS):
        order = torch.randperm(len(x), generator=drawn)
        for rows in order.split(batch) if batch < len(x) else (slice(None),):
            steps.zero_grad()
            now = LOSSES[loss](model(x[rows]), y[rows])
            now.backward()
            if careful and not float(now.detach()) < value:  # one step back, and smaller ones
                with torch.no_grad():
                    for p, before in zip(moving, kept, strict=True):
                        p.copy_(before)
                steps.param_groups[0]["lr"] *= SLOWER
                value = math.inf
                continue
            if careful:
                kept = [p.detach().clone() for p in moving]
                steps.param_groups[0]["lr"] *= FASTER
            value = float(now.detach())
            steps.step()
        if value <= reached or time.monotonic() > end:
            break
    with torch.no_grad():
        return float(LOSSES[loss](model(x), y))


def folder() -> Path | None:
    """Where twins are kept, made if need be; None where they are not."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(named or Path(home) / "residuum") / "twins"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
        mine = found.st_uid == os.getuid()
        if mine and found.st_mode & 0o077:
            place.chmod(0o700)
    except (OSError, RuntimeError):  # no home
        return None
    return place if mine else None


def recall(kind: type[Kept], key: str) -> Kept | None:
    """The entry under ``key``; None where there is none that is whole."""
    place = folder()
    for path in sorted(place.glob(f"{key}-*.safetensors")) if place is not None else ():
        with suppress(OSError):
            if path.is_symlink():
                continue
            found = kind.load_or_none(path) if path.stem == _name(key, path) else None
            if found is not None:
                os.utime(path)  # the last to go
                return found
            path.unlink()
    return None


def keep(key: str, record: Record) -> None:
    """Put an entry there under ``key``; what is too large is not kept."""
    place = folder()
    if place is None:
        return
    pending = place / f".{key}.{os.getpid()}"
    with suppress(OSError, ResiduumError):
        try:
            record.save(pending)
            if pending.stat().st_size <= MOST_BYTES // 4:
                os.replace(pending, place / f"{_name(key, pending)}.safetensors")
        finally:
            pending.unlink(missing_ok=True)
        _trim(place)


def _name(key: str, path: Path) -> str:
    return f"{key}-{sha256(path)[:HASHED]}"


def _trim(place: Path) -> None:
    """The oldest go until what is left is within both bounds."""
    there = sorted(place.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    sizes = [path.stat().st_size for path in there]
    while len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES:
        there.pop(0).unlink(missing_ok=True)
        sizes.pop(0)
