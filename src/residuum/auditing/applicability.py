"""What applies to a network, what was tried, what was not, and why.

One table in the terminal, the report, ``result.json`` and a dry run. Facts that were measured come first,
because the reasons below rest on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from residuum.attacks.unmixing.backbone import find_dense_layer
from residuum.attacks.unmixing.layers import find_input_layer
from residuum.auditing.inputs import Fit
from residuum.auditing.outcomes import AttackOutcome
from residuum.networks.network import Network
from residuum.records import Knowledge, Record
from residuum.stationarity import by_layer, moved_layers
from residuum.surfaces.inspection import Inspection

MEASURED, TRIED, NOT_TRIED, PLANNED = "measured", "tried", "not tried", "to be tried"
MOST_NAMED = 6  # layers: a row of the table is one line or two


@dataclass(frozen=True, eq=False)
class Applies(Record):
    """One row: a fact that was measured, or something that was tried or not, and why."""

    what: str
    status: str
    why: str


def facts(
    checkpoint: Network, inspection: Inspection, knowledge: Knowledge, fit: Fit | None
) -> tuple[Applies, ...]:
    """What the network is, by running it."""
    arch, order = checkpoint.architecture, inspection.homogeneity_order
    kept = checkpoint.live is not None
    rows = {
        "network": "kept as given: its forward is run by automatic differentiation"
        if kept
        else f"read as {checkpoint.arch}",
        "homogeneity": "none: weights scaled by 0.7 to 1.4 do not scale the outputs by a power, so the KKT "
        "theorem does not cover it; published attacks still worked"
        if order is None
        else f"order {order:g}: weights scaled by 0.7 to 1.4 scale the outputs so; the KKT theorem covers it",
        "layer on the input": _first(checkpoint, knowledge),
        "layers that moved": _moved(checkpoint, knowledge),
        "outputs": f"{arch.outputs}, taken as {checkpoint.inferred_task}"
        + ("" if fit is None else f"; {fit.line}"),
    }
    return tuple(Applies(what, MEASURED, why) for what, why in rows.items())


def _first(checkpoint: Network, knowledge: Knowledge) -> str:
    model, sample = checkpoint.module, checkpoint.sample_shape(knowledge)
    name, shape, whole = find_input_layer(model, sample)
    if not name:
        said = "none is dense on the samples or on patches of them: its rows are no mixtures of samples"
        name, shape = find_dense_layer(model, sample)
        maps = "x".join(map(str, shape))
        return f"{said}; behind the trunk {name} is given features {maps}" if name else said
    what = (
        "dense: its rows are mixtures of samples"
        if whole
        else f"on patches {shape}: its rows mix those"
    )
    return f"{name}, {what}"


def _moved(checkpoint: Network, knowledge: Knowledge) -> str:
    if knowledge.theta0 is None:
        return "not known: no start was granted (--init)"
    moved, every = moved_layers(checkpoint.theta, knowledge.theta0), by_layer(checkpoint.theta)
    few = ", ".join(moved[:MOST_NAMED]) + (", ..." if len(moved) > MOST_NAMED else "")
    return f"{len(moved)} of {len(every)}" + (f": {few}" if moved else "")


def tried(rows: Iterable[AttackOutcome], run: str = TRIED) -> tuple[Applies, ...]:
    """Every attack, those that run first; run: what is said of these."""
    ordered = sorted(rows, key=lambda row: not row.ran)
    return tuple(Applies(row.name, run if row.ran else NOT_TRIED, row.reason) for row in ordered)


def others(**why_not: str) -> tuple[Applies, ...]:
    """Everything else of an audit, by name: why it was not tried, "" where it was."""
    return tuple(
        Applies(name.replace("_", " "), NOT_TRIED if why else TRIED, why or BESIDE[name])
        for name, why in why_not.items()
    )


BESIDE = {
    "membership": "whether activation boundaries pass through training samples",
    "exposure": "which samples are at risk, by weights and data; it decides nothing",
    "certificate": "how near the weights are to a KKT point of the samples",
    "uniqueness": "what other training sets keep of the candidates",
}
