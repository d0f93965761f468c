"""Positive controls: would this audit have noticed a leak?

A positive control (a "twin" in the code) is a network of the audited architecture that is known to
memorize its data. It is trained on as many held-out samples as the audited network has training
samples, in the way that the recipe says (``--recipe``) or that can be inferred: its initialization
(known, or small or default by the spectrum of the first layer), the layers that moved, the training
loss that was reached. It is then attacked with the settings of the audit and fewer restarts, and judged
by the same rule. If the audit does not notice what a positive control memorized, finding nothing in
the audited network proves nothing.

One control can be lucky. There are therefore ``MIN_CONTROLS`` of them, with different samples and different
initial weights, and all of them must be noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from residuum.attacks import every_attack
from residuum.attacks.random_streams import stream
from residuum.auditing.budget import PARTS, TWIN_SHARE, UNBOUNDED, Allowance, Batch
from residuum.auditing.controls import Claim, sample_losses
from residuum.auditing.stages import Attacked, AttackStage, findings, run_tests
from residuum.auditing.verdict import HURRIED, MIN_CONTROLS, Twin
from residuum.errors import InputError, ResiduumError, require_known
from residuum.evaluation.matching import as_array, discrete
from residuum.evaluation.null import SUBSETS, draw_sets
from residuum.evaluation.scoring import CandidatePool, whole_pool
from residuum.networks.network import Network
from residuum.records import Dataset, Knowledge
from residuum.stationarity import by_layer, parameters
from residuum.surfaces.inspection import Inspection
from residuum.surfaces.surface import weights
from residuum.theory.rows import choose_task, normalise_labels
from residuum.training import TrainingConfig, initialise, train
from residuum.training.methods import LOSSES, choose_loss

SEED_STEP = 1000  # between the seeds of two controls: far from the seeds of an audit's batches
SPARE = 100  # held-out samples beyond twice the training set that a twin needs to be judged
STEPS = 5000  # of training, where no recipe says
RATE, FASTER, SLOWER = 0.1, 1.05, 0.5  # of descent that keeps its loss falling
ENOUGH = 0.75  # of what attacking a twin should take: with less left it is not begun
OPTIMISERS, STARTS = ("margin", "gd", "sgd", "adam"), ("small", "default", "lecun", "granted")
TRAINING, JUDGING = 1 / 4, 1 / 4  # of what is left for a twin, at most to train and to judge it


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


def run_positive_controls(
    stage: AttackStage,
    claim: Claim,
    inspection: Inspection,
    attacked: Attacked,
    recipe: str = "",
    allowance: Allowance = UNBOUNDED,
) -> tuple[Twin, ...]:
    """Train and attack positive controls one after another, within ``allowance``.

    Args:
        stage: The attacks of the audit, with their settings.
        claim: The samples of the audit. The controls are trained on held-out samples.
        inspection: What the weights of the audited network look like.
        attacked: What the attacks on the audited network brought back and took.
        recipe: How the audited network was trained, see ``Recipe.parse``.
        allowance: Seconds that all controls together may take.

    Returns:
        One record per control. The list ends with the first control that is not noticed, because
        the audit is inconclusive then.
    """
    how = Recipe.parse(recipe)
    controls: list[Twin] = []
    for number in range(MIN_CONTROLS):
        remaining = MIN_CONTROLS - number
        if allowance.left <= ENOUGH * remaining * _expected(attacked):
            return (*controls, Twin(reason=HURRIED))
        start = time.monotonic()
        try:
            control = _audited(stage, claim, inspection, attacked, how, allowance, number)
        except (ResiduumError, RuntimeError) as problem:  # a user's own network may not train
            control = Twin(reason=str(problem).splitlines()[0][:200])
        controls.append(replace(control, seconds=round(time.monotonic() - start, 3)))
        if not control.noticed:
            break
    return tuple(controls)


def _expected(attacked: Attacked) -> float:
    """Seconds that the attacks on a twin would take, by what those on the audited network took."""
    batched, total = {batch.attack for batch in attacked.batches}, 0.0
    for part in attacked.found:
        some = part.attack in batched
        restarts = _some_of(attacked.batches, part.attack).restarts if some else part.restarts
        total += part.seconds * restarts / part.restarts
    return total


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
    number: int,
) -> Twin:
    """Train control ``number``, attack it like the audited network, and judge it by the same rule.

    The control is trained on held-out samples that the audit's own comparison does not need, or on
    bundled digits of the same shape if there are too few. The attacker knows the same kind of facts
    about the control as about the audited network, such as its own initial weights and its own number
    of samples. The control uses an equal part of the allowance that the remaining controls share.
    """
    checkpoint, knowledge = stage.checkpoint, stage.knowledge
    seed = stage.config.seed + SEED_STEP * number
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
    share = Allowance(allowance.left / (MIN_CONTROLS - number))
    with share:
        wanted = math.inf if share.seconds == math.inf else TWIN_SHARE * stage.seconds
        training = min(wanted, share.seconds * TRAINING)
        theta, start, loss, how = _trained(
            checkpoint, data, knowledge, inspection, recipe, reached, training, seed
        )
        how += f", loss {loss:.2g} where the audited network reached {reached:.2g}{weaker}"
        facts = _known_of_control(knowledge, start, len(data))
        control = replace(stage, checkpoint=checkpoint.replace(theta=theta), knowledge=facts)
        reserve = 0.0 if share.seconds == math.inf else share.seconds * JUDGING
        run = _attacked(control, attacked, share, reserve)
        if not run.pools:
            why = HURRIED if run.hurried else "; ".join(run.missing) or "no attack applies to it"
            return Twin(reason=why, made=how, left_out=tuple(run.missing))
        left = max(share.left, 0.0) / 2  # estimates err, and this is the last step
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


def _known_of_control(knowledge: Knowledge, start: dict[str, Tensor], samples: int) -> Knowledge:
    """Return what the attacker knows of a control: the same kinds of facts, with its own values."""
    not_given = ("norms", "moment")
    return knowledge.replace(
        theta0=None if knowledge.theta0 is None else start,
        norms=None,
        moment=None,
        sample_count=None if knowledge.sample_count is None else samples,
        provenance={k: v for k, v in knowledge.provenance.items() if k not in not_given},
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
        pool.take(rows).replace(mean=like.mean),
        pool.take(kept).replace(mean=like.mean),
    )


def _bundled(
    like: Dataset, checkpoint: Network, knowledge: Knowledge, seed: int
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
    outputs = checkpoint.architecture.outputs
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
    checkpoint: Network,
    data: Dataset,
    knowledge: Knowledge,
    inspection: Inspection,
    recipe: Recipe,
    reached: float,
    seconds: float,
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor], float, str]:
    """Weights, start and loss of the twin, and how it was made in words."""
    outputs = checkpoint.architecture.outputs
    task = choose_task(checkpoint.task, outputs)
    seen = "small" if inspection.directions else "default"
    start = recipe.start or (seen if knowledge.theta0 is None else "granted")
    frozen = recipe.frozen
    if not frozen and knowledge.theta0 is not None:
        moved = weights(checkpoint, knowledge).layers
        frozen = tuple(name for name in by_layer(checkpoint.theta) if name not in moved)
    told = start == "granted" and knowledge.theta0 is not None
    plain = task != "regression" and not told and not frozen and checkpoint.live is None
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


def _begun(checkpoint: Network, knowledge: Knowledge | None, start: str, seed: int) -> nn.Module:
    """The architecture at its start: as granted, or drawn anew."""
    model = checkpoint.copy_module(torch.float64)
    if knowledge is not None and knowledge.theta0 is not None:
        begun = {name: t.double() for name, t in knowledge.theta0.items()}
        model.load_state_dict({**model.state_dict(), **begun})
    elif checkpoint.live is None:
        drawn = TrainingConfig(init="default" if start == "granted" else start, seed=seed + 1)
        model = initialise(checkpoint.architecture, drawn).double()
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
