"""The unmixing attack: separate the rows of the first layer into training samples.

``ica.py`` separates the rows into sources, which are samples up to a sign and a size. This file chooses
the sign and the size of each source, and the amount of computation.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from residuum.attacks.base import OneShotAttack
from residuum.attacks.unmixing.ica import DOMAINS, SOUND, Effort, Sources, choose_domain, unmix
from residuum.attacks.unmixing.layers import InputLayer, read_input_layer
from residuum.attacks.unmixing.sparse_factors import MAX_SAMPLES, factor_gradient
from residuum.records import Knowledge, Reconstruction, Selection
from residuum.settings import UnmixSettings
from residuum.surfaces.surface import MOMENT, Surface

# Assumed operations (multiplications and tanh evaluations) per second on a CPU and on a GPU.
SPEED = {"cpu": 1e10, "cuda": 1e12}
LADDER = (  # amounts of computation, smallest first; the last is the full default
    Effort(ranks=(0.8,), strengths=(4.0,), starts=1, rounds=1, partitions=()),
    Effort(ranks=(0.8,), strengths=(4.0,), partitions=()),
    Effort(ranks=(0.8, 0.6), partitions=()),
    Effort(),
)
EXACT_SHARE = 0.2  # share of the time limit for the exact factorization of a sum of few gradients
OUTSIDE = 0.02  # share of the values of a candidate that may leave the known value range
SLACK = 0.05  # distance by which a value may leave the value range, as a share of this range
# A separated candidate has |NCC| > 0.8 with a training sample with probability sigmoid(a + b s), where s is
# the share of all runs that contain the candidate. The constants (a, b) were fitted on 217 candidates of four
# networks, two on 40 photos (3072-300-300-1) and two on 20 digits (64-200-200-1), with seven runs each. Of
# candidates in at least half of the runs, 84% were training samples. Of candidates in one run, 56% were.
CONFIDENCE, BASE_RATE = (-2.8, 5.4), 0.56
# The rank of a layer is the number of singular values of its weight matrix that exceed the noise. If the runs
# agree on fewer candidates than this share of the rank, the attack shows no confidence (``runs_disagree``).
# The share was measured on images that appear in no published result. With 400 images and 300 neurons, the
# runs agreed on 4.6% of the rank, and 2 of these 11 candidates were training images. With 400 and 250 images
# and 150 neurons, the runs agreed on 6.2% and 7.9% of the rank, and 14 of these 20 candidates were training
# images.
AGREED = 0.055
# Minimum number of values of a sample for which a confidence is shown.
# On 20 and 60 digits of 64 values, 1 of 40 candidates was a training sample, although the confidence
# predicted 26.
CONFIDENT_VALUES = 784
SMALL = (
    f"no confidence is shown. For samples with fewer than {CONFIDENT_VALUES} values, repeated runs of the "
    "attack can agree on candidates that are no training samples"
)
DISAGREEING = (
    "no confidence is shown. The runs of the attack agree on almost no candidate. This happens if a layer "
    "contains more samples than its weight matrix has singular values above the noise. Agreement of runs may "
    "then not separate training samples from false candidates"
)
ASSUMES = (
    "unmix assumes that the initial weights were small or are known, so that the rows of the input layer are "
    "mixtures of samples. The attack also assumes that samples are sparse in their differences (images, "
    "series) or values (tables). The attack needs neither labels nor convergence."
)


def confidence_by_share(share: Tensor, runs: int, values: int, rank: int = 0) -> Tensor:
    """Return the probability that each source (separated candidate) is a training sample.

    The probability grows with the share of the runs of the attack that contain the source.

    Args:
        share: (k,) share of the runs that contain each distinct source.
        runs: Number of runs.
        values: Number of values of a sample.
        rank: Number of singular values of the layer's weight matrix that exceed the noise, 0 if this number
            is not known.

    Returns:
        (k,) probabilities. The probabilities are NaN if samples have few values, or if the runs agree on
            almost no source.
    """
    if values < CONFIDENT_VALUES or (runs > 1 and runs_disagree(share, runs, rank)):
        return torch.full_like(share, torch.nan)
    if runs < 2:
        return torch.full_like(share, BASE_RATE)
    return torch.sigmoid(CONFIDENCE[0] + CONFIDENCE[1] * share)


def runs_disagree(share: Tensor, runs: int, rank: int) -> bool:
    """Return True if the runs of the attack agree on almost no source (separated candidate).

    The runs agree on a source if at least two runs, and at least a quarter of all runs, contain the source.
    The runs disagree if they agree on fewer sources than the share ``AGREED`` of ``rank``. The layer then
    contains more samples than can be separated.

    Args:
        share: (k,) share of the runs that contain each distinct source.
        runs: Number of runs.
        rank: Number of singular values of the layer's weight matrix that exceed the noise.

    Returns:
        True if the runs disagree.
    """
    return int((share >= max(2, runs / 4) / runs - 1e-6).sum()) < AGREED * rank


def choose_effort(seconds: float, rank: int, values: int, device: str) -> Effort:
    """Choose the largest amount of computation that should finish within the time limit.

    The function assumes a fixed speed for each kind of device and measures no time, so the choice is
    reproducible.

    Args:
        seconds: Time limit.
        rank: Number of singular values of the layer's weight matrix that exceed the noise.
        values: Number of values of a source in the domain in which samples are sparse.
        device: Device of the attack.

    Returns:
        The amount of computation.
    """
    work_limit = seconds * SPEED["cuda" if device.startswith("cuda") else "cpu"]

    def work(effort: Effort) -> float:
        ranks = [share * rank for share in effort.ranks]
        work_per_iteration = sum(4 * values * r**2 + 40 * values * r + 60 * r**3 for r in ranks)
        iterations = len(effort.strengths) * effort.starts * effort.rounds * effort.iterations
        return work_per_iteration * iterations * (1 + len(effort.partitions) / 4)

    affordable_efforts = [effort for effort in LADDER if work(effort) <= work_limit]
    return affordable_efforts[-1] if affordable_efforts else LADDER[0]


def apply_settings(settings: UnmixSettings, effort: Effort) -> Effort:
    """Apply the settings ``rank``, ``strength`` and ``starts`` that a user has set.

    ``rank`` is the number of separated sources in a run, as a share of the rank of the layer. ``strength`` is
    the factor a of the contrast log cosh(a y). The value 0 means "not set". The attack usually makes one run
    for each rank and strength, and a source on which several runs agree is reliable. If the user sets a
    single rank or strength, too few runs remain. The attack then makes ``restarts`` runs with different
    random starts. If the time limit leaves no time to separate clusters of neurons one by one, the attack
    uses no clusters.

    Args:
        settings: Settings of the attack.
        effort: The amount of computation that fits the time limit.

    Returns:
        The amount of computation with the values of the settings.
    """
    ranks = (settings.rank,) if settings.rank else effort.ranks
    strengths = (settings.strength,) if settings.strength else effort.strengths
    has_fixed_setting = settings.rank or settings.strength
    return replace(
        effort,
        ranks=ranks,
        strengths=strengths,
        starts=settings.starts or effort.starts,
        repeats=settings.restarts if has_fixed_setting else effort.repeats,
        overfull_partitions=effort.overfull_partitions
        if effort.partitions or not has_fixed_setting
        else (),
    )


def estimate_signs_and_sizes(
    sources: Sources, layer: InputLayer, knowledge: Knowledge, centers: Tensor
) -> tuple[Tensor, Tensor, str]:
    """Estimate the sign and the size of each source (separated candidate).

    The separation determines each source only up to its sign and its size. The network, the
    bias and the known value range each suggest a sign. The function uses the sign with the larger total
    weight. The size follows from the value range, or else from the bias.

    Args:
        sources: The sources, separated from the rows of the layer.
        layer: The layer that receives the input.
        knowledge: What the attacker knows.
        centers: (groups,) index of the first row of each group of similar sources. All sources of a group get
            consistent signs.

    Returns:
        (k,) signs, (k,) sizes, and a note on the evidence for the signs and sizes.
    """
    X = sources.x[centers].double()
    # The sources are in float32, so singular values below SOUND times the largest one are rounding errors.
    C = torch.linalg.lstsq(X.T, layer.rows.double().T, rcond=SOUND, driver="gelsd").solution.T
    activation_of_neurons = (C.square() * (layer.weight.double() @ X.T)).sum(0)
    votes = 1.5 * activation_of_neurons.sign()
    voters = ["the network"] if bool(layer.weight.any()) else []
    sizes = torch.ones(len(X), dtype=torch.float64)
    if layer.bias is not None:
        biases = layer.bias.double()[:, None]
        inverse_size = torch.linalg.lstsq(C, biases, rcond=SOUND, driver="gelsd").solution[:, 0]
        votes, sizes = votes + inverse_size.sign(), 1 / inverse_size.abs().clamp(min=1e-12)
        sizes = sizes.clamp(sizes.median() / 3, 3 * sizes.median())
        voters.append("the bias")
    size_note = (
        "sizes from the bias" if layer.bias is not None else "sizes not known, set to length 1"
    )
    value_bounds = (
        knowledge.box(torch.zeros(layer.shape, dtype=torch.float64)) if layer.is_sample else None
    )
    if value_bounds is not None:
        up, down = find_largest_factors(X, *value_bounds), find_largest_factors(-X, *value_bounds)
        votes, sizes = votes + (up - down).sign(), torch.maximum(up, down)
        voters.append("the value range")
        size_note = "sizes from the value range"
    sign = torch.where(votes < 0, -1.0, 1.0)
    # A source and its negative are equivalent. Within a group, flip sources that point away from the first.
    sign_to_center = (sources.x * sources.x[centers][sources.group]).sum(1).sign()
    evidence = f"signs from {', '.join(voters) or 'nothing'}; {size_note}"
    return sign_to_center * sign[sources.group], sizes[sources.group], evidence


def find_largest_factors(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Find the largest factor for each source that keeps almost all its values within bounds.

    If the data were centered, the lower bound of a pixel that is dark in all samples is close to 0. Noise in
    this pixel would then violate the bounds, so the function widens the bounds a little.

    Args:
        x: (k, d) sources.
        low: Lower bounds of the values.
        high: Upper bounds of the values.

    Returns:
        (k,) factors by which the sources can be multiplied.
    """
    slack = SLACK * (high - low)
    low, high = (bound.flatten().expand(x.shape[1]) for bound in (low - slack, high + slack))
    factors = torch.where(x > 0, high / x.clamp(min=1e-12), low / x.clamp(max=-1e-12))
    return factors.clamp(min=0).quantile(OUTSIDE, dim=1)


class Unmix(UnmixSettings, OneShotAttack):
    """An attack that separates the rows of the first layer, which mix training samples, into samples."""

    name: ClassVar[str] = "unmix"
    pace: ClassVar[str] = "sized"
    effort_share: ClassVar[float] = 0.25
    assumes: ClassVar[str] = ASSUMES

    def why_not(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why the attack does not apply to a network.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the attack applies.
        """
        if surface.name != self.surface:
            return "needs an optimizer state, from the file or from a live optimizer"
        layer = read_input_layer(surface, knowledge)
        return layer if isinstance(layer, str) else ""

    def why_applies(self, surface: Surface) -> str:
        """Return a short reason why the attack applies to a network."""
        return "the rows of the input layer mix samples, and sparse samples can be separated"

    def why_skipped(self, surface: Surface, knowledge: Knowledge) -> str:
        """Return why an audit skips the attack: an audit can compare whole samples, but not patches.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The reason, or "" if the audit runs the attack.
        """
        layer = read_input_layer(surface, knowledge)
        if isinstance(layer, str) or layer.is_sample:
            return ""
        return (
            "the attack recovers patches, which an audit cannot compare with samples; "
            "run `residuum attack` to see the patches"
        )

    def find(self, surface: Surface, knowledge: Knowledge) -> Reconstruction:
        """Separate the rows of the layer that receives the input into candidates for training samples.

        The time limit ``seconds`` of the settings decides the amount of computation.

        Args:
            surface: The attack surface: the weights, the weight update or an optimizer state.
            knowledge: What the attacker knows.

        Returns:
            The candidates. Candidates that most runs contain come first.
        """
        layer = read_input_layer(surface, knowledge)
        assert isinstance(layer, InputLayer)
        exact_samples = self._factor(layer)
        if layer.rank < 2:
            return self._with_exact(None, exact_samples, knowledge)
        domain = choose_domain(self.domain, layer.shape)
        domain_values = DOMAINS[domain](torch.zeros(1, *layer.shape)).shape[1]
        effort = choose_effort(self.seconds, layer.rank, domain_values, self.device)
        effort = apply_settings(self, effort)
        sources = unmix(
            layer.rows.to(self.device), layer.shape, effort, domain=domain, seed=self.seed
        )
        centers = sources.centers
        sign, size, evidence = estimate_signs_and_sizes(sources, layer, knowledge, centers)
        candidates = (sources.x * (sign * size)[:, None]).reshape(-1, *layer.shape).double()
        labels = torch.zeros(len(candidates))
        run_count = sources.support * sources.runs[0] + sources.cluster_support * sources.runs[1]
        total_runs = sum(sources.runs)
        run_share = run_count / total_runs
        value_count = math.prod(layer.shape)
        confidence = confidence_by_share(run_share[centers], total_runs, value_count, sources.rank)
        support = run_count[centers].round().long()
        selection = Selection.from_candidates(
            candidates, labels, centers, confidence, support=support
        )
        notes = self._notes(layer, sources, domain, evidence)
        if value_count < CONFIDENT_VALUES:
            notes += (f"{self.name}: {SMALL}",)
        elif total_runs > 1 and runs_disagree(run_share[centers], total_runs, sources.rank):
            notes += (f"{self.name}: {DISAGREEING}",)
        result = Reconstruction.from_candidates(
            self.name, candidates, labels, torch.ones(len(candidates)), knowledge
        )
        result = result.replace(
            status=("finished",) * total_runs,
            loss=torch.zeros(total_runs, 0),
            layers=torch.zeros(total_runs, 0, 0),
            selection=selection,
            notes=notes,
        )
        return self._with_exact(result, exact_samples, knowledge)

    def _factor(self, layer: InputLayer) -> Tensor:
        """Return the samples (k, *shape) into which the layer can be factored exactly."""
        if layer.exact is None or layer.rank > MAX_SAMPLES:
            return torch.zeros(0, *layer.shape, dtype=torch.float64)
        operations = EXACT_SHARE * self.seconds * SPEED["cpu"]
        samples = factor_gradient(*layer.exact, operations, self.seed)
        return samples.reshape(-1, *layer.shape)

    def _with_exact(
        self, result: Reconstruction | None, samples: Tensor, knowledge: Knowledge
    ) -> Reconstruction:
        """Return the candidates, preceded by the samples that the exact factorization found."""
        sample_count = len(samples)
        if result is not None and not sample_count:
            return result
        labels = torch.zeros(sample_count)
        exact = Reconstruction.from_candidates(
            self.name, samples, labels, torch.ones(sample_count), knowledge
        )
        confidence = torch.full((sample_count,), torch.nan)
        chosen = Selection.from_candidates(samples, labels, torch.arange(sample_count), confidence)
        note = (
            f"{self.name}: the first layer is a sum over {sample_count} samples, each with many "
            "inactive neurons. The sum was factored exactly"
        )
        if result is None:
            return exact.replace(selection=chosen, notes=(note,))
        assert result.selection is not None
        later = result.selection.replace(index=result.selection.index + sample_count)
        names = ("x", "labels", "lam", "support", "members", "confidence", "features", "index")
        selection = later.replace(
            **{n: torch.cat([getattr(chosen, n), getattr(later, n)]) for n in names}
        )
        joined = {
            n: torch.cat([getattr(exact, n), getattr(result, n)])
            for n in ("x", "labels", "lam", "run")
        }
        return result.replace(**joined, selection=selection, notes=(note, *result.notes))

    def _notes(
        self, layer: InputLayer, sources: Sources, domain: str, evidence: str
    ) -> tuple[str, ...]:
        """Return notes for users: what the attack assumes about samples, and how many runs it made."""
        assumption = f"{self.name} assumes that samples or patches are sparse in their {domain}"
        if len(layer.shape) == 1 and domain == "coordinates":
            assumption += (
                ", because the shape of the samples is not known. For images, pass their shape. For time "
                "series, set the domain to series"
            )
        run_note = (
            f"{self.name}: {sources.rank} directions above the noise, {sources.runs[0]} runs on the layer, "
            f"{sources.runs[1]} runs on clusters of neurons; {evidence}"
        )
        if layer.initial_share != 1:
            run_note += f"; {layer.initial_share:.3g} times the initial weights were subtracted"
        return assumption, run_note


class UnmixOptimizerState(Unmix):
    """An attack that separates the optimizer state of the first layer into training samples."""

    name: ClassVar[str] = "unmix-moment"
    surface: ClassVar[str] = MOMENT
