"""The attackers of a defended release. A defense is only as good as its result against the strongest attack.

The stationarity attack searches samples whose weighted sum of gradients fits the weights. The attack unmix
separates the rows of the first layer into samples. A shift is an image that a defense adds to all samples.

unaware        does not know of the defense, and runs the stationarity attack on the weights
adapted        undoes the defense as far as possible (its strategy), then runs the stationarity attack
start          runs the stationarity attack on the weight update, if the initial weights are large
unmix          applies the same strategy, then runs unmix on the update of the first layer's weights
adapted-unmix  infers the shift of the training data, removes it from the first layer, then runs unmix
told           knows the secret shift, and otherwise does the same as adapted
told-unmix     knows the secret shift, and otherwise does the same as adapted-unmix

An attacker who knows the defense and the initial weights can run every attack except told and told-unmix.
An attacker who also knows the secret shift of the owner can run every attack.

If a defense rewrites the shift into the biases, the shift is not in the rows of the first layer, and unmix
needs no correction. If the shift is in the training data, removing the shift from the rows helps only on some
networks. So the attack unmix without this correction is always tried too. If an attack does not apply, it is
refused with a reason, and the other attacks are run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from residuum.attacks.defense_aware.strategies import (
    ADAPTIVE,
    SIGNED_RANGE,
    Adapted,
    Released,
    remove_shift,
)
from residuum.attacks.stationarity.attack import NTK
from residuum.attacks.unmixing.attack import Unmix
from residuum.defenses.catalog import Secret
from residuum.errors import InputError
from residuum.networks.network import Network
from residuum.records import Reconstruction

# Names of the simulated attackers who know the shift (an offset of all inputs) that the owner keeps secret.
INFORMED = ("told", "told-unmix")
# A pair: the name of an attacker, and the attack to run or the error that says why the attack is refused.
Attacker = tuple[str, Adapted | InputError]


def make_attackers(
    released: Released, strategy: str, secret: Secret, in_biases: bool
) -> Iterator[Attacker]:
    """Make the attackers of a defended network. First comes the attacker who knows least.

    Args:
        released: The defended release. Its attribute ``public_facts`` has the keys ``theta0`` (the initial
            weights), ``large`` (whether the initial weights are large), ``weight_decay`` and ``loss``.
        strategy: Name of the strategy against the defense, a key of ``ADAPTIVE``. Use "" for no strategy.
        secret: The secret of the owner, with the shift of the inputs.
        in_biases: Whether the defense rewrote the secret shift into the biases. Otherwise the shift is in the
            training data.

    Yields:
        The name of each attacker, with the attack to run or the error that says why it is refused.
    """
    knowledge, attack = released.knowledge, released.attack
    unaware_attacker = adapted = Adapted(released.checkpoints[0], knowledge, attack)
    yield "unaware", unaware_attacker
    provenance = {**knowledge.provenance, "theta0": "train"}
    knowledge_with_theta0 = knowledge.replace(
        theta0=released.public_facts["theta0"], provenance=provenance
    )
    ntk_attack = NTK.like(attack, lam_init=SIGNED_RANGE)
    unmix_attack = Unmix.like(attack)
    adapted_or_error: Adapted | InputError = unaware_attacker
    if strategy:
        adapted_or_error = _adapt(strategy, released)
        if isinstance(adapted_or_error, InputError):
            yield "adapted", adapted_or_error
        else:
            adapted = adapted_or_error
            # The unaware attacker does not know the defense. If the strategy chose the same attack, do not
            # yield this attack twice.
            if adapted.findings.get("chosen") != "unaware":
                yield "adapted", adapted
    if released.public_facts["large"] and not isinstance(adapted.attack, NTK):
        yield "start", Adapted(adapted.checkpoint, knowledge_with_theta0, ntk_attack)
    yield "unmix", Adapted(adapted.checkpoint, knowledge_with_theta0, unmix_attack)
    is_shift_in_data = secret.shift is not None and not in_biases

    def unmix_without_shift(attacker: Adapted | InputError) -> Adapted | InputError:
        if isinstance(attacker, InputError) or attacker.shift is None:
            return attacker
        initial_weights = released.public_facts["theta0"]
        network = remove_shift(released.checkpoints[0], initial_weights, attacker.shift)
        return Adapted(network, knowledge_with_theta0, unmix_attack)

    if adapted.shift is not None:
        # Infer the shift of the inputs from the weight update, because the initial weights say nothing
        # about the samples.
        weight_update = replace(released, checkpoints=(_subtract_theta0(released),))
        yield "adapted-unmix", unmix_without_shift(_adapt(strategy, weight_update))
    elif is_shift_in_data and isinstance(adapted_or_error, InputError):
        yield "adapted-unmix", adapted_or_error
    if secret.shift is not None:
        facts_with_shift = released.public_facts | {"shift": secret.shift, "rewritten": in_biases}
        told_attacker = _adapt("told-the-shift", replace(released, public_facts=facts_with_shift))
        if isinstance(told_attacker, Adapted):
            # This attacker knows the shift of the inputs, so there is no estimate of the shift to report.
            told_attacker = replace(told_attacker, findings={})
        yield "told", told_attacker
        if is_shift_in_data:
            yield "told-unmix", unmix_without_shift(told_attacker)


def run_attacker(attacker: Adapted | InputError, shape: tuple[int, ...]) -> Reconstruction | str:
    """Run the attack of a simulated attacker.

    Args:
        attacker: The attack to run, or the error that says why the attack is refused.
        shape: Shape of a sample.

    Returns:
        The reconstruction. If the attack was refused or has no candidates of this shape, the reason as text.
    """
    if isinstance(attacker, InputError):
        return attacker.message
    try:
        reconstruction = attacker.attack.run(attacker.checkpoint, attacker.knowledge)
    except InputError as problem:
        return problem.message
    if not len(reconstruction.x):
        return "the attack has no candidates"
    if reconstruction.x[0].numel() != math.prod(shape):
        return "the candidates are patches, which cannot be compared with samples"
    return reconstruction


def find_strongest(
    results: Mapping[str, tuple[int | None, float | None]],
) -> tuple[str, float | None, int] | None:
    """Find the attack that recovered most samples. In a tie, the smallest p-value wins.

    Args:
        results: Number of recovered samples and p-value of each attack, by the name of the attack.

    Returns:
        The name of the strongest attack, its p-value and the number of attacks. None if ``results`` is
        empty. The p-value is multiplied by the number of attacks (Bonferroni) and is at most 1, because
        the best of k attacks has k chances to be lucky.
    """
    if not results:
        return None

    def strength(name: str) -> tuple[int, float]:
        recovered, p_value = results[name]
        return recovered or 0, -1.0 if p_value is None else -p_value

    strongest = max(results, key=strength)
    p_value = results[strongest][1]
    return strongest, None if p_value is None else min(1.0, len(results) * p_value), len(results)


def add_negated(attacker: str, x: Tensor) -> Tensor:
    """Add negated candidates if the attack is "unmix", which cannot determine the sign of a sample.

    Args:
        attacker: Name of the attacker, such as "adapted-unmix".
        x: (k, *shape) candidates.

    Returns:
        The candidates to score: (2k, *shape) with the negated ones, or ``x`` for another attack.
    """
    return torch.cat([x, -x]) if "unmix" in attacker else x


def _subtract_theta0(released: Released) -> Network:
    """Compute the weight update of the released network: its weights minus its initial weights."""
    first, theta0 = released.checkpoints[0], released.public_facts["theta0"]
    return first.replace(theta={name: t - theta0[name].to(t) for name, t in first.theta.items()})


def _adapt(strategy: str, released: Released) -> Adapted | InputError:
    try:
        return ADAPTIVE[strategy](released)
    except InputError as problem:
        return problem
