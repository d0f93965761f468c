"""What every report must say beside its verdict: assumptions, and what the verdict is not."""

from __future__ import annotations

from residuum.auditing.fit import Fit
from residuum.auditing.verdict import NO_LEAK_FOUND, RESIDUAL_LIMIT, Verdict
from residuum.checkpoints import Inspection
from residuum.records import Checkpoint, Knowledge, Scores


def opening(checkpoint: Checkpoint, fit: Fit | None) -> tuple[str, ...]:
    """What an audit says before it attacks, the accuracy of the network as read first."""
    first = (
        "no training samples: the network as read cannot be checked" if fit is None else fit.line
    )
    return (first, *checkpoint.assumptions)


def assumptions(checkpoint: Checkpoint, inspection: Inspection) -> tuple[str, ...]:
    """What the attacks take for granted about this network."""
    if inspection.homogeneity_order is None:
        order = (
            "The network is not homogeneous: the theorem behind the KKT attack does not cover it."
        )
    else:
        order = (
            f"The network is homogeneous of order {inspection.homogeneity_order:g}; the KKT attack "
            "assumes that training came near a KKT point of its margin problem."
        )
    exchangeable = (
        "The held-out samples come from the distribution of the training samples, and were "
        "preprocessed alike: the control compares the one with the other."
    )
    return (
        order,
        exchangeable,
        *(f"Read from the file: {note}" for note in checkpoint.assumptions),
    )


def limitations(verdict: Verdict, scores: Scores | None, knowledge: Knowledge) -> tuple[str, ...]:
    """What a reader must not conclude."""
    found = [
        "This is evidence about the attacks that were run, with the knowledge and the time they "
        "had. It is no guarantee of privacy.",
        "A sample counts as recovered when its match is closer than 99% of chance; whether a person "
        "would recognise it is for the pictures to show. The interval of the count is naive: "
        "Clopper-Pearson for independent samples, chance not subtracted.",
    ]
    if verdict.outcome == NO_LEAK_FOUND:
        found.append(
            f"A residual within {RESIDUAL_LIMIT:g} says that the candidates explain the layers that "
            "were judged, not that they are the only ones that would; a narrow layer is explained "
            "easily. Layers that were not judged may hold what no attack looked for."
        )
    if scores is not None and scores.smallest_significant is not None:
        found.append(
            f"With {scores.pool} held-out samples at least {scores.smallest_significant} recovered "
            "samples are needed for significance."
        )
    if "train" in knowledge.provenance.values():
        found.append(
            "Facts granted from the training set make the strongest attacker; a real one may know "
            "less."
        )
    return tuple(found)
