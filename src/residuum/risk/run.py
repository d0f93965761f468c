"""Exposure of records: all figures of one network and the owner's data, without an attack.

The surface is what training left in the release (``checkpoints.surfaces``): the weights, their change from
a known start, or a moment of the optimiser. Layers explained: of weights the one that the input feeds,
since others hardly leave their start; of a change or a moment all that hold something.

    target = sum_i c_i x_i^T + E           in the layer on the input, c_i = lam_i delta(x_i)
    own part over misfit   |c_i| |x_i| / |E|
    informed estimate      x^_i = x_i + E^T c_i / |c_i|^2: of one who knows all other records and the
                           gates and multiplier of this one (the adversary of Balle et al. 2022)

Row space. Gradient descent from a small or known start makes the rows of that layer mixtures of samples,
W - c W0 = C X = U S V^T, of which r directions stand out of the noise. Of weights r counts all above the
noise edge: unmixing looks at those before a cliff in the spectrum, but its clusters of neurons have cliffs
of their own, elsewhere. Of a change or a moment, whose rest is no noise, the cliff is where samples end.

    reach      |V_r x| / |x|        cosine that a candidate in the span of the r clean directions can have
                                    with x at most: what any attack that stays in that span can reach
    reach_ncc  the same for the normalised cross-correlation: x and the directions are centred, channel by
               channel; the mean over channels of |P x_c| / |x_c|
    heard      sum_k (v_k . x)^2 / |x|^2  S_k^2 / (S_k^2 + (t S_1)^2),  t = 1e-2
               the same square with weak directions counted less: an attack fits strong ones first
    dual       |NCC(x^, x)|,  x^ = V diag(S / (S^2 + (e S_1)^2)) U^T delta(x),  e = 5e-3
               delta(x): the backward signal of the record. For a training sample that is near the dual
               vector z of x (z . x_k = 1 for its own, 0 for all others), for others it is not

Kinks. Training moves the switching hyperplanes of ReLU neurons onto training samples. The statistic is
the number of neurons of the first two hidden layers whose pre-activation is zero but for

    |w_j . a + b_j|  <=  1e-4 |(w_j, b_j)| |(a, 1)|        a: the input of the layer at x

Neurons are dependent, so no distribution is assumed: a record's p-value is its rank among N held-out
records, p = (1 + number of those with at least its count) / (N + 1). If the record is exchangeable with them,
P(p <= t) <= t. P-values that share one held-out set are positively dependent (PRDS, Bates et al. 2023,
"Testing for outliers with conformal p-values"), under which Benjamini and Hochberg's rule controls the
false discovery rate.

Odds. Two kinds of attack read the layer on the input, and each has its own, logistic in

    stationarity   log(1 - heard), log(own part over misfit)
    unmixing       log(1 - reach_ncc^2), log(own part over misfit), log(d / n), log(n / r)

n records of d values. Were both independent, the probability of being recovered by at least one would be
q = 1 - (1 - p)(1 - p'); they are not, so that the score is a + b logit(q), and the probability its
logistic. log(own part over misfit) and log(d / n) stand alone where the network has no dense layer on whole
samples, where its start hides the samples, or where the clean directions fill the input space, so that every
record lies in them, trained on or not. Coefficients were fitted on networks of the pool ``tune`` of
``benchmarks/exposure.py`` and on nothing else. The score ranks the records of every network. It is a
probability only for networks like those on which it was checked: see :func:`why_uncalibrated`.

Float64 throughout, records in blocks: memory holds records x width, never records x parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from scipy.stats import bootstrap, false_discovery_control
from torch import Tensor, nn

from residuum.attacks.unmixing.ica import ROUNDING, Layer
from residuum.attacks.unmixing.layers import fed_by_input, mixed
from residuum.errors import DataError, InconclusiveError, InputError, require_known
from residuum.networks import MLP, ReLU, dense_chain
from residuum.networks.network import Network
from residuum.networks.spectrum import noise_edge
from residuum.records import Dataset, Knowledge, Record
from residuum.records.exposure import CanaryBound, Exposure, GroupExposure, missing
from residuum.risk.canaries import bound as bound_of
from residuum.risk.gradients import Gradients, Multipliers, blocks, explained, gradients_of
from residuum.similarity import chunks, ncc, standardise
from residuum.stationarity import Rows, Theta, by_layer, norm
from residuum.surfaces.surface import CHANGE, MOMENT, SURFACES, WEIGHTS, Surface
from residuum.theory.kkt import evaluate
from residuum.theory.rows import choose_task, constraint_rows, margins, normalise_labels

TOP = 10  # records that are shown with their images
AUTO = "auto"
NAMED = {"weights": WEIGHTS, "change": CHANGE, "moment": MOMENT}
FEWEST_HELD_OUT = 100  # records that a rank of 1% needs
Watcher = Callable[[int, int, str], None]
STAGES = ("outputs", "multipliers", "span", "kinks", "canaries")
SOFT, RIDGE = 1e-2, 5e-3  # t and e above
TOLERANCE, LAYERS = 1e-4, 2  # of a kink, and hidden layers that are looked at
LEVEL = 0.05  # false discovery rate at which kinks call a record
FLOOR = 1e-4  # keeps logarithms finite
FILLED = 0.9  # share of all directions from which the clean ones tell records no more apart
STATIONARITY = (-5.081, -2.230, 0.254)  # 1, log(1 - heard), log own
UNMIXING = (-9.267, -0.755, 0.361, 2.109, 2.835)  # 1, log(1 - reach^2), log own, log(d/n), log(n/r)
EITHER = (-0.486, 0.923)  # 1, logit(q)
OWN_ALONE = (-1.061, 0.814, 1.060)  # 1, log own, log(d/n)
# Networks on which probabilities were checked: 349 expected and 325 recovered of 600 CIFAR records. On
# smaller samples they were wrong: MNIST 42 and 117 of 200 for one kind, digits 92 and 56 of 240.
CALIBRATED_VALUES = 3072  # of a sample, at least
CALIBRATED_RECORDS = (40, 100)
CALIBRATED_WIDTHS = (200, 400)  # of one or two hidden layers
MOST_GROUPS = 200  # more names are those of records, not of groups
DRAWS, MANY = 1000, 2000  # of bootstraps; records of a group above which the mean is normal
ATTACKS = (
    "of being recovered (NCC beyond 99% of chance; unmix up to sign) by stationarity, 2 restarts of "
    "1500 steps, or unmix, 40 s on a CPU"
)


@dataclass(frozen=True, eq=False)
class Part(Record):
    """What a stage found, as it is kept."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Store(Protocol):
    """Keeps finished stages, so that an interrupted run goes on after them."""

    def part(self, name: str, make: Callable[[], Part]) -> Part:
        """The stage ``name`` as it was kept, or made now and kept."""


class Nowhere:
    """Keeps nothing."""

    def part(self, name: str, make: Callable[[], Part]) -> Part:
        """Made every time."""
        return make()


@dataclass(frozen=True, eq=False)
class Inserted:
    """Canaries: all of them as samples, and which were inserted into the training set."""

    data: Dataset
    inserted: Tensor
    confidence: float = 0.95
    delta: float = 0.0


def expose(
    checkpoint: Network,
    data: Dataset,
    holdout: Dataset | None = None,
    knowledge: Knowledge | None = None,
    *,
    surface: str = AUTO,
    task: str = "auto",
    groups: Sequence[str] = (),
    grouped_by: str = "",
    found: Tensor | None = None,
    inserted: Inserted | None = None,
    top: int = TOP,
    device: str = "cpu",
    store: Store | None = None,
    watch: Watcher | None = None,
) -> Exposure:
    """The exposure of every record of ``data``; see :func:`residuum.exposure`."""
    start, store = time.monotonic(), store or Nowhere()
    case = Case.of(checkpoint, data, holdout, knowledge or Knowledge(), surface, task, device)
    named = named_groups(data, case.task, tuple(groups), grouped_by)

    def stage(name: str, make: Callable[[], Part]) -> Part:
        if watch is not None:
            watch(STAGES.index(name), len(STAGES), name)
        return store.part(name, make)

    parts = {
        "outputs": stage("outputs", case.outputs_part),
        "multipliers": stage("multipliers", lambda: case.multipliers_part(watch)),
        "span": stage("span", case.span_part),
        "kinks": stage("kinks", case.kinks_part),
    }
    bound = None
    if inserted is not None:
        kept = stage("canaries", lambda: case.canaries_part(inserted, watch))
        bound = bound_of(kept.tensors, inserted.inserted, inserted.confidence, inserted.delta)
    if watch is not None:
        watch(len(STAGES), len(STAGES), "")
    return _assembled(case, parts, bound, named, found, top, start)


@dataclass(frozen=True, eq=False)
class Case:
    """A network, records and held-out records in float64 on the device; y as the mathematics has it.

    heard: name of the weight that the input feeds, "" where none does.
    target: what the rows explain.
    span: None with the reason where the rows of that weight are no mixtures of samples.
    surface: what of the release is looked at.
    x, others: (n, *shape) and (N, *shape) records and held-out records; others_y: their labels.
    layers: whose gradients must explain the target.
    no_span: why there is no span.
    """

    model: nn.Module
    surface: Surface
    knowledge: Knowledge
    data: Dataset
    x: Tensor
    y: Tensor
    others: Tensor | None
    others_y: Tensor | None
    task: str
    heard: str
    layers: tuple[str, ...]
    target: Theta
    span: Span | None
    no_span: str

    @classmethod
    def of(
        cls,
        checkpoint: Network,
        data: Dataset,
        holdout: Dataset | None,
        knowledge: Knowledge,
        surface: str,
        task: str,
        device: str,
    ) -> Case:
        """Pose the problem, or say what does not fit.

        Which target the records must explain (``surface``), which layer hears them directly, and
        whether the rows of that layer are mixtures of samples, so that their span says something. Signs
        and what weight decay left of a known start are settled here, once: everything after sees target
        = sum_i c_i x_i^T + E.
        """
        require_known(surface, (AUTO, *NAMED), "No surface")
        name = NAMED.get(surface, MOMENT if knowledge.moment is not None else WEIGHTS)
        if surface == AUTO and name == WEIGHTS and knowledge.theta0 is not None:
            name = CHANGE
        chosen = SURFACES[name](checkpoint, knowledge)
        _check(data, holdout)
        model = checkpoint.copy_module(torch.float64).to(device).requires_grad_(False).eval()
        x = data.x.to(device, torch.float64)
        outputs = evaluate(model, x[:1]).shape[1]
        task = choose_task(checkpoint.task if task == "auto" and checkpoint.task else task, outputs)
        y = normalise_labels(data.y, task, outputs).to(device)
        others = others_y = None
        if holdout is not None:
            others = holdout.x.to(device, torch.float64)
            try:
                others_y = normalise_labels(holdout.y, task, outputs).to(device)
            except InputError as problem:
                raise InputError(f"Held-out samples: {problem.message}", problem.remedy) from None
        heard, _, whole = fed_by_input(model, data.shape)
        heard = f"{heard}.weight" if heard and whole else ""
        layer = heard.removesuffix(".weight")
        layers = (layer,) if name == WEIGHTS and heard else chosen.layers
        if name == MOMENT:  # of which parameters may be missing
            every = by_layer(checkpoint.theta)
            layers = tuple(n for n, own in every.items() if {*own} <= chosen.target.keys())
        # ``mixed`` takes what weight decay left of the start off the weights themselves.
        source = SURFACES[WEIGHTS](checkpoint, knowledge) if name == CHANGE else chosen
        rows = mixed(source, knowledge.replace(shape=data.shape, provenance={}))
        span, no_span, kept = None, "", 1.0
        if isinstance(rows, str):
            no_span = rows
        elif not rows.whole:
            no_span = "the layer on the input sees patches of a sample"
        else:
            noise, kept = name == WEIGHTS and knowledge.theta0 is None, rows.kept
            span = Span.of(rows.rows.to(device), tuple(data.shape), noise)
        target = {n: t.to(device, torch.float64) for n, t in chosen.target.items()}
        if name == MOMENT:  # gradients of the loss descend where covectors ascend
            target = {n: -t for n, t in target.items()}
        if name == CHANGE and knowledge.theta0 is not None and knowledge.weight_decay:
            start = {n: t.to(device, torch.float64) for n, t in knowledge.theta0.items()}
            target = {n: t + (1 - kept) * start[n] for n, t in target.items()}
        samples = (data, x, y, others, others_y)
        return cls(model, chosen, knowledge, *samples, task, heard, layers, target, span, no_span)

    def outputs(self, x: Tensor) -> Tensor:
        """(n, C) block by block."""
        width = 8 * x[0].numel() + 4096
        return torch.cat([evaluate(self.model, x[some]) for some in blocks(len(x), width)])

    def outputs_part(self) -> Part:
        """Margin and loss of every record, the plain baselines."""
        margin, loss = baselines(self.outputs(self.x), self.y, self.task)
        return Part({"margin": margin.cpu(), "loss": loss.cpu()})

    def rows(self, x: Tensor, y: Tensor) -> Rows:
        """Rows of the equation: the margin problem's at weights, of the loss anywhere else."""
        outputs = self.outputs(x)
        limit = self.surface.name == WEIGHTS and self.knowledge.weight_decay is None
        if limit or self.task != "multiclass":
            found = constraint_rows(outputs.cpu(), y.cpu(), self.task)
            return Rows(found.index.to(x.device), found.covectors.to(x))
        return Rows(torch.arange(len(x), device=x.device), covectors(outputs, y, self.task))

    def weighed(
        self, x: Tensor, y: Tensor, watch: Watcher | None = None
    ) -> tuple[Gradients, Multipliers, Theta, Rows]:
        """Gradients, best multipliers, and the misfit they leave in the layers explained.

        Nonnegative multipliers, free for a regression: those with which the records explain the target
        best. A network whose single records have no gradient is inconclusive, not wrong.
        """
        rows = self.rows(x, y)
        try:
            gradients = gradients_of(self.model, x, rows, self.layers)
            free = self.task == "regression"
            found = explained(gradients, self.target, len(rows), free, watch)
        except (RuntimeError, NotImplementedError) as problem:  # of a forward of somebody's own
            raise InconclusiveError(
                "The gradients of single records cannot be taken from this network: "
                f"{str(problem).splitlines()[0][:200]}",
                "Records that see each other, randomness and state have none: use eval mode.",
            ) from problem
        total = gradients.combine(found.lam)
        return gradients, found, {n: self.target[n] - t for n, t in total.items()}, rows

    def own(self, gradients: Gradients, lam: Tensor, misfit: Theta) -> Tensor:
        """(n,) own part over misfit, in the layer on the input where there is one.

        |c_i| |x_i| / |E|: how loud a record is beside what no record explains. Above 1 it stands out
        alone.
        """
        at = self.heard if self.heard in misfit else ""
        left = norm({at: misfit[at]}) if at else norm(misfit)
        return gradients.sizes(lam, at) / max(left, 1e-300)

    def multipliers_part(self, watch: Watcher | None) -> Part:
        """Multipliers, own parts, and the informed estimate of every record."""

        def inner(at: int, of: int, text: str) -> None:
            if watch is not None:
                watch(1, len(STAGES), f"{text} {at} of {of}")

        gradients, found, misfit, rows = self.weighed(self.x, self.y, inner)
        each = self.x.new_zeros(len(self.x)).index_add_(0, rows.index, found.lam.abs())
        own = self.own(gradients, found.lam, misfit)
        scale = norm({n: self.target[n] for n in misfit})
        tensors = {"multiplier": each.cpu(), "own": own.cpu()}
        notes = []
        if self.heard in misfit:
            columns = gradients.columns(found.lam, self.heard)
            informed = informed_ncc(self.x, columns, misfit[self.heard], self.data.shape)
            tensors |= {"informed_ncc": informed.cpu(), "columns": columns.cpu()}
            tensors |= {"misfit": misfit[self.heard].cpu()}
        else:
            why = "no dense layer that meets whole samples is explained"
            notes.append(f"no informed estimate: {why}")
        if found.method == "descent":
            how = f"multipliers by descent, optimal but for {found.gap:.1g}"
            notes.append(f"{len(rows)} rows: {how}")
        facts = {"misfit": norm(misfit) / max(scale, 1e-300), "gap": found.gap}
        return Part(tensors, facts, tuple(notes))

    def span_part(self) -> Part:
        """What the layer on the input holds of every record, and the dual-vector statistic."""
        if self.span is None:
            return Part({}, notes=(f"no row space and no dual vector: {self.no_span}",))
        found = {"heard": self.span.heard(self.x), "reach": self.span.reach(self.x)}
        found["reach_ncc"] = self.span.reach_ncc(self.x)
        notes: tuple[str, ...] = ()
        if dense_chain(self.model) is None:
            notes = ("no dual vector: the network is not a chain of dense layers",)
        else:
            found["dual"] = self.span.dual(self.x, self.signals(self.x, self.y))
            if self.others is not None and self.others_y is not None:
                control = self.span.dual(self.others, self.signals(self.others, self.others_y))
                found["dual_p"] = ranked(found["dual"], control)
        return Part({name: t.cpu() for name, t in found.items()}, {"rank": self.span.rank}, notes)

    def signals(self, x: Tensor, y: Tensor) -> Tensor:
        """(n, h) backward signals of the first layer, of the direction in which the loss pulls."""
        rows = Rows(torch.arange(len(x), device=x.device), covectors(self.outputs(x), y, self.task))
        first = self.heard.removesuffix(".weight")
        gradients = gradients_of(self.model, x, rows, (first,))
        return gradients.columns(x.new_ones(len(x)), self.heard)

    def kinks_part(self) -> Part:
        """Switches through every record, with p-values by rank among held-out records."""
        chain = dense_chain(self.model)
        relu = chain is not None and isinstance(chain.activation, ReLU | nn.ReLU)
        if chain is None or not relu or chain.hidden == 0:
            return Part({}, notes=("no kinks: the network is not a chain of ReLU layers",))
        counts = kinks(chain, self.x)
        found = {"kinks": counts}
        notes: tuple[str, ...] = ()
        if self.others is None:
            notes = ("kinks have no chance level without held-out records",)
        else:
            control = kinks(chain, self.others).sum(1)
            found["p"] = ranked(counts.sum(1), control)
            found["q"] = torch.from_numpy(false_discovery_control(found["p"].numpy(force=True)))
        return Part({name: t.cpu() for name, t in found.items()}, notes=notes)

    def canaries_part(self, given: Inserted, watch: Watcher | None) -> Part:
        """Statistics of every canary: those left out are appended, so that all are treated alike."""
        flat = given.data.x.to(self.x).reshape(-1, *self.data.shape)
        place = located(flat, self.x)
        _check_inserted(place, given.inserted)
        outputs = evaluate(self.model, self.x[:1]).shape[1]
        y = normalise_labels(given.data.y, self.task, outputs).to(self.y)
        out = ~given.inserted.to(self.x.device)
        x = torch.cat([self.x, flat[out]])
        gradients, found, misfit, _ = self.weighed(x, torch.cat([self.y, y[out]]))
        own = self.own(gradients, found.lam, misfit)
        at = place.clone()
        at[out] = len(self.x) + torch.arange(int(out.sum()), device=at.device)
        _, loss = baselines(self.outputs(flat), y, self.task)
        return Part({"loss": -loss.cpu(), "own part": own[at].cpu()})


def baselines(outputs: Tensor, y: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """(n,) margin (NaN for a regression) and (n,) loss of every record."""
    if task == "regression":
        return missing(len(y)).to(outputs), (outputs - y).square().sum(1)
    least = margins(outputs, y).amin(1)
    if task == "binary":
        return least, nn.functional.softplus(-least, threshold=40)
    return least, nn.functional.cross_entropy(outputs, y, reduction="none")


def covectors(outputs: Tensor, y: Tensor, task: str) -> Tensor:
    """(n, C) direction in which the loss of each record pulls its outputs, at a size that does not vanish.

    y; e_y minus the softmax over the rivals, which is the gradient of the cross-entropy over 1 - p_y;
    what is missing to the target, over its length.
    """
    if task == "binary":
        return y[:, None].to(outputs)
    if task == "regression":
        return nn.functional.normalize(y.to(outputs) - outputs, dim=1)
    own = nn.functional.one_hot(y, outputs.shape[1]).to(outputs)
    return own - outputs.masked_fill(own.bool(), -torch.inf).softmax(1)


def informed_ncc(x: Tensor, columns: Tensor, misfit: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(n,) NCC of the informed estimates with their records; NaN where the multiplier is zero."""
    found = []
    for some in chunks(len(x), 4 * x[0].numel()):
        mine = informed_estimate(x[some], columns[some], misfit)
        a, b = (standardise(part.reshape(-1, *shape)) for part in (mine, x[some]))
        found.append((a * b).sum(1).clamp(-1, 1))
    return torch.cat(found)


def informed_estimate(x: Tensor, columns: Tensor, misfit: Tensor) -> Tensor:
    """(k, d) x + E^T c / |c|^2; NaN where c = 0: nothing of the record is in the layer."""
    squares = columns.square().sum(1, keepdim=True)
    estimate = x.flatten(1) + (columns @ misfit) / squares.clamp(min=1e-300)
    return torch.where(squares > 0, estimate, torch.nan)


def located(some: Tensor, x: Tensor) -> Tensor:
    """(m,) index in x of the record equal to each of ``some`` but for rounding to float32, -1 for none."""
    a, b = some.flatten(1), x.flatten(1)
    found = torch.full((len(a),), -1, dtype=torch.long, device=x.device)
    sizes = b.square().sum(1)
    for rows in chunks(len(a), len(b)):
        squares = a[rows].square().sum(1)[:, None] + sizes - 2 * a[rows] @ b.T
        nearest = squares.argmin(1)
        apart = (a[rows] - b[nearest]).norm(dim=1)
        same = apart <= 1e-5 * b[nearest].norm(dim=1).clamp(min=1e-30)
        found[rows] = torch.where(same, nearest, -1)
    return found


def _check(data: Dataset, holdout: Dataset | None) -> None:
    if holdout is None:
        return
    if holdout.shape != data.shape:
        raise DataError(
            f"Held-out records must have the shape of the records, {data.shape}; got {holdout.shape}.",
            "Preprocess both alike.",
        )
    if len(holdout) < FEWEST_HELD_OUT:
        raise DataError(
            f"A chance level needs {FEWEST_HELD_OUT} held-out records at least; got {len(holdout)}.",
            "Give more, or leave --holdout out: kinks and dual vectors then have no p-values.",
        )


def _check_inserted(place: Tensor, inserted: Tensor) -> None:
    """Inserted canaries are among the records, and those left out are not."""
    lost = int((place[inserted.to(place.device)] < 0).sum())
    if lost:
        raise DataError(
            f"Inserted canaries must be among the records of --data; {lost} of them are not.",
            "List them as the network received them, mean subtracted as in --data.",
        )
    seen = int((place[~inserted.to(place.device)] >= 0).sum())
    if seen:
        raise DataError(
            f"Canaries left out must not be among the records; {seen} of them are.",
            "Correct 'inserted', or leave records that occur twice out of the file.",
        )


def _assembled(
    case: Case,
    parts: dict[str, Part],
    bound: CanaryBound | None,
    named: tuple[tuple[str, ...], str],
    found: Tensor | None,
    top: int,
    start: float,
) -> Exposure:
    """All figures in one record; named: the group of every record, and by what."""
    plain, weighed, spanned, kinked = parts.values()
    n, data = len(case.x), case.data
    heard, nothing = spanned.tensors.get("heard"), missing(n)
    own = weighed.tensors["own"]
    rank = spanned.facts.get("rank")
    odds = score(own, heard, spanned.tensors.get("reach_ncc"), data.x[0].numel(), rank)
    uncalibrated = why_uncalibrated(case)
    probability = nothing if uncalibrated else torch.sigmoid(odds)
    chosen = odds.argsort(descending=True, stable=True)[:top]
    shape = tuple(data.shape)
    informed = torch.zeros(0, *shape, dtype=torch.float64)
    if "columns" in weighed.tensors:
        columns, misfit = weighed.tensors["columns"], weighed.tensors["misfit"]
        mine = case.x[chosen.to(case.x.device)].cpu()
        informed = informed_estimate(mine, columns[chosen], misfit).reshape(-1, *shape)
    found_ncc, nearest = nothing, torch.zeros(0, *shape, dtype=torch.float64)
    if found is not None:
        found_ncc, nearest = best_candidates(found.double(), data.x.double(), chosen)
    q = kinked.tensors.get("q")
    notes = [*weighed.notes, *spanned.notes, *kinked.notes]
    if case.surface.name != WEIGHTS:
        notes.append(f"looked at: {case.surface.name}")
    if rank is not None and rank >= FILLED * data.x[0].numel():
        notes.append("clean directions fill the input space: heard and reach tell nothing apart")
    if case.others is not None and (least := 1 / (len(case.others) + 1)) > LEVEL / n:
        fewest = math.ceil(least * n / LEVEL)
        said = f"kinks can call {fewest} records together, no fewer"
        notes.append(f"{len(case.others)} held-out records: {said}")
    return Exposure(
        arch=case.surface.checkpoint.arch,
        surface=case.surface.name,
        task=case.task,
        holdout=0 if case.others is None else len(case.others),
        layers=case.layers,
        attacks=ATTACKS,
        rank=rank,
        misfit=weighed.facts["misfit"],
        gap=weighed.facts["gap"],
        level=LEVEL,
        labels=data.y,
        groups=named[0],
        grouped_by=named[1],
        probability=probability,
        score=odds,
        heard=nothing if heard is None else heard,
        own_over_misfit=own,
        multiplier=weighed.tensors["multiplier"],
        reach=spanned.tensors.get("reach", nothing),
        reach_ncc=spanned.tensors.get("reach_ncc", nothing),
        informed_ncc=weighed.tensors.get("informed_ncc", nothing),
        kinks=kinked.tensors.get("kinks", torch.zeros(n, 0, dtype=torch.long)),
        kink_p=kinked.tensors.get("p", nothing),
        kink_q=nothing if q is None else q,
        dual=spanned.tensors.get("dual", nothing),
        dual_p=spanned.tensors.get("dual_p", nothing),
        margin=plain.tensors["margin"],
        loss=plain.tensors["loss"],
        found_ncc=found_ncc,
        uncalibrated=uncalibrated,
        by_group=grouped(named[0], odds, probability, q),
        canaries=bound,
        top=chosen,
        images=data.x[chosen].double(),
        informed=informed,
        found=nearest,
        seconds=time.monotonic() - start,
        notes=tuple(notes),
    )


def why_uncalibrated(case: Case) -> str:
    """Say why the score of this case is no probability; return "" where it is one.

    The probability is printed only for networks like those on which expected and recovered records were
    compared: a ReLU network of dense layers with one output, small initialization, and large images.
    """
    chain = dense_chain(case.model)
    values, n = math.prod(case.data.shape), len(case.x)
    if case.surface.name != WEIGHTS or case.knowledge.theta0 is not None:
        return "probabilities were calibrated only for final weights, without known initial weights"
    if values < CALIBRATED_VALUES:
        checked = f"samples with at least {CALIBRATED_VALUES} values each"
        return f"probabilities were calibrated only for {checked}, and yours have {values}"
    fewest, most = CALIBRATED_RECORDS
    if not fewest <= n <= most:
        return (
            f"probabilities were calibrated only for {fewest} to {most} records, and yours are {n}"
        )
    if (
        chain is None
        or not isinstance(chain.activation, ReLU)
        or chain.linears[-1].out_features != 1
    ):
        return (
            "probabilities were calibrated only for ReLU networks of dense layers with one output"
        )
    narrow, wide = CALIBRATED_WIDTHS
    widths = [layer.out_features for layer in chain.linears[:-1]]
    if not (1 <= len(widths) <= 2 and all(narrow <= width <= wide for width in widths)):
        checked = f"one or two hidden layers of {narrow} to {wide} neurons"
        return f"probabilities were calibrated only for {checked}"
    if case.span is None:
        checked = "where the first layer shows the samples"
        return f"probabilities were calibrated only {checked}, and {case.no_span}"
    return ""


def best_candidates(found: Tensor, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) NCC of the nearest candidate of an attack, sign-free, and those of the chosen records."""
    if found.shape[1:] != x.shape[1:]:
        raise DataError(
            f"What an attack found must have the shape of the records, {tuple(x.shape[1:])}; got "
            f"{tuple(found.shape[1:])}.",
            "Name the folder of an attack on this network.",
        )
    similarity = ncc(x, found)
    best = similarity.abs().max(1)
    at = best.indices[chosen]
    sign = similarity[chosen, at].sign().reshape(-1, *[1] * (x.ndim - 1))
    return best.values.double(), sign * found[at]


@dataclass(frozen=True, eq=False)
class Span:
    """A layer taken apart, the shape of samples, and r, the number of its clean directions."""

    layer: Layer
    shape: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, rows: Tensor, shape: tuple[int, ...], noise: bool) -> Span:
        """Of rows (h, d); noise: whether that of a start is in them."""
        layer = Layer.of(rows)
        above = noise_edge(layer.S.cpu(), *rows.shape)[0]
        sound = int((ROUNDING * layer.S[0] < layer.S).sum())
        return cls(layer, shape, min(above, sound) if noise else layer.rank)

    def reach(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape); 0 of a sample that is zero."""
        flat = x.flatten(1)
        V = self.layer.V[: self.rank].to(flat)
        size = flat.norm(dim=1).clamp(min=1e-300)
        return ((flat @ V.T).norm(dim=1) / size).clamp(max=1)

    def reach_ncc(self, x: Tensor) -> Tensor:
        """(n,) likewise; a channel that is constant correlates with nothing and adds 0."""
        channels = self.shape[0] if len(self.shape) == 3 else 1
        V = self.layer.V[: self.rank].to(x).reshape(self.rank, channels, -1)
        parts = standardise(x.reshape(len(x), *self.shape)).reshape(len(x), channels, -1)
        total = x.new_zeros(len(x))
        for c in range(channels):
            centred = V[:, c] - V[:, c].mean(1, keepdim=True)
            _, sigma, basis = torch.linalg.svd(centred, full_matrices=False)
            basis = basis[sigma > 1e-6 * sigma.max().clamp(min=1e-300)]
            # A channel of a standardised sample has length 1/sqrt(c), and their correlations are averaged.
            total += (parts[:, c] @ basis.T).norm(dim=1) / channels**0.5
        return total.clamp(max=1)

    def heard(self, x: Tensor) -> Tensor:
        """(n,) of samples (n, *shape)."""
        flat, S = x.flatten(1), self.layer.S.to(x)
        weight = S.square() / (S.square() + (SOFT * S[0]) ** 2)
        energy = flat.square().sum(1).clamp(min=1e-300)
        V = self.layer.V.to(flat)
        parts = [(flat[some] @ V.T).square() @ weight for some in blocks(len(flat), len(V))]
        return (torch.cat(parts) / energy).clamp(max=1)

    def dual(self, x: Tensor, signals: Tensor) -> Tensor:
        """(n,) of samples and their backward signals (n, h)."""
        S, U, V = (part.to(x) for part in (self.layer.S, self.layer.U, self.layer.V))
        inverse = S / (S.square() + (RIDGE * S[0]) ** 2)
        found = []
        for some in blocks(len(x), x[0].numel()):
            estimate = ((signals[some] @ U) * inverse) @ V
            a, b = (standardise(part.reshape(-1, *self.shape)) for part in (estimate, x[some]))
            found.append((a * b).sum(1).abs().clamp(max=1))
        return torch.cat(found)


@torch.no_grad()
def kinks(chain: MLP, x: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """(n, layers) switches of the first hidden layers that pass through each record.

    Training moves switching hyperplanes onto samples: |w.a + b| below ``tolerance`` times |(w, b)| |(a,
    1)|, a bound on the sine of the angle between record and hyperplane that no rescaling of either
    changes.
    """
    layers = chain.linears[: min(LAYERS, chain.hidden)]
    width = sum(layer.in_features + layer.out_features for layer in chain.linears)
    lengths = []
    for layer in layers:
        squares = layer.weight.square().sum(1)
        lengths.append((squares if layer.bias is None else squares + layer.bias.square()).sqrt())
    found = []
    for some in blocks(len(x), width):
        trace, counts = chain.trace(x[some]), []
        for l, layer in enumerate(layers):
            size = trace.inputs[l].square().sum(1)
            size = (size if layer.bias is None else size + 1).sqrt()
            scale = size[:, None] * lengths[l]
            near = (trace.pre[l].abs() <= tolerance * scale) & (scale > 0)
            counts.append(near.sum(1))
        found.append(torch.stack(counts, 1))
    return torch.cat(found)


def ranked(statistic: Tensor, held_out: Tensor) -> Tensor:
    """(n,) p-values: ranks of records among held-out ones, large values being evidence."""
    order = held_out.double().sort().values
    below = torch.searchsorted(order, statistic.double().contiguous())  # held-out records below it
    return (1 + len(order) - below).double() / (len(order) + 1)


def score(
    own: Tensor, heard: Tensor | None, reach: Tensor | None, values: int, rank: int | None
) -> Tensor:
    """(n,) log odds of being recovered.

    own: over misfit.
    values: d.
    heard, reach, rank: None without a row space.
    """
    n = len(own)
    part, wide = (own.double() + FLOOR).log(), math.log(values / n)
    if heard is None or reach is None or rank is None or rank >= FILLED * values:
        return _sum(OWN_ALONE, part, wide)
    missed = (1 - heard.double() + FLOOR).log()
    outside = (1 - reach.double().square() + FLOOR).log()
    fitted = torch.sigmoid(_sum(STATIONARITY, missed, part))
    unmixed = torch.sigmoid(_sum(UNMIXING, outside, part, wide, math.log(n / max(rank, 1))))
    either = 1 - (1 - fitted) * (1 - unmixed)
    return _sum(EITHER, torch.logit(either, eps=1e-12))


def _sum(coefficients: tuple[float, ...], *parts: Tensor | float) -> Tensor:
    total = torch.tensor(coefficients[0], dtype=torch.float64)
    for coefficient, part in zip(coefficients[1:], parts, strict=True):
        total = total + coefficient * part
    return total


def named_groups(
    data: Dataset, task: str, groups: tuple[str, ...], grouped_by: str
) -> tuple[tuple[str, ...], str]:
    """The group of every record: as given, by class, or none for a regression; and by what."""
    if groups:
        if len(groups) != len(data):
            raise DataError(
                f"Groups name one for every record; got {len(groups)} for {len(data)}.",
                "Give as many as there are records.",
            )
        if len(set(groups)) > MOST_GROUPS:
            raise DataError(
                f"Groups may have {MOST_GROUPS} different names; got {len(set(groups))}.",
                "Name a column with fewer values.",
            )
        return groups, grouped_by or "group"
    if task == "regression":
        return (), ""
    named = data.classes if task == "multiclass" else ()
    return tuple(
        named[int(y)] if 0 <= int(y) < len(named) else f"{float(y):g}" for y in data.y.tolist()
    ), "class"


def grouped(
    names: tuple[str, ...], odds: Tensor, probability: Tensor, q: Tensor | None
) -> tuple[GroupExposure, ...]:
    """Return the figures of every group, most exposed first.

    Groups are ordered by their mean probability, or by their mean score where there is none.
    """
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    calibrated = not bool(probability.isnan().any())
    groups = []
    for name, rows in members.items():
        called = None if q is None else int((q[rows] <= LEVEL).sum())
        own, mean_score = probability[rows], float(odds[rows].mean())
        figures: dict[str, Any] = {"expected": None, "probability": None, "interval": None}
        if calibrated:
            figures = {"expected": float(own.sum()), "probability": float(own.mean())}
            figures["interval"] = mean_interval(own)
        groups.append(GroupExposure(name, len(rows), mean_score, **figures, called=called))
    return tuple(
        sorted(groups, key=lambda g: -(g.score if g.probability is None else g.probability))
    )


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return a 95% interval of the mean over records: a percentile bootstrap, normal for many records."""
    n, mean = len(values), float(values.mean())
    if n > MANY:
        half = 1.96 * float(values.std()) / math.sqrt(n)
        return mean - half, mean + half
    if n == 1:  # nothing to draw from, which scipy refuses
        return mean, mean
    means = bootstrap((values.numpy(),), np.mean, n_resamples=DRAWS, method="percentile", rng=0)
    return float(means.confidence_interval.low), float(means.confidence_interval.high)
