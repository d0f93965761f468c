"""The unmixing attack: separate the rows of the first layer, then choose signs, sizes and effort."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from residuum.attacks.base import OneShotAttack
from residuum.attacks.unmixing.ica import DOMAINS, SOUND, Effort, Sources, domain_of, unmix
from residuum.attacks.unmixing.layers import Mixed, mixed
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.settings import UnmixSettings
from residuum.surfaces.surface import MOMENT, Surface

SPEED = {"cpu": 1e10, "cuda": 1e12}  # of products and tanh a second, on the cautious side
LADDER = (  # from one rank, one strength and one start to all
    Effort(ranks=(0.8,), strengths=(4.0,), starts=1, rounds=1, partitions=()),
    Effort(ranks=(0.8,), strengths=(4.0,), partitions=()),
    Effort(ranks=(0.8, 0.6), partitions=()),
    Effort(),
)
INSIDE = 0.02  # share of its values by which a source may leave the granted range
SLACK = 0.05  # of the range, that a value may lie outside of it
# Probability that a source has |NCC| > 0.8 with a sample: sigmoid(a + b s), s being the share of all runs
# that hold it. Fitted on 217 sources of two networks each on 40 photos (3072-300-300-1) and 20 digits
# (64-200-200-1), seven runs; of sources that half of the runs hold 84% were true. Of one run 56% were.
CONFIDENCE, BASE_RATE = (-2.8, 5.4), 0.56
# See ``disagree``. In the gap of networks on images that no claim uses: of 400 images on 300 neurons runs
# agree on 4.6% of the rank, and 2 of those 11 sources are true; of 400 and 250 on 150 neurons on 6.2%
# and 7.9%, and 14 of those 20 are.
AGREED = 0.055
CONFIDENT_VALUES = (
    784  # of a sample, at least; on 20 and 60 digits of 64 values 1 of 40 was true, not 26
)
SMALL = (
    f"no confidence is shown. For samples with fewer than {CONFIDENT_VALUES} values, repeated runs of the "
    "attack can agree on candidates that are no training samples"
)
DISAGREEING = (
    "runs agree on next to nothing, as where a layer holds more samples than clean directions: "
    "agreement may not tell a true source from a false one there, and confidence is withheld"
)
ASSUMES = (
    "unmix assumes that training from a small or known start made the rows of the layer on the input "
    "mixtures of samples, and that samples are sparse in their differences (images, series) or values "
    "(tables); it knows no labels and needs no convergence."
)


def confidence_by_share(share: Tensor, runs: int, values: int, rank: int = 0) -> Tensor:
    """Return the probability that each source is true, by the share of the runs that hold it.

    Args:
        share: (k,) share of runs that hold each distinct source.
        runs: number of runs.
        values: number of values of a sample.
        rank: of the layer, 0 where it is not known.

    Returns:
        (k,) probabilities. NaN where confidence is withheld: for small samples, and where runs agree on
        next to nothing.
    """
    if values < CONFIDENT_VALUES or (runs > 1 and disagree(share, runs, rank)):
        return torch.full_like(share, torch.nan)
    if runs < 2:
        return torch.full_like(share, BASE_RATE)
    return torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * share)


def disagree(share: Tensor, runs: int, rank: int) -> bool:
    """Whether two runs, and a quarter of all, hold fewer distinct sources than the share ``AGREED`` of
    the rank: the layer holds more samples than come apart.
    """
    return int((share >= max(2, runs / 4) / runs - 1e-6).sum()) < AGREED * rank


def within(seconds: float, rank: int, values: int, device: str) -> Effort:
    """The most thorough effort that should end in time: the same for the same figures."""
    allowed = seconds * SPEED["cuda" if device.startswith("cuda") else "cpu"]

    def work(effort: Effort) -> float:
        r = [share * rank for share in effort.ranks]
        once = sum(4 * values * k**2 + 40 * values * k + 60 * k**3 for k in r)
        starts = len(effort.strengths) * effort.starts * effort.rounds * effort.iterations
        return once * starts * (1 + len(effort.partitions) / 4)

    fitting = [effort for effort in LADDER if work(effort) <= allowed]
    return fitting[-1] if fitting else LADDER[0]


def named(settings: UnmixSettings, effort: Effort) -> Effort:
    """Return the effort with the rank, strength and starts that are set; 0 means that one is not set.

    A single rank or strength leaves few runs that can agree, or none. Then ``restarts`` runs differ in their
    random start. If there was no time for clusters of neurons, an overfull layer has none either.
    """
    ranks = (settings.rank,) if settings.rank else effort.ranks
    strengths = (settings.strength,) if settings.strength else effort.strengths
    chosen = settings.rank or settings.strength
    return replace(
        effort,
        ranks=ranks,
        strengths=strengths,
        starts=settings.starts or effort.starts,
        repeats=settings.restarts if chosen else effort.repeats,
        overfull_partitions=effort.overfull_partitions if effort.partitions or not chosen else (),
    )


def told(
    found: Sources, layer: Mixed, knowledge: Knowledge, centers: Tensor
) -> tuple[Tensor, Tensor, str]:
    """(k,) signs and sizes of the sources, and what they rest on.

    centers: (groups,) the first source of each group. All members of a group have one sign.
    """
    X = found.x[centers].double()
    # Sources are in float32: of their directions, those below SOUND of the largest are rounding.
    C = torch.linalg.lstsq(X.T, layer.rows.double().T, rcond=SOUND, driver="gelsd").solution.T
    on = (C.square() * (layer.weight.double() @ X.T)).sum(0)
    votes, said = 1.5 * on.sign(), ["the network"]
    size = torch.ones(len(X), dtype=torch.float64)
    if layer.bias is not None:
        b = layer.bias.double()[:, None]
        inverse = torch.linalg.lstsq(C, b, rcond=SOUND, driver="gelsd").solution[:, 0]
        votes, size = votes + inverse.sign(), 1 / inverse.abs().clamp(min=1e-12)
        size = size.clamp(size.median() / 3, 3 * size.median())
        said.append("the bias")
    of = said[-1] if len(said) > 1 else "nothing: length 1"
    box = knowledge.box(torch.zeros(layer.shape, dtype=torch.float64)) if layer.whole else None
    if box is not None:
        up, down = reach(X, *box), reach(-X, *box)
        votes, size = votes + (up - down).sign(), torch.maximum(up, down)
        said.append("the range")
        of = "the range"
    sign = torch.where(votes < 0, -1.0, 1.0)
    alike = (found.x * found.x[centers][found.group]).sum(1).sign()  # versions of one source
    return alike * sign[found.group], size[found.group], f"sign by {', '.join(said)}; size by {of}"


def reach(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(k,) the largest factors that keep almost all values of (k, d) sources about within bounds.

    A pixel that is never bright has its mean for a bound, so that any noise there would leave it:
    bounds are taken a little wider than they are.
    """
    slack = SLACK * (high - low)
    low, high = (part.flatten().expand(x.shape[1]) for part in (low - slack, high + slack))
    most = torch.where(x > 0, high / x.clamp(min=1e-12), low / x.clamp(max=-1e-12))
    return most.clamp(min=0).quantile(INSIDE, dim=1)


class Unmix(UnmixSettings, OneShotAttack):
    """Separate the rows of the input layer into samples (independent component analysis)."""

    name: ClassVar[str] = "unmix"
    pace: ClassVar[str] = "sized"
    effort_share: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply."""
        if surface.name != self.surface:
            return "needs the state of an optimizer, from the file or from a live one"
        found = mixed(surface, knowledge)
        return found if isinstance(found, str) else ""

    def why_applies(self, surface: Surface) -> str:
        """Return why the attack applies."""
        return "the layer on the input holds mixtures of samples, which come apart where sparse"

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit leaves the attack out: it compares samples, not patches."""
        found = mixed(surface, knowledge)
        if isinstance(found, str) or found.whole:
            return ""
        return "its sources are patches, which cannot be compared with samples: residuum attack"

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Return the sources, those that most runs agree on first. ``seconds`` decides the effort."""
        layer = mixed(surface, knowledge)
        assert isinstance(layer, Mixed)
        domain = domain_of(self.domain, layer.shape)
        values = DOMAINS[domain](torch.zeros(1, *layer.shape)).shape[1]
        effort = named(self, within(self.seconds, layer.rank, values, self.device))
        found = unmix(
            layer.rows.to(self.device), layer.shape, effort, domain=domain, seed=self.seed
        )
        centers = found.centers
        sign, size, said = told(found, layer, knowledge, centers)
        x = (found.x * (sign * size)[:, None]).reshape(-1, *layer.shape).double()
        labels = torch.zeros(len(x))
        held = found.support * found.runs[0] + found.parts * found.runs[1]
        runs = sum(found.runs)
        share = held / runs
        values = math.prod(layer.shape)
        sure = confidence_by_share(share[centers], runs, values, found.rank)
        support = held[centers].round().long()
        chosen = Selection.plain(x, labels, centers, sure, support=support)
        notes = self._notes(layer, found, domain, said)
        if values < CONFIDENT_VALUES:
            notes += (f"{self.name}: {SMALL}",)
        elif runs > 1 and disagree(share[centers], runs, found.rank):
            notes += (f"{self.name}: {DISAGREEING}",)
        result = Reconstruction.at_once(self.name, x, labels, torch.ones(len(x)), knowledge)
        return result.replace(
            status=("finished",) * runs,
            loss=torch.zeros(runs, 0),
            layers=torch.zeros(runs, 0, 0),
            selection=chosen,
            notes=notes,
        )

    def _notes(self, layer: Mixed, found: Sources, domain: str, said: str) -> tuple[str, ...]:
        """What was assumed of samples, and what was run."""
        what = f"{self.name}: samples, or patches, are taken to be sparse in their {domain}"
        if len(layer.shape) == 1 and domain == "coordinates":
            what += ", since no shape is known: grant one for images, name series for signals"
        runs = (
            f"{self.name}: {found.rank} clean directions, {found.runs[0]} runs on the layer and "
            f"{found.runs[1]} on clusters of its neurons; {said}"
        )
        start = f"; {layer.kept:.3g} of the start was taken off" if layer.kept != 1 else ""
        return what, runs + start


class UnmixOptimizerState(Unmix):
    """Separate the input layer's rows of an optimizer state into samples."""

    name: ClassVar[str] = "unmix-moment"
    surface: ClassVar[str] = MOMENT
