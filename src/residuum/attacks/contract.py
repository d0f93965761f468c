"""What an attack is, one method from a surface and what is granted to candidates, and which are chosen.

Whoever writes one fills in ``why_not`` and ``run``, here or in an installed package, and adds it to
``ATTACKS`` (``run.py``). The audit walks over them all and knows nothing else about any of them.

What restarts bring back is chosen among without the data, by their agreement (``select``):
two restarts that share nothing but the weights and still arrive at the same image are evidence that
the image is in the weights. Candidates of one label are grouped greedily, heaviest first: a group is
its centre and every ungrouped candidate within ``similarity`` (cosine) of it.

    support     = number of different restarts in the group
    consensus   = multiplier-weighted mean of the group
    confidence  = sigmoid(a + b support share + c log(relative weight) + d tightness
                          + e agreement + f agreement * log(effective dimension))

agreement is 1 from two restarts on: what it is worth grows with the dimension of the candidates'
cloud, since in few dimensions restarts meet by accident. The constants of the confidence were fitted
on victims of the project's own (calibration.json says which and how); consensus reconstructions come
first, singletons after.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from residuum import plugins
from residuum.checkpoints.surfaces import WEIGHTS, Surface
from residuum.errors import InputError, PluginError, ResiduumError
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.settings import AttackConfig
from residuum.similarity import cosine, l2

SIMILARITY = 0.9  # cosine of a candidate and the centre of its group
FEATURES = (
    "support share",
    "log relative multiplier",
    "tightness",
    "agreement",
    "agreement x log effective dimension",
)
BLOCK = 1024  # centres compared at once: bounds memory for any number of candidates
FEW_VALUES, DUPLICATE = 8, 0.03  # 0.03: the duplicate radius of Haim et al. 2022 on the unit circle
WEIGHT_FLOOR = 1e-3  # candidates lighter than this share of the heaviest of their run carry nothing
MOST_CANDIDATES = 20_000  # of one attack: bounds the memory of the scoring


@dataclass(frozen=True)
class AttackProgress:
    """What a watcher sees: losses (R,) and relative squared residuals (R, L) at a step.

    living: the candidates of every run at this moment, worked out when asked for.
    steps: that the attack will take.
    layer_names: of the L layers.
    """

    step: int
    steps: int
    loss: Tensor
    layers: Tensor
    layer_names: tuple[str, ...]
    living: Callable[[], list[Tensor]] | None = None


Watcher = Callable[[AttackProgress], None]


class Attack:
    """Base: works on the weights, runs once, can convict and never acquit.

    acquits: it leaves a residual on its surface, so that finding nothing after explaining the
        surface is evidence.
    baseline: compared with, never part of what is tested.
    pace: "batches" of restarts as long as its share of a budget lasts, "once" with that share as
        ``config.seconds``, "sized" by that share whatever the clock says, so that it repeats, or
        "formula", which takes no share.
    part: of a share, beside 1 of the others.
    assumes: a sentence for the report on what a finding rests on.
    """

    name: str = ""
    surface: str = WEIGHTS
    acquits: ClassVar[bool] = False
    baseline: ClassVar[bool] = False
    pace: ClassVar[str] = "once"
    part: ClassVar[float] = 1.0
    assumes: ClassVar[str] = ""

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Why it does not apply; "" when it does."""
        return ""

    def why(self, surface: Surface) -> str:
        """Why it applies, in a few words."""
        return "applies to this network"

    def left_out(self, surface: Surface, knowledge: Knowledge) -> str:
        """Why an audit leaves it out although it applies; "" when it does not."""
        return ""

    def run(
        self,
        surface: Surface,
        knowledge: Knowledge,
        config: AttackConfig,
        *,
        state_path: str | Path | None = None,
        watch: Watcher | None = None,
        per_run: Sequence[AttackConfig] | None = None,
    ) -> Reconstruction:
        """Candidates. An attack that takes no steps has no use for the keywords."""
        raise NotImplementedError

    def refuse(self, surface: Surface, knowledge: Knowledge) -> None:
        """An error where it does not apply."""
        if why_not := self.why_not(surface, knowledge):
            raise InputError(f"{self.name} does not apply: {why_not}.", "Use another attack.")

    @property
    def outside(self) -> bool:
        """Whether it comes from another package: then its faults are its own."""
        return not type(self).__module__.startswith("residuum.")


class AtOnce(Attack):
    """One that takes no steps which could be watched or gone on with: ``find`` is all of it."""

    def find(self, surface: Surface, knowledge: Knowledge, config: AttackConfig) -> Reconstruction:
        """The candidates."""
        raise NotImplementedError

    def run(
        self, surface: Surface, knowledge: Knowledge, config: AttackConfig, **_: Any
    ) -> Reconstruction:
        """What is found, with a selection by agreement where it brings none of its own."""
        start = time.monotonic()
        self.refuse(surface, knowledge)
        found = self.find(surface, knowledge, config).replace(settings=config.to_json())
        chosen = select(found) if found.selection is None else found.selection
        return found.replace(selection=chosen, seconds=time.monotonic() - start)


def ran(
    attack: Attack, surface: Surface, knowledge: Knowledge, config: AttackConfig, **how: Any
) -> Reconstruction:
    """One run of an attack. Where another package has a part in it, whatever it dies of is its fault; and
    what an attack from outside brings back is looked at before it is believed.
    """
    if not attack.outside:
        return attack.run(surface, knowledge, config, **how)
    try:
        attack.refuse(surface, knowledge)
        found = attack.run(surface, knowledge, config, **how)
    except ResiduumError:
        raise
    except (Exception, SystemExit) as problem:
        fault = f"{attack.name}, of another package, failed: {plugins.describe(problem)}."
        raise PluginError(fault, "Correct it, or use another attack.") from problem
    if type(attack).__module__.startswith("residuum."):  # an objective of others, in steps of ours
        return found
    found = checked(found, surface, knowledge).replace(attack=config.objective)
    found = found if found.settings else found.replace(settings=config.to_json())
    return found if found.selection is not None else found.replace(selection=select(found))


def checked(found: Reconstruction, surface: Surface, knowledge: Knowledge) -> Reconstruction:
    """What an attack from outside brought back, or an error that says what is wrong with it."""
    if not isinstance(found, Reconstruction):
        raise _wrong("a Reconstruction", type(found).__name__)
    n, restarts, looks = len(found.x), found.restarts, len(found.steps)
    if not 0 < n <= MOST_CANDIDATES:
        raise _wrong(f"1 to {MOST_CANDIDATES} candidates", n)
    wanted = {
        "x": (n, *surface.shape(knowledge)),
        "labels": (n,),
        "lam": (n, *found.lam.shape[1:]),
        "run": (n,),
        "loss": (restarts, looks),
        "layers": (restarts, looks, len(found.layer_names)),
    }
    for name, shape in wanted.items():
        if (got := tuple(getattr(found, name).shape)) != shape:
            raise _wrong(f"{name} of shape {shape}", got)
    for name in ("x", "labels", "lam"):
        if not getattr(found, name).isfinite().all():
            raise _wrong(f"finite {name}", "others")
    if not found.x.is_floating_point():
        raise _wrong("x of a floating-point type", found.x.dtype)
    if found.run.dtype != torch.long or {*found.run.tolist()} - {*range(restarts)}:
        raise _wrong(f"run as whole numbers below the {restarts} restarts", found.run.dtype)
    return found


def _wrong(wanted: str, got: object) -> PluginError:
    return PluginError(f"An attack must return {wanted}; got {got}.", "Correct the attack.")


def said_labels(outputs: Tensor) -> Tensor:
    """What the network says of samples by its outputs (n, C): -1 or 1 with one, else a class."""
    return (outputs[:, 0].sign() if outputs.shape[1] == 1 else outputs.argmax(1)).float()


def stream(*names: str | int) -> torch.Generator:
    """A generator of its own for these names: equal ones give equal numbers, on any machine.

    Datasets, initial weights and attacks all take small seeds. With one generator per plain seed an
    attack could start at the very numbers that synthetic data were made of, and find what it was given.
    """
    digest = hashlib.sha256(repr(("attack", *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def select(
    found: Reconstruction, similarity: float = SIMILARITY, radius: float | None = None
) -> Selection:
    """Groups of all restarts' candidates, best first.

    radius: group by Euclidean distance instead of cosine; the default for samples of fewer than
    FEW_VALUES values, where most directions are similar and length matters (points in a plane), is
    DUPLICATE of the median length.
    """
    if radius is None and 0 < found.x[0].numel() < FEW_VALUES:
        radius = DUPLICATE * float(found.x.flatten(1).norm(dim=1).nanmedian())
    rows = _rows(found, similarity, radius)
    heaviest = max((row["lam"] for row in rows), default=0.0)
    spread = math.log(effective_dimension(found.x[alive(found)]))
    for row in rows:
        row["features"] = features_of(row, found.restarts, heaviest, spread)
        row["confidence"] = confidence_of(row["features"], found.restarts)
    rows.sort(key=lambda row: (row["support"] < 2, -row["confidence"], -row["lam"]))
    return Selection(
        x=torch.stack([row["x"] for row in rows]) if rows else found.x[:0],
        labels=torch.stack([row["label"] for row in rows]) if rows else found.labels[:0],
        lam=torch.tensor([row["lam"] for row in rows]),
        support=torch.tensor([row["support"] for row in rows], dtype=torch.long),
        members=torch.tensor([row["members"] for row in rows], dtype=torch.long),
        confidence=torch.tensor([row["confidence"] for row in rows]),
        features=torch.tensor([row["features"] for row in rows]).reshape(-1, len(FEATURES)),
        index=torch.tensor([row["index"] for row in rows], dtype=torch.long),
    )


def _rows(found: Reconstruction, similarity: float, radius: float | None) -> list[dict[str, Any]]:
    """One description per group."""
    keep, weight, rows = alive(found), found.weight, []
    for label in found.labels[keep].unique():
        mine = (keep & (found.labels == label)).nonzero().flatten()
        for group in groups_of(found.x[mine], weight[mine], similarity, radius):
            rows.append(_describe(found, mine[group], weight[mine[group]]))
    return rows


def alive(found: Reconstruction) -> Tensor:
    """(N,) candidates that are finite, not zero, and carry weight within their own restart."""
    finite = torch.isfinite(found.x).flatten(1).all(1) & torch.isfinite(found.weight)
    norms = found.x.flatten(1).norm(dim=1)
    keep = finite & (norms > 0) & (found.weight > 0)
    for run in range(found.restarts):
        mine = found.run == run
        if (mine & keep).any():
            keep &= ~mine | (found.weight >= WEIGHT_FLOOR * found.weight[mine & keep].max())
    return keep


def groups_of(x: Tensor, weight: Tensor, similarity: float, radius: float | None) -> list[Tensor]:
    """Greedy grouping, heaviest candidate first; every candidate is in exactly one group.

    Similarities are computed for BLOCK centres at a time: memory stays bounded for any number of
    candidates.
    """
    free = torch.ones(len(x), dtype=torch.bool)
    left = free.numpy()  # the same memory: small steps cost a tenth in NumPy
    groups = []
    order = weight.argsort(descending=True)
    for block in order.split(BLOCK):
        block = block[free[block]]  # what an earlier block took needs no row of its own
        if not len(block):
            continue
        near = cosine(x[block], x) >= similarity if radius is None else l2(x[block], x) <= radius
        for i, row in zip(block.tolist(), near.numpy(), strict=True):
            if left[i]:
                members = row & left
                members[i] = True
                left ^= members
                groups.append(torch.from_numpy(members.nonzero()[0]))
    return groups


def _describe(found: Reconstruction, group: Tensor, weight: Tensor) -> dict[str, Any]:
    """group, weight: (k,) its candidates and what each of them weighs."""
    x, support = found.x[group], len(found.run[group].unique())
    share, heaviest = weight / weight.sum(), group[weight.argmax()]
    mean = (share.view(-1, *[1] * (x.ndim - 1)) * x).sum(0)
    inner = cosine(mean[None], x)[0]
    return {
        "x": mean,
        "label": found.labels[heaviest],
        "lam": float(weight.sum()) / support,
        "support": support,
        "members": len(group),
        "index": int(heaviest),
        "tightness": float((share * inner).sum()),
    }


def effective_dimension(x: Tensor) -> float:
    """(sum s^2)^2 / sum s^4 over the singular values s of the candidates' directions; at least 1.

    The number of directions a cloud of candidates spreads over; at most BLOCK of them are looked at.
    """
    if not len(x):
        return 1.0
    some = x[:: -(-len(x) // BLOCK)].flatten(1).double()
    inner = cosine(some, some)
    return max(1.0, float(inner.diagonal().sum() ** 2 / inner.square().sum()))


def features_of(
    row: dict[str, Any], restarts: int, heaviest: float, spread: float
) -> tuple[float, ...]:
    """What the confidence looks at, in the order of FEATURES."""
    weight = math.log(max(row["lam"], 1e-12 * heaviest) / heaviest) if heaviest > 0 else 0.0
    share, agreement = row["support"] / max(restarts, 1), float(row["support"] > 1)
    return share, weight, row["tightness"], agreement, agreement * spread


def confidence_of(features: tuple[float, ...], restarts: int) -> float:
    """The calibrated logistic of the features."""
    constants = calibration()
    # One restart cannot agree with anybody: without agreement confidence stays at the base rate.
    if restarts < 2:
        return constants["base_rate"]
    pairs = zip(constants["weights"], features, strict=True)
    return 1 / (1 + math.exp(-constants["intercept"] - sum(w * f for w, f in pairs)))


@lru_cache(maxsize=1)
def calibration() -> dict[str, Any]:
    """The shipped constants and their provenance."""
    return json.loads(files("residuum.attacks").joinpath("calibration.json").read_text())
