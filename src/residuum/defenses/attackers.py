"""Every way to attack a defended release; a defense holds only against the strongest of them.

unaware        stationarity on the weights, as one who does not know of the defense attacks
adapted        stationarity on what the strategy against this defense makes of the release
start          stationarity on the change of the weights, where they started from large ones, which are known
unmix          the first layer of the adapted release, less its start, taken apart
adapted-unmix  the same with a shift of the training data, inferred from that change, taken off the rows
told           adapted, with the secret shift handed over
told-unmix     adapted-unmix, with the secret shift handed over

One who knows of the defense and of the start has all but the last two, the unaware attack too; one who was
told has all. A shift that was rewritten into the biases is not in the rows, so there is nothing to take off
for the unmix ways. Where it was in the training data, taking it off helps on some networks and not on
others: plain unmix stays. A way that does not apply is refused with its reason, and the others go on.
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

TOLD = ("told", "told-unmix")  # of an attacker who was handed the secret
Way = tuple[str, Adapted | InputError]  # its name, and the attack to run or why there is none


def attackers(handed: Released, strategy: str, secret: Secret, rewritten: bool) -> Iterator[Way]:
    """The ways to attack a release, unaware first, told ones last.

    handed: with the public facts theta0, large (whether that start is), weight_decay and loss.
    strategy: of one who knows the defense, a key of ``ADAPTIVE``; "" where there is none.
    rewritten: the secret shift is in the biases, not in the training data.
    """
    known, attack = handed.knowledge, handed.attack
    unaware = adapted = Adapted(handed.checkpoints[0], known, attack)
    yield "unaware", unaware
    source = {**known.provenance, "theta0": "train"}
    with_start = known.replace(theta0=handed.public_facts["theta0"], provenance=source)
    change = NTK.like(attack, lam_init=SIGNED_RANGE)
    unmix = Unmix.like(attack)
    found: Adapted | InputError = unaware
    if strategy:
        found = _adapt(strategy, handed)
        if isinstance(found, InputError):
            yield "adapted", found
        else:
            adapted = found
            if adapted.findings.get("chosen") != "unaware":  # else it is the attack above
                yield "adapted", adapted
    if handed.public_facts["large"] and not isinstance(adapted.attack, NTK):
        yield "start", Adapted(adapted.checkpoint, with_start, change)
    yield "unmix", Adapted(adapted.checkpoint, with_start, unmix)
    retrained = secret.shift is not None and not rewritten

    def less_shift(way: Adapted | InputError) -> Adapted | InputError:
        if isinstance(way, InputError) or way.shift is None:
            return way
        rows = remove_shift(handed.checkpoints[0], handed.public_facts["theta0"], way.shift)
        return Adapted(rows, with_start, unmix)

    if adapted.shift is not None:
        # From the change of the weights: what the start holds is no sample, and of a bias it can be much.
        moved = replace(handed, checkpoints=(_change(handed),))
        yield "adapted-unmix", less_shift(_adapt(strategy, moved))
    elif retrained and isinstance(found, InputError):
        yield "adapted-unmix", found
    if secret.shift is not None:
        facts = handed.public_facts | {"shift": secret.shift, "rewritten": rewritten}
        told = _adapt("told-the-shift", replace(handed, public_facts=facts))
        if isinstance(told, Adapted):
            told = replace(told, findings={})  # nothing was inferred
        yield "told", told
        if retrained:
            yield "told-unmix", less_shift(told)


def attempt(way: Adapted | InputError, shape: tuple[int, ...]) -> Reconstruction | str:
    """What an attack brings back of samples of ``shape``, or why it was refused."""
    if isinstance(way, InputError):
        return way.message
    try:
        found = way.attack.run(way.checkpoint, way.knowledge)
    except InputError as problem:
        return problem.message
    if not len(found.x):
        return "no candidate came back"
    if found.x[0].numel() != math.prod(shape):
        return "patches came back, which cannot be compared with samples"
    return found


def strongest(
    ran: Mapping[str, tuple[int | None, float | None]],
) -> tuple[str, float | None, int] | None:
    """Of attacks that ran, name -> (recovered, p): the one that recovers most, by a tie the least likely.

    Its name, its p-value times the number of attacks and that number; None of none. The best of k has k
    chances to be lucky (Bonferroni); no probability is larger than 1.
    """
    if not ran:
        return None

    def strength(name: str) -> tuple[int, float]:
        recovered, p = ran[name]
        return recovered or 0, -1.0 if p is None else -p

    best = max(ran, key=strength)
    p = ran[best][1]
    return best, None if p is None else min(1.0, len(ran) * p), len(ran)


def either_sign(name: str, x: Tensor) -> Tensor:
    """What a way's candidates are scored as: of unmixed sources the sign is a guess, so both are tried."""
    return torch.cat([x, -x]) if "unmix" in name else x


def _change(handed: Released) -> Network:
    """The first release less the start, which is a public fact."""
    first, start = handed.checkpoints[0], handed.public_facts["theta0"]
    return first.replace(theta={name: t - start[name].to(t) for name, t in first.theta.items()})


def _adapt(strategy: str, handed: Released) -> Adapted | InputError:
    try:
        return ADAPTIVE[strategy](handed)
    except InputError as problem:
        return problem
