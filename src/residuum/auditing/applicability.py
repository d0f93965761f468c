"""The table in which an audit lists what it measured of the network, and which attacks and checks it tried.

For each attack and each check, the table says whether it was tried, and why or why not. Terminal, report,
``result.json`` and dry run show the same table. Measured properties come first, because they decide which
attacks apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from residuum.attacks.unmixing.backbone import find_dense_layer
from residuum.attacks.unmixing.layers import find_input_layer
from residuum.auditing.outcomes import AttackOutcome
from residuum.evaluation.adapting import Fit
from residuum.networks.network import Network
from residuum.records import Knowledge, Record
from residuum.stationarity import by_layer, moved_layers
from residuum.surfaces.inspection import Inspection

MEASURED, TRIED, NOT_TRIED, PLANNED = "measured", "tried", "not tried", "to be tried"
MAX_NAMED = (
    6  # largest number of layer names that a row of the table lists, so that the row stays short
)


@dataclass(frozen=True, eq=False)
class Applies(Record):
    """One row of the table, about a measured property of the network, an attack or a check.

    Attributes:
        what: The property, attack or check that the row is about.
        status: "measured", "tried", "not tried" or "to be tried".
        reason: The measured value, or why the attack or check was tried or not.
    """

    what: str
    status: str
    reason: str


def describe_network(
    network: Network, inspection: Inspection, knowledge: Knowledge, fit: Fit | None
) -> tuple[Applies, ...]:
    """Return the measured properties of the network that decide which attacks apply.

    Args:
        network: The network.
        inspection: Properties of the network that were measured from its weights.
        knowledge: What the attacker knows.
        fit: How well the network fits the samples, None if there are no samples.

    Returns:
        One row of the table for each property.
    """
    arch, order = network.architecture, inspection.homogeneity_order
    is_live = network.live is not None
    property_texts = {
        "network": "kept as a live module, whose forward is run by automatic differentiation"
        if is_live
        else f"read as {network.arch}",
        "homogeneity": "none. If the weights are scaled by 0.7 to 1.4, the outputs do not scale by a power. "
        "The KKT theorem does not cover this network, but published attacks still worked on such networks"
        if order is None
        else f"order {order:g}. If the weights are scaled by 0.7 to 1.4, the outputs scale by this power. "
        "The KKT theorem covers this network",
        "layer on the input": _first_layer(network, knowledge),
        "layers that moved": _moved_layers(network, knowledge),
        "outputs": f"{arch.outputs}, read as {network.inferred_task}"
        + ("" if fit is None else f"; {fit.line}"),
    }
    return tuple(Applies(what, MEASURED, text) for what, text in property_texts.items())


def _first_layer(network: Network, knowledge: Knowledge) -> str:
    model, sample = network.module, network.sample_shape(knowledge)
    name, shape, sees_whole_sample = find_input_layer(model, sample)
    if not name:
        no_dense_layer_text = (
            "none is dense on the samples or on patches of them, "
            "so its rows are no mixtures of samples"
        )
        name, shape = find_dense_layer(model, sample)
        feature_shape_text = "x".join(map(str, shape))
        return (
            f"{no_dense_layer_text}. Behind the backbone, {name} receives features of shape "
            f"{feature_shape_text}"
            if name
            else no_dense_layer_text
        )
    if sees_whole_sample:
        return f"{name}, dense: its rows are mixtures of samples"
    return f"{name}, on patches {shape}: its rows are mixtures of patches"


def _moved_layers(network: Network, knowledge: Knowledge) -> str:
    if knowledge.theta0 is None:
        return "unknown, because the attacker does not know the initial weights (--init)"
    moved, layers = moved_layers(network.theta, knowledge.theta0), by_layer(network.theta)
    layer_names_text = ", ".join(moved[:MAX_NAMED]) + (", ..." if len(moved) > MAX_NAMED else "")
    return f"{len(moved)} of {len(layers)}" + (f": {layer_names_text}" if moved else "")


def list_attacks(rows: Iterable[AttackOutcome], status: str = TRIED) -> tuple[Applies, ...]:
    """Return one row of the table for each attack. Attacks that ran come first.

    Args:
        rows: The outcome of each attack, which says whether the attack ran.
        status: Text in the status column of the attacks that ran: "tried", or "to be tried" in a dry run.

    Returns:
        The rows with the reason why each attack ran or not.
    """
    sorted_outcomes = sorted(rows, key=lambda row: not row.ran)
    return tuple(
        Applies(row.name, status if row.ran else NOT_TRIED, row.reason) for row in sorted_outcomes
    )


def list_other_checks(**reasons: str) -> tuple[Applies, ...]:
    """Return one row of the table for each check that is no attack, such as the test of membership.

    Args:
        **reasons: The reason why each check was not tried, by name of the check. The reason is "" if the
            check was tried.

    Returns:
        One row of the table for each check.
    """
    return tuple(
        Applies(name.replace("_", " "), NOT_TRIED if reason else TRIED, reason or PURPOSES[name])
        for name, reason in reasons.items()
    )


PURPOSES = {
    "membership": "whether activation boundaries pass through training samples",
    "attributes": "whether an attacker can infer a missing value of a training record",
    "exposure": "which training samples have the largest risk of a leak. This ranking does not enter the "
    "verdict",
    "certificate": "how close the weights are to a KKT point of the samples",
    "uniqueness": "how much of each candidate all training sets share that fit the weights equally well",
}
